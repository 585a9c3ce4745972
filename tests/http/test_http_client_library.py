"""The official OpenAI client against a real listener, on the real clock: it runs on threads of its own."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec
import openai
import pytest
import trio

from superfluidd.config import Settings
from superfluidd.daemon.model import Model
from superfluidd.daemon.service import Service
from superfluidd.http import generate, server
from superfluidd.http.app import create_app
from tests.conftest import Simulated, simulated_spec

pytestmark = pytest.mark.process

T = TypeVar("T")
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


class Served:
    """A served service and a client for it."""

    def __init__(self, service: Service, url: str) -> None:
        self.service = service
        self.client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20)

    async def call(self, function: Callable[[openai.OpenAI], T]) -> T:
        """Run something blocking with the client."""
        return await trio.to_thread.run_sync(function, self.client)


@pytest.fixture
async def served(nursery: trio.Nursery) -> AsyncIterator[Served]:
    """Eight lanes at ten times the usual speed."""
    simulated = Simulated(msgspec.structs.replace(simulated_spec(lanes=8, window=65536), simulated_speed=10.0))
    model = Model("simulated", "", simulated.start, itertools.count(1))
    await nursery.start(model.run)
    service = Service(Settings(engine="simulated", temperature=0.0), {"simulated": model})
    listener, shutdown = server.open_listener("127.0.0.1", 0), trio.Event()
    await nursery.start(server.serve, create_app(service), listener, shutdown)
    running = Served(service, server.url(listener, "127.0.0.1"))
    yield running
    running.client.close()
    nursery.cancel_scope.cancel()


def say(client: openai.OpenAI, **fields: Any) -> str:
    """A whole reply's text."""
    reply = client.chat.completions.create(
        model="simulated", messages=HELLO, max_tokens=40, extra_body={"ignore_eos": True}, **fields
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 40
    return reply.choices[0].message.content or ""


def stream(client: openai.OpenAI) -> str:
    """The same, streamed."""
    text = ""
    for chunk in client.chat.completions.create(
        model="simulated", messages=HELLO, max_tokens=40, stream=True, extra_body={"ignore_eos": True}
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
    return text


async def test_a_chat_streams_what_it_says(served: Served) -> None:
    text = await served.call(say)
    assert text
    assert await served.call(stream) == text


async def test_eight_clients_at_once_all_finish(served: Served) -> None:
    texts: list[str] = []

    async def one() -> None:
        texts.append(await served.call(stream))

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(one)
    assert len(texts) == 8
    assert len(set(texts)) == 1


async def test_the_other_calls_parse(served: Served) -> None:
    listed = await served.call(lambda client: [model.id for model in client.models.list()])
    assert listed == ["simulated"]
    assert (await served.call(lambda client: client.models.retrieve("simulated"))).id == "simulated"
    text = await served.call(
        lambda client: client.completions.create(model="simulated", prompt=["a", "b"], max_tokens=5, n=2, logprobs=2)
    )
    assert [choice.index for choice in text.choices] == [0, 1, 2, 3]
    chat = await served.call(
        lambda client: client.chat.completions.create(
            model="simulated", messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=3, seed=1
        )
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content


@pytest.mark.parametrize("streams", [False, True])
async def test_refusals_are_the_librarys_own_errors(served: Served, streams: bool) -> None:
    def ask(client: openai.OpenAI, **fields: Any) -> Any:
        return client.chat.completions.create(**{"model": "simulated", "messages": HELLO, "stream": streams, **fields})

    with pytest.raises(openai.NotFoundError, match="served: simulated"):
        await served.call(lambda client: ask(client, model="gpt-9"))
    with pytest.raises(openai.BadRequestError) as caught:
        await served.call(lambda client: ask(client, temperature=-1))
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        await served.call(lambda client: ask(client, messages=[{"role": "user", "content": "x" * 70_000}]))
    assert caught.value.code == "context_length_exceeded"


async def test_a_late_error_is_an_exception_of_the_librarys(served: Served) -> None:
    def watch(client: openai.OpenAI) -> str:
        text = ""
        for chunk in client.chat.completions.create(
            model="simulated",
            messages=HELLO,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"x-request-id": "watched"},
        ):
            text += chunk.choices[0].delta.content or ""
            if len(text) > 20:
                trio.from_thread.run_sync(cancel)
        return text

    def cancel() -> None:
        if served.service.lanes():
            served.service.cancel("watched")

    with pytest.raises(openai.APIError, match="cancelled") as caught:
        await served.call(watch)
    assert caught.value.code == "cancelled"


async def test_leaving_a_stream_frees_its_lane(served: Served) -> None:
    def leave(client: openai.OpenAI) -> None:
        with client.chat.completions.create(
            model="simulated", messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        ) as chunks:
            for _ in zip(range(5), chunks, strict=False):
                pass

    await served.call(leave)
    with trio.fail_after(2):
        while served.service.lanes():  # noqa: ASYNC110  # a view has no event to wait for
            await trio.sleep(0.01)


async def test_a_long_prompt_is_rendered_off_the_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "THREAD_BYTES", 100)
    threads: list[bool] = []
    model = served.service.models["simulated"]
    render = model.template.render

    def watched(*args: Any, **kwargs: Any) -> str:
        try:
            trio.lowlevel.current_task()
        except RuntimeError:
            threads.append(True)
        else:
            threads.append(False)
        return render(*args, **kwargs)

    monkeypatch.setattr(model.template, "render", watched)
    for size in (10, 200):
        await served.call(
            lambda client, size=size: client.chat.completions.create(  # type: ignore[misc]
                model="simulated", messages=[{"role": "user", "content": "x" * size}], max_tokens=1
            )
        )
    assert threads == [False, True]

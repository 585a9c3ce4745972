"""Class and batch-invariance headers, signs of life while waiting, and latency metrics, on virtual time."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import trio
from quart_trio.testing import TrioClient
from trio.testing import MockClock

from superfluidd.config import Settings
from superfluidd.daemon.model import Model
from superfluidd.daemon.service import Service
from superfluidd.http.app import create_app
from tests.conftest import Simulated, simulated_spec
from tests.http.raw import Server, frames, text_of, until
from tests.http.test_http_pages import metrics

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SHORT: dict[str, Any] = {"messages": HELLO, "max_tokens": 4, "ignore_eos": True}
LONG: dict[str, Any] = {"messages": HELLO, "ignore_eos": True, "max_tokens": 900}


@pytest.fixture
def simulated() -> Simulated:
    """Two lanes and a spare sequence, at a tenth of the usual speed."""
    return Simulated(msgspec.structs.replace(simulated_spec(lanes=2), simulated_speed=0.1, spare=1))


async def client_of(nursery: trio.Nursery, simulated: Simulated, settings: Settings) -> TrioClient:
    model = Model("simulated", "", simulated.start, itertools.count(1))
    await nursery.start(model.run)
    app = create_app(Service(settings, {"simulated": model}))
    return app.test_client()  # type: ignore[return-value]


async def served_class(client: TrioClient, **headers: str) -> str:
    response = await client.post(CHAT, json=SHORT, headers=headers)
    assert response.status_code == 200
    return str(response.headers["x-superfluid-qos"])


async def test_the_effective_class_is_echoed(autojump_clock: MockClock, client: TrioClient) -> None:
    assert await served_class(client) == "agent"
    assert await served_class(client, **{"x-superfluid-qos": "INLINE_completion"}) == "completion"
    streamed = await client.post(CHAT, json={**SHORT, "stream": True}, headers={"x-superfluid-qos": "3"})
    assert streamed.headers["x-superfluid-qos"] == "background"
    text = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert text.headers["x-superfluid-qos"] == "agent"


async def test_the_default_class_is_a_setting_and_headers_can_be_ignored(
    autojump_clock: MockClock, nursery: trio.Nursery, simulated: Simulated
) -> None:
    client = await client_of(nursery, simulated, Settings(http_default_qos="background"))
    assert await served_class(client) == "background"
    assert await served_class(client, **{"x-superfluid-qos": "agent"}) == "agent"
    deaf = await client_of(nursery, simulated, Settings(http_default_qos="completion", no_http_qos_header=True))
    ignored = {"x-superfluid-qos": "nonsense", "x-superfluid-batch-invariant": "true"}
    assert await served_class(deaf, **ignored) == "completion"
    nursery.cancel_scope.cancel()


async def test_batch_invariance_is_forbidden_unless_allowed(
    autojump_clock: MockClock, client: TrioClient, nursery: trio.Nursery, simulated: Simulated
) -> None:
    for word in ("1", "TRUE", "yes", " on "):
        response = await client.post(CHAT, json=SHORT, headers={"x-superfluid-batch-invariant": word})
        assert response.status_code == 403
        error = (await response.get_json())["error"]
        assert (error["code"], error["param"]) == ("permission_denied", "x-superfluid-batch-invariant")
        assert "--http-allow-batch-invariant" in error["message"]
    for word in ("0", "false", "No", "off"):
        assert await served_class(client, **{"x-superfluid-batch-invariant": word}) == "agent"
    wrong = await client.post(CHAT, json=SHORT, headers={"x-superfluid-batch-invariant": "perhaps"})
    assert wrong.status_code == 400
    assert (await wrong.get_json())["error"]["param"] == "x-superfluid-batch-invariant"
    allowed = await client_of(nursery, simulated, Settings(http_allow_batch_invariant=True))
    alone = await allowed.post(CHAT, json=SHORT, headers={"x-superfluid-batch-invariant": "true"})
    shared = await allowed.post(CHAT, json=SHORT)
    assert alone.status_code == 200
    said = [(await reply.get_json())["choices"][0]["message"]["content"] for reply in (alone, shared)]
    assert said[0]
    nursery.cancel_scope.cancel()


async def test_a_chat_pauses_a_background_stream_which_goes_on_byte_for_byte(
    autojump_clock: MockClock, server: Server, service: Service
) -> None:
    """The paused stream says so at once and every two seconds, and resumes with nothing repeated."""
    uncut = await (await server.connect()).ask("POST", CHAT, {**LONG, "max_tokens": 60, "stream": True})
    background = [await server.connect() for _ in range(2)]
    for stream in background:
        await stream.send(
            "POST", CHAT, {**LONG, "max_tokens": 60, "stream": True}, **{"x-superfluid-qos": "background"}
        )
        await stream.response()
    await until(lambda: len(service.lanes()) == 2 and all(lane.generated > 5 for lane in service.lanes()))
    chat = await server.connect()
    start = trio.current_time()
    status, _ = await chat.ask(
        "POST", CHAT, {**LONG, "max_tokens": 80, "stream": True}, **{"x-superfluid-qos": "interactive"}
    )
    assert status == 200
    assert trio.current_time() - start > 6
    bodies = [await stream.rest() for stream in background]
    paused = max(bodies, key=lambda body: body.count(b": paused"))
    assert paused.count(b": paused class=background position=1\n\n") >= 3, "at once, and every two seconds"
    assert min(body.count(b": paused") for body in bodies) == 0
    for body in bodies:
        assert text_of(frames(body)) == text_of(frames(uncut[1]))
        assert body.endswith(b"data: [DONE]\n\n")
    (view,) = service.status().models
    assert view.preemptions == {"interactive": 0, "completion": 0, "agent": 0, "background": 1}


async def test_a_stream_that_is_being_prefilled_says_how_far(
    autojump_clock: MockClock, server: Server, service: Service
) -> None:
    client = await server.connect()
    long = {**SHORT, "messages": [{"role": "user", "content": "Hello " * 120}], "stream": True}
    await client.send("POST", CHAT, long)
    await client.response()
    body = await client.rest()
    total = service.status().models[0].prefill_tokens
    assert b": prefill class=agent " in body
    assert b"/%d\n\n" % total in body


async def test_latencies_are_counted_by_class(autojump_clock: MockClock, client: TrioClient) -> None:
    for qos in ("interactive", "background", "background"):
        await client.post(CHAT, json=SHORT, headers={"x-superfluid-qos": qos})
    await trio.sleep(1)
    seen = await metrics(client)
    for name in ("queue_wait", "ttft"):
        counts = {qos: seen[f"superfluid_{name}_seconds_count", qos, "simulated"] for qos in ("interactive", "agent")}
        assert counts == {"interactive": 1, "agent": 0}
        assert seen[f"superfluid_{name}_seconds_count", "background", "simulated"] == 2
    # Four tokens of which three follow another: 9 ms a round at a tenth of the speed.
    assert seen["superfluid_inter_token_seconds_count", "background", "simulated"] == 6
    assert seen["superfluid_inter_token_seconds_sum", "background", "simulated"] == pytest.approx(6 * 0.09)
    assert seen["superfluid_inter_token_seconds_bucket", "background", "0.05", "simulated"] == 0
    assert seen["superfluid_inter_token_seconds_bucket", "background", "0.1", "simulated"] == 6
    assert seen["superfluid_prefill_budget_tokens", "simulated"] > 0
    assert seen["superfluid_preemptions_total", "background", "simulated"] == 0
    assert seen["superfluid_starvation_grants_total", "background", "simulated"] == 0
    assert seen["superfluid_abandoned_prefill_tokens_total", "simulated"] == 0

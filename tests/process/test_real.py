"""The whole product on the real engine: the daemon, llama.cpp in its worker, the bundled model, real clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.process.harness import Daemon, run, text_of, wait_for

pytestmark = [pytest.mark.process, pytest.mark.engine_llamacpp]

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def daemon(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("daemon")
    with Daemon(directory, str(bundled_model), "--max-batch", "4", "--max-context", "512") as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def messages(question: str) -> list[dict[str, str]]:
    # Without a system message the model's own template adds a persona, with which it answers in French.
    return [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": question}]


def chat(client: openai.OpenAI, question: str, **fields: object) -> str:
    text = ""
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model="SmolLM2-135M-Instruct.Q4_1",
        messages=messages(question),
        temperature=0,
        stream=True,
        **fields,
    )
    with stream:
        for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    return text


def test_the_openai_client_streams_a_chat(client: openai.OpenAI) -> None:
    assert "Paris" in chat(client, QUESTION, max_tokens=30)


def test_streamed_text_equals_unstreamed_text(client: openai.OpenAI) -> None:
    question = "Write one sentence about café culture in Zürich, with an emoji."
    streamed = chat(client, question, max_tokens=60)
    whole = client.chat.completions.create(
        model="SmolLM2-135M-Instruct.Q4_1",
        messages=messages(question),  # type: ignore[arg-type]
        temperature=0,
        max_tokens=60,
    )
    assert whole.choices[0].message.content == streamed
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 5


def test_a_seed_repeats_a_sampled_reply(daemon: Daemon) -> None:
    fields = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 1234}
    first, second = (daemon.complete("Once upon a time", **fields)["choices"][0]["text"] for _ in range(2))
    other = daemon.complete("Once upon a time", **fields | {"seed": 99})["choices"][0]["text"]
    assert first == second
    assert first != other


def test_eight_clients_at_once_all_finish_and_sfctl_shows_the_lanes(daemon: Daemon, client: openai.OpenAI) -> None:
    replies: dict[int, str] = {}

    def one(number: int) -> None:
        replies[number] = chat(client, QUESTION, max_tokens=40, extra_body={"ignore_eos": True})

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    lanes = wait_for(
        lambda: len(found := json.loads(daemon.sfctl("lanes", "--json").stdout)["lanes"]) == 4 and found,
        30,
        "four busy lanes",
    )
    assert {lane["lane"] for lane in lanes} == {0, 1, 2, 3}
    for thread in threads:
        thread.join(120)
    assert len(replies) == 8
    assert all("Paris" in text for text in replies.values())


def test_a_worker_killed_in_mid_stream_costs_no_token(daemon: Daemon) -> None:
    prompt = f"<|im_start|>user\n{QUESTION} Explain at length.<|im_end|>\n<|im_start|>assistant\n"
    fields = {"max_tokens": 120, "ignore_eos": True}
    whole, _ = text_of(daemon.stream(prompt, **fields))
    before = daemon.worker()
    text, reason = "", None
    for count, chunk in enumerate(daemon.stream(prompt, **fields)):
        assert "error" not in chunk
        text += "".join(choice["text"] for choice in chunk["choices"])
        reason = next((choice["finish_reason"] for choice in chunk["choices"]), None) or reason
        if count == 5:
            at_kill = text
            before.kill()
    assert daemon.worker().pid != before.pid
    assert reason == "length"
    assert whole.startswith(at_kill)
    if text != whole:
        # A prefill batch rounds differently from decode rounds, so a near-tie may fall the other way: then the text
        # must still be this prefix plus a continuation of its own, with as many tokens and nothing said twice.
        shared = len(at_kill)
        assert text[:shared] == whole[:shared]
        assert not text[shared:].startswith(at_kill[-30:])
        tokens = daemon.complete(prompt + text, max_tokens=1)["usage"]["prompt_tokens"]
        base = daemon.complete(prompt, max_tokens=1)["usage"]["prompt_tokens"]
        assert abs(tokens - base - 120) <= 3


def test_sfctl_answers_during_a_long_prefill(daemon: Daemon) -> None:
    thread = threading.Thread(target=lambda: daemon.complete("word " * 480, max_tokens=4))
    thread.start()
    time.sleep(0.2)
    start = time.monotonic()
    answer = daemon.sfctl("status")
    assert answer.returncode == 0
    assert time.monotonic() - start < 3
    thread.join(60)


def test_a_stream_that_fills_its_window_ends_with_length_beside_unharmed_neighbours(daemon: Daemon) -> None:
    neighbours = ["The three primary colours are", "Water boils at a temperature of"]
    fields = {"max_tokens": 60, "ignore_eos": True}

    def together(third: dict[str, object]) -> tuple[dict[int, str], tuple[str, str | None]]:
        texts: dict[int, str] = {}
        threads = [
            threading.Thread(
                target=lambda n=n: texts.__setitem__(n, text_of(daemon.stream(neighbours[n], **fields))[0])
            )
            for n in range(2)
        ]
        for thread in threads:
            thread.start()
        mine = text_of(daemon.stream("one two three four " * 115, ignore_eos=True, **third))
        for thread in threads:
            thread.join(60)
        return texts, mine

    calm, _ = together({"max_tokens": 2})
    full, (_, reason) = together({"max_tokens": 10_000})
    assert reason == "length"
    assert full == calm


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(daemon: Daemon) -> None:
    reply = daemon.http.post("/v1/completions", json={"prompt": [5] * 513, "stream": True})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "513" in error["message"]
    assert "512" in error["message"]
    assert daemon.complete([5] * 512, max_tokens=9)["usage"]["completion_tokens"] == 1


def test_a_small_shared_pool_makes_requests_wait_and_none_fail(bundled_model: Path, tmp_path: Path) -> None:
    argv = ("--kv-layout", "shared", "--pool-tokens", "1024", "--max-batch", "4", "--max-context", "1024")
    with Daemon(tmp_path, str(bundled_model), *argv) as daemon:
        usages: list[int] = []
        waited: list[int] = []

        def one(number: int) -> None:
            reply = daemon.complete(f"Story number {number}:", max_tokens=400, ignore_eos=True)
            usages.append(reply["usage"]["completion_tokens"])

        threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            waited.append(daemon.status()["models"][0]["queued"])
            time.sleep(0.2)
        assert usages == [400] * 4
        assert max(waited) >= 2  # more in the moment before the first two are seated

        def settled() -> bool:
            model = daemon.status()["models"][0]
            return model["lanes_busy"] == 0 and model["cells_used"] == model["cells_kept"] <= 0.85 * 1024

        wait_for(settled, 10, "an idle pool with nothing in it but prefixes")


def test_check_says_what_would_be_served(bundled_model: Path) -> None:
    result = run("check", str(bundled_model), "--max-batch", "4", "--max-context", "1024")
    assert result.returncode == 0, result.stderr
    for words in ("llama", "Q4_1", "1024", "per-sequence", "4"):
        assert words in result.stdout

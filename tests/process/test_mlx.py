"""The whole product on MLX with a tiny model: a daemon, a worker, streams that pause, crash and come back."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.engine import tiny_mlx
from tests.process.harness import Daemon, Stream, generating, run, text_of, wait_for

pytestmark = [pytest.mark.process, pytest.mark.engine_mlx]

OPTIONS = ("--max-batch", "2", "--max-context", "2048")
PROMPT = "Once upon a time there was a fox. " * 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mlx.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def daemon(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), str(model), *OPTIONS) as running:
        yield running


def test_it_is_served_by_its_directorys_name_and_says_what_it_is(daemon: Daemon) -> None:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        assert [one.id for one in client.models.list()] == ["tiny"]
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, extra_body={"ignore_eos": True}
        )
        assert chat.usage is not None
        assert (chat.usage.completion_tokens, chat.choices[0].finish_reason) == (5, "length")
    models = daemon.sfctl("models").stdout
    for word in ("mlx ", "per-sequence", "any beginning of a prompt", "after a step"):
        assert word in models, models
    owners = {one["owner"]: one for one in json.loads(daemon.sfctl("mem", "--json").stdout)["owners"]}
    assert owners["pool"]["size"] < owners["pool"]["most"], "KV takes memory as it grows"


def test_a_prompt_starts_from_what_another_left(daemon: Daemon) -> None:
    first = daemon.complete(PROMPT, max_tokens=4, ignore_eos=True)
    again = daemon.complete(PROMPT, max_tokens=4, ignore_eos=True)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


def test_a_chat_takes_a_background_lane_whose_stream_pauses_and_goes_on(daemon: Daemon) -> None:
    alone = [text_of(daemon.stream(f"Story {number}", max_tokens=1500, ignore_eos=True)) for number in range(2)]
    background = {"x-superfluid-qos": "background"}
    streams = [Stream(daemon, f"Story {number}", background, max_tokens=1500) for number in range(2)]
    wait_for(lambda: generating(daemon, 2), 60, "two busy lanes")
    chat = Stream(daemon, "Quick question", {"x-superfluid-qos": "interactive"}, max_tokens=8)
    chat.join(60)
    assert chat.reason == "length"
    for stream in streams:
        stream.join(120)
    assert [(stream.text, stream.reason) for stream in streams] == alone
    assert sum(any(": paused class=background" in line for line in stream.comments) for stream in streams) == 1


def test_a_worker_that_is_killed_is_replaced_and_its_stream_goes_on(daemon: Daemon) -> None:
    expected = text_of(daemon.stream("Crash", max_tokens=1200, ignore_eos=True))
    stream = Stream(daemon, "Crash", {}, max_tokens=1200)
    wait_for(lambda: generating(daemon, 1), 60, "a busy lane")
    os.kill(daemon.worker().pid, signal.SIGKILL)
    stream.join(120)
    assert (stream.text, stream.reason) == expected
    assert daemon.status()["models"][0]["respawns"] == 1


def test_a_client_that_goes_away_frees_its_lane(daemon: Daemon) -> None:
    chunks = daemon.stream("Gone", max_tokens=1900, ignore_eos=True)
    next(chunks)
    chunks.close()
    wait_for(lambda: daemon.status()["models"][0]["lanes_busy"] == 0, 30, "a free lane")


def test_sessions_resume_after_the_daemon_was_killed_without_being_fed_again(model: Path, tmp_path: Path) -> None:
    park = ("--park", "--park-dir", str(tmp_path / "parked"), "--host-cache-gb", "0")
    with Daemon(tmp_path, str(model), *OPTIONS, *park) as first:
        said = first.complete(PROMPT, max_tokens=16, ignore_eos=True)["choices"][0]["text"]
        wait_for(lambda: first.status()["models"][0]["parked"] == 1, 60, "a parked session")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(30)
    with Daemon(tmp_path, str(model), *OPTIONS, *park) as second:
        reply = second.complete(PROMPT, max_tokens=16, ignore_eos=True)
        assert reply["choices"][0]["text"] == said
        usage = reply["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    # The same name, other weights: what was parked is not believed.
    other = tiny_mlx.write(tmp_path / "tiny")
    file = other / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with Daemon(tmp_path, str(other), *OPTIONS, *park) as third:
        assert "made by another model" in "".join(third.output)
        assert third.complete(PROMPT, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_both_engines_are_served_at_once_and_can_be_loaded_at_run_time(
    model: Path, bundled_model: Path, tmp_path: Path
) -> None:
    with Daemon(tmp_path, str(bundled_model), *OPTIONS) as running:
        added = running.sfctl("load", str(model))
        assert added.returncode == 0, added.stderr
        assert running.complete("hi", model="tiny", max_tokens=3)["model"] == "tiny"
        engines = [one["engine"].split()[0] for one in running.status()["models"]]
        assert engines == ["llamacpp", "mlx"]
        assert running.sfctl("unload", "tiny").returncode == 0
        refused = running.sfctl("load", str(tmp_path))
        assert refused.returncode == 1
        assert "is a directory without config.json" in refused.stderr


def test_a_bad_directory_is_refused_at_the_start_with_what_to_do(tmp_path: Path) -> None:
    code = tiny_mlx.write(tmp_path / "code", {"model_file": "mine.py"})
    for path, words in ((code, "--trust-model-code"), (tmp_path, "without config.json")):
        result = run("check", str(path))
        assert result.returncode == 3
        assert words in result.stderr

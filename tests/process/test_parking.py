"""Sessions parked on disk outlive a daemon that is killed, and what is wrong with the disk only costs time."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import Daemon, run, wait_for

pytestmark = [pytest.mark.process]

TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    TURN.format(f"Story {number}: " + f"the fox number {number} ran over the hill. " * 20) for number in range(3)
]


def daemon(tmp_path: Path, model: Path | None, *options: str) -> Daemon:
    which = (str(model),) if model is not None else ("--engine", "simulated")
    park = ("--park", "--park-dir", str(tmp_path / "parked"), "--host-cache-gb", "0")
    return Daemon(tmp_path, *which, "--max-batch", "2", "--max-context", "1024", *park, *options)


def view(running: Daemon) -> Any:
    return running.status()["models"][0]


def turns(running: Daemon, count: int = 3) -> list[tuple[str, int]]:
    """A reply to each prompt, and how many of its prompt tokens were cached."""
    replies = [running.complete(prompt, max_tokens=16) for prompt in PROMPTS[:count]]
    return [
        (reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]) for reply in replies
    ]


def artifacts(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "parked").rglob("*.kv"))


@pytest.mark.engine_llamacpp
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_sessions_resume_after_the_daemons_end_without_being_fed_again(
    bundled_model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    with daemon(tmp_path, bundled_model) as first:
        turns(first)
        # Rounding may differ where a prompt is fed whole; a second time it goes on from its KV, as after the restart.
        said = [text for text, _ in turns(first)]
        if how is signal.SIGKILL:
            wait_for(lambda: view(first)["parked"] == view(first)["prefixes"], 60, "everything parked")
        first.process.send_signal(how)
        first.process.wait(30)
    assert len(artifacts(tmp_path)) >= 3
    with daemon(tmp_path, bundled_model) as second:
        assert view(second)["parked"] == len(artifacts(tmp_path))
        for (text, cached), before, prompt in zip(turns(second), said, PROMPTS, strict=True):
            assert text == before
            fed = second.complete(prompt, max_tokens=1)["usage"]["prompt_tokens"] - cached
            assert fed == 1, "all but the last token of the prompt was there"
        assert view(second)["recalls"] == 3
        owners = json.loads(second.sfctl("mem", "--json").stdout)["owners"]
        assert [owner["size"] > 0 for owner in owners if owner["owner"] == "parked"] == [True]


def test_a_killed_worker_finds_what_was_parked(tmp_path: Path) -> None:
    with daemon(tmp_path, None) as running:
        said = [text for text, _ in turns(running)]
        wait_for(lambda: view(running)["parked"] == 3, 60, "three parked sessions")
        os.kill(running.worker().pid, signal.SIGKILL)
        wait_for(lambda: view(running)["respawns"] == 1 and view(running)["state"] == "ready", 60, "another worker")
        again = turns(running)
        assert [text for text, _ in again] == said
        assert all(cached > 400 for _, cached in again)


def test_damage_costs_a_prefill_and_a_line_and_never_a_token(tmp_path: Path) -> None:
    with daemon(tmp_path, None) as first:
        said = [text for text, _ in turns(first)]
        wait_for(lambda: view(first)["parked"] == 3, 60, "three parked sessions")
        first.process.kill()
        first.process.wait(30)
    flipped, short, foreign = artifacts(tmp_path)
    data = bytearray(flipped.read_bytes())
    data[-5] ^= 1
    flipped.write_bytes(data)
    short.write_bytes(short.read_bytes()[:-1])
    foreign.write_bytes(foreign.read_bytes().replace(b'"runtime":"simulated"', b'"runtime":"stimulated'))
    with daemon(tmp_path, None) as second:
        assert [text for text, _ in turns(second)] == said
        log = "".join(second.output)
        assert log.count("removed, its tokens are computed again") == 3
        assert [text for text, _ in turns(second)] == said
        wait_for(lambda: view(second)["parked"] == 3, 60, "three parked sessions")


def test_a_directory_that_cannot_be_used_is_said_and_the_model_is_served(tmp_path: Path) -> None:
    (tmp_path / "parked").write_text("a file")
    with daemon(tmp_path, None) as running:
        assert [text != "" for text, _ in turns(running)] == [True] * 3
        assert "nothing is parked" in "".join(running.output)
        assert view(running)["parked"] == 0
        assert not (tmp_path / "parked").is_dir()


def test_parking_without_the_prefix_cache_is_refused() -> None:
    result = run("serve", "--engine", "simulated", "--park", "--prefix-cache", "off")
    assert result.returncode == 2
    assert "park is on and prefix-cache off" in result.stderr

"""The whole daemon on the baseRT engine, over the stand-in library: what a native engine changes, from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import basert_toy
from tests.process.harness import Daemon, Stream, generating, run, text_of, wait_for

pytestmark = pytest.mark.process

PROMPT = "Once upon a time there was a fox. " * 5


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("basert")
    library, bundle = basert_toy.compiled(directory), basert_toy.bundle(directory / "toy.base")
    park = ("--park", "--park-dir", str(directory / "parked"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_MICROSECONDS", "2000")
        with Daemon(directory, str(bundle), "--basert-lib", str(library), "--max-batch", "2", *park) as running:
            yield running


def test_it_is_served_and_says_what_it_is(daemon: Daemon) -> None:
    models = daemon.sfctl("models").stdout
    for word in ("basert 0.1.6", "shared", "any beginning of a prompt", "after a tick"):
        assert word in models, models
    first = daemon.complete(PROMPT, max_tokens=8, ignore_eos=True)
    again = daemon.complete(PROMPT, max_tokens=8, ignore_eos=True)
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


def test_a_chat_takes_a_background_lane_whose_stream_pauses_and_goes_on(daemon: Daemon) -> None:
    alone = [text_of(daemon.stream(f"Story {number}", max_tokens=900, ignore_eos=True)) for number in range(2)]
    background = {"x-superfluid-qos": "background"}
    streams = [Stream(daemon, f"Story {number}", background, max_tokens=900) for number in range(2)]
    wait_for(lambda: generating(daemon, 2), 30, "two busy lanes")
    chat = Stream(daemon, "Quick question", {"x-superfluid-qos": "interactive"}, max_tokens=8)
    for stream in (chat, *streams):
        stream.join(60)
    assert chat.reason == "length"
    assert [(stream.text, stream.reason) for stream in streams] == alone
    assert sum(any(": paused class=background" in line for line in stream.comments) for stream in streams) == 1


def test_what_is_of_no_use_to_another_process_is_not_parked(daemon: Daemon) -> None:
    view = daemon.status()["models"][0]
    assert view["prefixes"] > 0
    assert view["parked"] == 0


def test_without_the_library_it_is_said_how_to_name_it(tmp_path: Path) -> None:
    bundle = basert_toy.bundle(tmp_path / "toy.base")
    result = run("serve", str(bundle), "--basert-lib", str(tmp_path / "none.so"), "--http", "127.0.0.1:0")
    assert result.returncode == 3
    assert "--basert-lib names" in result.stderr

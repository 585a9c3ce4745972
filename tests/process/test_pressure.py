"""Memory pressure on a real daemon: told through systemd's protocol, and by a kernel that is really short of memory."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from superfluidd.daemon.sensors import PsiTrigger
from tests.process.harness import Daemon, wait_for
from tests.process.test_real_scheduling import BACKGROUND, CHAT, STORY, Stream, generating

pytestmark = [pytest.mark.process, pytest.mark.engine_llamacpp]

HOLD = ("--os-pressure", "on", "--os-pressure-hold", "1")


def pressure(daemon: Daemon) -> dict[str, object]:
    """``sfctl pressure --json``."""
    found: dict[str, object] = json.loads(daemon.sfctl("pressure", "--json").stdout)
    return found


def through_pressure(daemon: Daemon, press: Iterator[None], *, exact: bool, most: int) -> None:
    """Two background streams pause while there is pressure, a chat is answered, and they go on with the same text.

    Args:
        daemon: with two lanes.
        press: makes pressure when first asked, and ends it when asked again.
        exact: the engine's text does not depend on the batch a token is computed in.
        most: tokens of a stream.
    """
    # Rounding may differ with the batch, so a near-tie may fall the other way; it is the same text at first.
    same = None if exact else 60
    alone = [
        daemon.complete(STORY.format(number), max_tokens=same or most, ignore_eos=True)["choices"][0]["text"]
        for number in (1, 2)
    ]
    streams = [Stream(daemon, STORY.format(number), BACKGROUND, max_tokens=most) for number in (1, 2)]
    wait_for(lambda: generating(daemon, 2), 60, "two generating background streams")
    next(press)
    wait_for(lambda: not json.loads(daemon.sfctl("lanes", "--json").stdout)["lanes"], 60, "free lanes")
    chat = Stream(daemon, STORY.format(3), CHAT, max_tokens=12)
    chat.join(60)
    assert chat.reason == "length"
    assert [stream.reason for stream in streams] == [None, None], "they must not have gone on before the pressure ended"
    assert next(press, "over") == "over"
    for stream, text in zip(streams, alone, strict=True):
        stream.join(120)
        assert stream.reason == "length"
        assert stream.output_tokens == most
        assert stream.text[:same] == text[:same]
        assert any(line.startswith(": paused class=background") for line in stream.comments), stream.comments
    wait_for(lambda: pressure(daemon)["rung"] == "normal", 60, "the end of the pressure")


@pytest.mark.parametrize("engine", ["simulated", "llamacpp"])
def test_background_pauses_while_systemds_fifo_says_so(
    bundled_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    fifo = tmp_path / "pressure"
    os.mkfifo(fifo)
    monkeypatch.setenv("MEMORY_PRESSURE_WATCH", str(fifo))
    model = ("--engine", "simulated") if engine == "simulated" else (str(bundled_model),)

    def press(daemon: Daemon) -> Iterator[None]:
        writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        try:
            while pressure(daemon)["rung"] in ("normal", "warning"):
                os.write(writer, b"!")
                time.sleep(0.5)
            yield
        finally:
            os.close(writer)

    with Daemon(tmp_path, *model, "--max-batch", "2", "--max-context", "1024", *HOLD) as daemon:
        assert pressure(daemon)["source"] == f"{fifo} (FIFO)"
        through_pressure(daemon, press(daemon), exact=engine == "simulated", most=900)
        assert int(str(pressure(daemon)["events"])) >= 3


# -- a control group that is short of memory ------------------------------------------------------------------------

THRASH = """
import mmap, random, sys
sys.stdin.readline()
with open(sys.argv[1], "r+b") as file:
    pages = mmap.mmap(file.fileno(), 0)
    pages.madvise(mmap.MADV_RANDOM)
    while True:
        pages[random.randrange(len(pages))]
"""
"""Reads a file that does not fit into the group: its pages come and go, and whoever reads stalls."""

MIB = 1 << 20
LIMIT, FILE, THRASHERS = 32 * MIB, 200 * MIB, 3

WRITE = b"some 10000 2000000\0"
"""What the service manager wants to hear of: 10 ms of stalls in two seconds."""


@pytest.fixture
def group() -> Iterator[tuple[Path, Path]]:
    """A control group that measures pressure, and one in it that has little memory."""
    mounts = [path for path in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")) if _is_second(path)]
    if not mounts:
        pytest.skip("no control groups of version 2 are mounted")
    first = Path("/sys/fs/cgroup/memory")  # where the memory controller is the first version's
    name = f"superfluidd-test-{os.getpid()}"
    measured = mounts[0] / name
    limited, limit = (first / name, "memory.limit_in_bytes") if first.is_dir() else (measured / "small", "memory.max")
    made: list[Path] = []
    try:
        try:
            for path in (measured, limited):
                path.mkdir()
                made.append(path)
                if limited.parent == path:
                    (path / "cgroup.subtree_control").write_text("+memory")
            (limited / limit).write_text(str(LIMIT))
            PsiTrigger(measured / "memory.pressure", WRITE).close()
        except OSError as error:
            pytest.skip(f"no control group with little memory and a pressure trigger can be made here: {error}")
        yield measured, limited
    finally:
        for path in reversed(made):
            wait_for(lambda path=path: not (path / "cgroup.procs").read_text(), 10, "an empty group")  # type: ignore[misc]
            path.rmdir()


def _is_second(path: Path) -> bool:
    return (path / "cgroup.controllers").is_file()


def test_background_pauses_while_a_control_group_is_short_of_memory(
    bundled_model: Path, monkeypatch: pytest.MonkeyPatch, group: tuple[Path, Path], tmp_path: Path
) -> None:
    measured, limited = group
    monkeypatch.setenv("MEMORY_PRESSURE_WATCH", str(measured / "memory.pressure"))
    monkeypatch.setenv("MEMORY_PRESSURE_WRITE", base64.b64encode(WRITE).decode())
    big = tmp_path / "big"
    with open(big, "wb") as file:
        for _ in range(FILE // MIB):
            file.write(os.urandom(MIB))
        os.fsync(file.fileno())
        # Its pages are ours and would stay in memory; whoever reads it next pays for them.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def press(daemon: Daemon) -> Iterator[None]:
        command = [sys.executable, "-c", THRASH, str(big)]
        thrashers = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(THRASHERS)]
        try:
            for thrasher in thrashers:
                for path in dict.fromkeys((measured, limited) if limited.parent != measured else (limited,)):
                    (path / "cgroup.procs").write_text(str(thrasher.pid))
                assert thrasher.stdin is not None
                thrasher.stdin.write(b"go\n")
                thrasher.stdin.flush()
            wait_for(lambda: pressure(daemon)["rung"] not in ("normal", "warning"), 60, "critical pressure")
            assert [thrasher.poll() for thrasher in thrashers] == [None] * THRASHERS
            yield
        finally:
            for thrasher in thrashers:
                thrasher.kill()
                thrasher.wait(10)
                assert thrasher.stdin is not None
                thrasher.stdin.close()

    with Daemon(tmp_path, str(bundled_model), "--max-batch", "2", "--max-context", "2048", *HOLD) as daemon:
        assert pressure(daemon)["source"] == f"{measured}/memory.pressure trigger"
        through_pressure(daemon, press(daemon), exact=False, most=1500)

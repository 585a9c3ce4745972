"""sfctl as people run it: a process of its own against a real daemon on the simulated engine."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sfctl.__main__ import VERBS

from superfluidd import __version__
from superfluidd.control.protocol import SCHEMA
from tests.process.harness import Daemon, environment, text_of, wait_for

pytestmark = pytest.mark.process

NO_DAEMON, USAGE, REFUSED = 3, 2, 1


def sfctl(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """``sfctl ARGV`` without a daemon of its own."""
    return subprocess.run(
        [sys.executable, "-m", "sfctl", *argv],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=environment() | environ,
    )


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("daemon")
    with Daemon(directory, "--engine", "simulated", "--max-batch", "2") as running:
        yield running


@pytest.mark.parametrize("verb", ["status", "lanes", "queue"])
def test_json_is_the_result_as_it_is(daemon: Daemon, verb: str) -> None:
    done = daemon.sfctl(verb, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["schema"] == SCHEMA


def test_a_request_seen_and_cancelled(daemon: Daemon) -> None:
    chunks = daemon.stream("hello", max_tokens=3000, ignore_eos=True)
    next(chunks)
    headings, row = daemon.sfctl("lanes").stdout.splitlines()
    assert headings.split()[:5] == ["MODEL", "LANE", "ID", "CLASS", "PHASE"]
    assert row.split()[4] == "decode"
    ident = row.split()[2]
    assert daemon.sfctl("queue").stdout.count("\n") == 1
    assert " 1/2 " in daemon.sfctl("status").stdout
    done = daemon.sfctl("cancel", ident)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cancelled {ident}\n", "")
    assert list(chunks)[-1]["error"]["message"] == "the request was cancelled"
    wait_for(lambda: daemon.sfctl("lanes").stdout.count("\n") == 1, 5, "the lane's end")
    again = daemon.sfctl("cancel", ident)
    assert (again.returncode, again.stdout) == (REFUSED, "")
    assert again.stderr.startswith("sfctl: no queued or running request is called")


def test_caps_are_shown_and_changed(daemon: Daemon) -> None:
    shown = daemon.sfctl("caps")
    assert shown.stdout.splitlines()[0].split() == ["MODEL", "CLASS", "CAP", "HELD", "QUEUED", "STATE"]
    assert [line.split()[1:3] for line in shown.stdout.splitlines()[1:]] == [
        ["interactive", "-"], ["completion", "-"], ["agent", "-"], ["background", "-"]
    ]  # fmt: skip
    changed = daemon.sfctl("caps", "set", "background=1", "agent=2")
    assert changed.returncode == 0
    assert "background   1 of 2" in changed.stdout
    refused = daemon.sfctl("caps", "set", "background=off", "agent=3")
    assert (refused.returncode, refused.stdout) == (REFUSED, "")
    assert "from 1 to 2 (the lanes there are)" in refused.stderr
    assert "background   1 of 2" in daemon.sfctl("caps").stdout, "nothing was changed"
    assert "- " in daemon.sfctl("caps", "set", "background=off", "agent=off").stdout
    for wrong in (["set"], ["set", "background"], ["set", "background=many"], ["put", "background=1"]):
        done = daemon.sfctl("caps", *wrong)
        assert (done.returncode, done.stdout) == (USAGE, "")
        assert "background=2" in done.stderr


def test_a_class_is_paused_and_a_waiting_request_explained_and_re_classed(daemon: Daemon) -> None:
    assert "paused" in daemon.sfctl("pause", "background").stdout
    headers = {"x-superfluid-qos": "background", "x-request-id": "batch-1"}
    chunks: list[object] = []
    client = threading.Thread(target=lambda: chunks.extend(daemon.stream("hello", headers, max_tokens=3)))
    client.start()
    wait_for(lambda: "batch-1" in daemon.sfctl("queue").stdout, 5, "the request in the queue")
    story = daemon.sfctl("explain", "batch-1").stdout
    assert "(batch-1) on simulated\n" in story
    assert "queued as background, nobody ahead of it in its class" in story
    assert "now: number 1 of the background queue; it waits for an operator: background is paused" in story
    raw = json.loads(daemon.sfctl("explain", "--json", "batch-1").stdout)
    assert raw["requests"][0]["trail"][0]["kind"] == "queued"
    done = daemon.sfctl("qos", "batch-1", "interactive")
    assert (done.returncode, done.stdout) == (0, f"{raw['requests'][0]['request']} is interactive now\n")
    client.join(10)
    assert chunks
    assert "re-classed to interactive by an operator" in daemon.sfctl("explain", "batch-1").stdout
    assert "paused" not in daemon.sfctl("resume", "background").stdout
    for verb in (["explain", "nobody"], ["qos", "nobody", "agent"], ["pause", "urgent"]):
        refused = daemon.sfctl(*verb)
        assert (refused.returncode, refused.stdout) == (REFUSED, "")


def test_a_conversation_is_pinned_and_unpinned(daemon: Daemon) -> None:
    list(daemon.stream("keep this in mind", {"x-request-id": "memo"}, max_tokens=40, ignore_eos=True))
    done = daemon.sfctl("pin", "memo", "--ttl", "2h")
    assert (done.returncode, done.stderr) == (0, "")
    headings, row, _, budget = done.stdout.splitlines()
    assert headings.split() == ["MODEL", "ID", "TOKENS", "WHERE", "EXPIRES", "IN", "REQUEST-ID"]
    assert row.split()[3:] == ["pool", "2h00m", "memo"]
    tokens = row.split()[2]
    assert budget.startswith(f"simulated: {tokens}/")
    assert "pinned by an operator: what it leaves is kept" in daemon.sfctl("explain", "memo").stdout
    [shown] = json.loads(daemon.sfctl("pins", "--json").stdout)["pins"]
    assert (shown["origin"], shown["place"], str(shown["tokens"])) == ("memo", "pool", tokens)
    assert daemon.sfctl("unpin", row.split()[1]).stdout.splitlines()[2].startswith("simulated: 0/")
    for verb in (["pin", "nobody"], ["unpin", "memo"], ["unpin", "nobody"], ["pin", "memo", "--ttl", "400d"]):
        refused = daemon.sfctl(*verb)
        assert (refused.returncode, refused.stdout) == (REFUSED, "")
        assert refused.stderr.startswith("sfctl: ")
    wrong = daemon.sfctl("pin", "memo", "--ttl", "soon")
    assert (wrong.returncode, wrong.stdout) == (USAGE, "")
    assert "give one such as 90s, 10m, 2h or 1d" in wrong.stderr


def test_a_model_is_unloaded_and_loaded(daemon: Daemon) -> None:
    done = daemon.sfctl("unload", "simulated")
    assert (done.returncode, done.stdout, done.stderr) == (0, "simulated is unloaded\n", "")
    assert "unloaded" in daemon.sfctl("models").stdout
    refused = daemon.http.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unloaded")
    done = daemon.sfctl("load", "simulated")
    assert (done.returncode, done.stdout) == (0, "simulated is ready: 2 lanes of 8,192 tokens\n")
    done = daemon.sfctl("load", "another")
    assert (done.returncode, done.stdout) == (0, "another is ready: 2 lanes of 8,192 tokens\n")
    body = {"prompt": "x", "max_tokens": 3, "model": "another"}
    assert daemon.http.post("/v1/completions", json=body).status_code == 200
    running = daemon.stream("hello", max_tokens=3000, ignore_eos=True, model="another")
    next(running)
    done = daemon.sfctl("unload", "another", "--now", "--json")
    assert json.loads(done.stdout)["model"]["state"] == "unloaded"
    assert list(running)[-1]["error"]["code"] == "model_unloaded"
    for verb in (["unload", "nobody"], ["unload", "simulated", "--soon"]):
        assert daemon.sfctl(*verb).returncode in (REFUSED, USAGE)


def test_the_environment_names_the_socket_and_the_flag_outweighs_it(daemon: Daemon, tmp_path: Path) -> None:
    here, nowhere = str(daemon.socket), str(tmp_path / "none")
    assert sfctl("status", SUPERFLUIDD_SOCKET=here).returncode == 0
    assert sfctl("--socket", here, "status", SUPERFLUIDD_SOCKET=nowhere).returncode == 0
    assert sfctl("status", "--socket", here, SUPERFLUIDD_SOCKET=nowhere).returncode == 0
    assert sfctl("--socket", nowhere, "status", SUPERFLUIDD_SOCKET=here).returncode == NO_DAEMON


def test_without_a_daemon_it_says_where_it_looked_and_how_to_start_one(tmp_path: Path) -> None:
    done = sfctl("status", XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (NO_DAEMON, "")
    assert f"{tmp_path}/superfluidd/control.sock" in done.stderr
    assert "superfluidd serve" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["cancel"], ["lanes", "extra"], ["--socket", "", "status"]])
def test_wrong_usage(argv: list[str]) -> None:
    done = sfctl(*argv)
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert "usage: sfctl" in done.stderr


def test_version_and_help() -> None:
    assert sfctl("--version").stdout == f"sfctl {__version__}\n"
    assert "Exit status: 0 done, 1 refused, 2 wrong usage, 3 no daemon" in sfctl("--help").stdout
    for verb in VERBS:
        text = " ".join(sfctl(verb.name, "--help").stdout.split())
        assert verb.returns in text
        assert "--json" in text


def on_a_terminal(daemon: Daemon, **environ: str) -> bytes:
    """What ``sfctl status`` writes to a terminal."""
    ours, theirs = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-m", "sfctl", "--socket", str(daemon.socket), "status"],
            stdout=theirs,
            timeout=30,
            check=True,
            env=environment() | {"TERM": "xterm"} | environ,
        )
        return os.read(ours, 65536)
    finally:
        os.close(ours)
        os.close(theirs)


def test_colour_on_a_terminal_unless_told_not_to(daemon: Daemon) -> None:
    environ = {"NO_COLOR": ""}
    assert b"\x1b[32mready\x1b[0m" in on_a_terminal(daemon, **environ)
    assert b"\x1b" not in on_a_terminal(daemon, NO_COLOR="1")
    assert "\x1b" not in daemon.sfctl("status").stdout


def test_a_reader_that_has_seen_enough_is_no_error(daemon: Daemon) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sfctl", "--socket", str(daemon.socket), "status"],
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
            env=environment(),
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_it_starts_fast(daemon: Daemon) -> None:
    """Processor time, the best of five: other programs on the machine do not count."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert daemon.sfctl("status").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.15, spent


def test_a_second_daemon_on_the_socket_exits_at_once_and_says_who_is_there(daemon: Daemon) -> None:
    argv = ["serve", "--engine", "simulated", "--http", "127.0.0.1:0", "--socket", str(daemon.socket)]
    done = subprocess.run(
        [sys.executable, "-m", "superfluidd", *argv],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=environment(),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert f"process {daemon.process.pid} already listens on {daemon.socket}" in done.stderr
    assert daemon.sfctl("status").returncode == 0


def test_drain_and_wait(tmp_path: Path) -> None:
    with Daemon(tmp_path, "--engine", "simulated") as daemon:
        chunks = daemon.stream("hello", max_tokens=60, ignore_eos=True)
        next(chunks)
        assert daemon.sfctl("drain").stdout == "draining: 1 request running, 0 queued\n"
        assert daemon.http.post("/v1/completions", json={"prompt": "hi"}).status_code == 503
        assert "draining" in daemon.sfctl("status").stdout.splitlines()[0]
        assert daemon.sfctl("drain", "--wait").stdout == "drained: nothing is running or queued\n"
        assert daemon.sfctl("lanes", "--json").stdout == f'{{"lanes":[],"schema":{SCHEMA}}}\n'
        assert text_of(chunks)[1] == "length"
        assert daemon.sfctl("drain", "--wait", "--json").stdout == f'{{"running":0,"queued":0,"schema":{SCHEMA}}}\n'


def test_interrupting_a_wait_leaves_the_daemon_draining(tmp_path: Path) -> None:
    with Daemon(tmp_path, "--engine", "simulated", "--drain-timeout", "0") as daemon:
        chunks = daemon.stream("hello", max_tokens=5000, ignore_eos=True)
        next(chunks)
        argv = [sys.executable, "-m", "sfctl", "--socket", str(daemon.socket), "drain", "--wait"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as waiting:
            wait_for(lambda: daemon.status()["draining"], 10, "the drain")
            waiting.send_signal(signal.SIGINT)
            out, err = waiting.communicate(timeout=10)
        assert (waiting.returncode, out, err) == (130, b"", b"")
        assert daemon.status()["models"][0]["lanes_busy"] == 1
        daemon.process.send_signal(signal.SIGTERM)
        list(chunks)
        assert daemon.process.wait(20) == 0
        assert not daemon.socket.exists(), "the socket file outlived the daemon"
        assert daemon.sfctl("status").returncode == NO_DAEMON


def test_after_kill_9_the_next_daemon_takes_the_socket_over(tmp_path: Path) -> None:
    with Daemon(tmp_path, "--engine", "simulated") as first:
        first.kill()
        assert first.socket.exists()
        assert first.sfctl("status").returncode == NO_DAEMON
        with Daemon(tmp_path, "--engine", "simulated") as second:
            start = time.monotonic()
            assert second.status()["pid"] == second.process.pid
            assert time.monotonic() - start < 2

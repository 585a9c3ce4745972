"""The daemon's life as processes, on the simulated engine: start, refuse, drain, die, leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.process.harness import Daemon, environment, run, text_of, wait_for

pytestmark = pytest.mark.process

SIMULATED = ("--engine", "simulated", "--max-batch", "4", "--max-context", "4096")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, *SIMULATED) as running:
        yield running


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("frozen", [False, True])
def test_no_orphan_worker_however_the_daemon_ends(tmp_path: Path, number: signal.Signals, frozen: bool) -> None:
    with Daemon(tmp_path, *SIMULATED, "--drain-timeout", "0") as daemon:
        worker = daemon.worker()
        if frozen:
            worker.suspend()
        daemon.process.send_signal(number)
        daemon.process.wait(20)
        wait_for(lambda: gone(worker), 10, "the worker's end")
        if number != signal.SIGKILL:
            assert daemon.process.returncode == 0
            assert not daemon.socket.exists()


def test_a_daemon_starts_over_the_socket_of_one_that_was_killed(tmp_path: Path) -> None:
    with Daemon(tmp_path, *SIMULATED) as daemon:
        daemon.process.kill()
        daemon.process.wait(10)
        assert daemon.socket.exists()
        with Daemon(tmp_path, *SIMULATED) as second:
            assert second.status()["pid"] == second.process.pid


def test_a_second_daemon_exits_at_once_and_harms_nothing(daemon: Daemon, tmp_path: Path) -> None:
    port = daemon.url.rpartition(":")[2]
    other = tmp_path / "other.sock"
    same_port = run("serve", *SIMULATED, "--http", f"127.0.0.1:{port}", "--socket", str(other))
    assert same_port.returncode == 1
    assert port in same_port.stderr
    same_socket = run("serve", *SIMULATED, "--http", "127.0.0.1:0", "--socket", str(daemon.socket))
    assert same_socket.returncode == 1
    assert str(daemon.socket) in same_socket.stderr
    assert daemon.status()["pid"] == daemon.process.pid
    assert not other.exists()


def test_sigterm_drains_and_lets_replies_finish(daemon: Daemon) -> None:
    chunks = daemon.stream("hello", max_tokens=150, ignore_eos=True)
    next(chunks)
    daemon.process.terminate()
    wait_for(lambda: daemon.http.get("/readyz").status_code == 503, 5, "not ready")
    refused = daemon.http.post("/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    _, reason = text_of(chunks)
    assert reason == "length"
    assert daemon.process.wait(20) == 0


def test_a_second_signal_ends_it_now(daemon: Daemon) -> None:
    chunks = daemon.stream("hello", max_tokens=3000, ignore_eos=True)
    next(chunks)
    daemon.process.terminate()
    time.sleep(0.3)
    assert daemon.process.poll() is None
    start = time.monotonic()
    daemon.process.terminate()
    assert daemon.process.wait(20) == 0
    assert time.monotonic() - start < 8
    chunks.close()


def test_the_drain_timeout_ends_streams_with_a_typed_error(tmp_path: Path) -> None:
    with Daemon(tmp_path, *SIMULATED, "--drain-timeout", "0.5") as daemon:
        chunks = daemon.stream("hello", max_tokens=3000, ignore_eos=True)
        next(chunks)
        daemon.process.terminate()
        last = list(chunks)[-1]
        assert last["error"]["code"] == "shutting_down"
        assert daemon.process.wait(20) == 0


def test_sfctl_answers_while_the_worker_is_frozen(daemon: Daemon) -> None:
    chunks = daemon.stream("hello", max_tokens=60, ignore_eos=True)
    next(chunks)
    worker = daemon.worker()
    worker.suspend()
    try:
        for verb in ("status", "lanes", "queue"):
            start = time.monotonic()
            answer = daemon.sfctl(verb)
            assert answer.returncode == 0, answer.stderr
            assert time.monotonic() - start < 2  # mostly the interpreter's own start on a busy machine
    finally:
        worker.resume()
    _, reason = text_of(chunks)
    assert reason == "length"


def test_a_killed_worker_is_replaced_and_the_stream_goes_on_byte_for_byte(daemon: Daemon) -> None:
    fields = {"max_tokens": 200, "ignore_eos": True}
    whole = daemon.complete("tell me", **fields)["choices"][0]["text"]
    killed: list[int] = []
    text = ""
    for count, chunk in enumerate(daemon.stream("tell me", **fields)):
        text += "".join(choice["text"] for choice in chunk["choices"])
        if count in (4, 16):
            worker = daemon.worker()
            killed.append(worker.pid)
            worker.kill()
    assert text == whole
    assert len(set(killed)) == 2
    assert daemon.status()["models"][0]["respawns"] == 2


def drop_socket(daemon: Daemon, body: str, read: int) -> None:
    """Send a completion request by hand, read some bytes, go away without a word."""
    host, port = daemon.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        received = 0
        while received < read:
            received += len(client.recv(4096))
        time.sleep(0.3)


@pytest.mark.parametrize("body, read", [
    ('{"prompt":"hi","max_tokens":3000,"ignore_eos":true,"stream":true}', 400),
    ('{"prompt":"hi","max_tokens":3000,"ignore_eos":true}', 0),
    ('{"prompt":"' + "long " * 780 + '","max_tokens":50}', 0),
])  # fmt: skip
def test_a_client_that_goes_away_frees_its_lane(daemon: Daemon, body: str, read: int) -> None:
    drop_socket(daemon, body, read)

    def free() -> bool:
        model = daemon.status()["models"][0]
        return model["lanes_busy"] == 0 and model["cells_used"] == 0

    wait_for(free, 5, "the lane's release")


def test_a_queued_client_that_goes_away_leaves_the_queue(daemon: Daemon) -> None:
    busy = [daemon.stream("busy", max_tokens=2000, ignore_eos=True) for _ in range(4)]
    for chunks in busy:
        next(chunks)
    drop_socket(daemon, '{"prompt":"waits","stream":true}', 0)
    wait_for(lambda: daemon.status()["models"][0]["queued"] == 0, 5, "the empty queue")
    for chunks in busy:
        chunks.close()


def test_ctrl_c_in_the_foreground_group_stops_it_gently(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "superfluidd", "serve", *SIMULATED, "--http", "127.0.0.1:0"),
            *("--socket", str(tmp_path / "s")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
        env=environment(),
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if line.startswith("ready"):
                break
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 0


def bad_files(directory: Path, model: Path) -> dict[str, tuple[Path, str]]:
    truncated = directory / "truncated.gguf"
    with model.open("rb") as source:
        truncated.write_bytes(source.read(20_000_000))
    text = directory / "text.gguf"
    text.write_text("not a model")
    return {
        "missing": (directory / "missing.gguf", "no such file"),
        "directory": (directory, "directory"),
        "text": (text, "not a GGUF"),
        "truncated": (truncated, "truncated"),
    }


@pytest.mark.parametrize("kind", ["missing", "directory", "text", "truncated"])
@pytest.mark.parametrize("command", ["serve", "check"])
def test_bad_model_files_have_each_their_message_and_exit_3(
    tmp_path: Path, bundled_model: Path, kind: str, command: str
) -> None:
    path, words = bad_files(tmp_path, bundled_model)[kind]
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        # The port is taken, so a daemon that bound it first would say so instead.
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        extra = ("--http", address, "--socket", str(tmp_path / "s")) if command == "serve" else ()
        result = run(command, str(path), *extra)
    assert result.returncode == 3
    assert words.lower() in result.stderr.lower()
    assert str(path) in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("argv, words", [
    (("serve", "--max-batch", "0"), "from 1 to 256"),
    (("serve", "--http", "nowhere"), "HOST:PORT"),
    (("serve", "--engine", "tpu"), "auto, llamacpp, mlx, basert, simulated"),
    (("serve", "--config", "/nonexistent.toml"), "cannot read"),
    (("frobnicate",), "invalid choice"),
])  # fmt: skip
def test_wrong_usage_exits_2(argv: tuple[str, ...], words: str) -> None:
    result = run(*argv)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_forty_clients_at_once_are_all_served(daemon: Daemon) -> None:
    results: list[tuple[str, str | None]] = []

    def client(read: Callable[[], tuple[str, str | None]]) -> None:
        results.append(read())

    threads = [
        threading.Thread(
            target=client, args=(lambda n=n: text_of(daemon.stream(f"client {n}", max_tokens=20, ignore_eos=True)),)
        )
        for n in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [reason for _, reason in results] == ["length"] * 40

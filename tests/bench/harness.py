"""Servers under measurement, started and stopped as child processes, and the record of a measurement."""

from __future__ import annotations

import argparse
import ctypes.util
import http.client
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec
import psutil

from superfluidd import __version__
from tests.bench import machine
from tests.bench.prepare_model import ROOT, WORK
from tests.bench.streaming import Reply

OURS = "superfluidd"
PEER = "llama-server"
MLX_PEER = "mlx_lm.server"


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What both servers run with.

    Attributes:
        model: the GGUF file, or the MLX directory.
        lanes: requests at once.
        context: tokens of a lane's window; both have ``lanes * context`` in all.
        threads: of the peer, whose count is fixed; ours finds its own.
        layout: of our KV memory.
        ours_args, peer_args: appended to the command lines.
    """

    model: Path
    lanes: int = 8
    context: int = 4096
    threads: int = os.cpu_count() or 1
    layout: str = "per-sequence"
    ours_args: tuple[str, ...] = ()
    peer_args: tuple[str, ...] = ()


class Server:
    """A running server."""

    def __init__(self, name: str, argv: Sequence[str], port: int, process: psutil.Process) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.port = port
        self._process = process

    def groups(self) -> dict[str, list[psutil.Process]]:
        """Its processes: our daemon and worker apart, the peer as ``server``."""
        children = self._process.children(recursive=True)
        if self.name != OURS:
            return {"server": [self._process, *children]}
        return {"daemon": [self._process], "worker": children}

    def rss(self) -> dict[str, int]:
        """Resident bytes by group."""
        return {name: machine.rss_bytes(found) for name, found in self.groups().items()}


class Cell(msgspec.Struct, kw_only=True):
    """One measurement of one server, as kept on disk. Tables are made from these and from nothing else.

    Attributes:
        name: what was measured, such as ``greedy-8`` or ``busy-greedy-8``.
        system: which server.
        round: counted from 1; ratios compare the two servers of one round.
        attempts: measurements until one was clean.
        void: none was clean; the figures are kept and not used.
        window: wall time, CPU seconds by group and foreign cores.
        values: the figures.
        rss: resident bytes by group afterwards.
        texts: what was generated, where both servers should generate the same.
        argv, versions, machine, at: how to do it again.
    """

    name: str
    system: str
    round: int
    attempts: int
    void: bool
    window: machine.Window
    values: dict[str, float]
    rss: dict[str, int]
    texts: list[str] = []
    argv: tuple[str, ...]
    versions: dict[str, str]
    machine: dict[str, str]
    at: str


def peer_binary() -> Path:
    """llama-server as built by ``make bench-peer``, or as SUPERFLUIDD_BENCH_PEER names it.

    Raises:
        SystemExit: there is none.
    """
    path = Path(os.environ.get("SUPERFLUIDD_BENCH_PEER") or WORK / "peer" / "bin" / "llama-server")
    if not os.access(path, os.X_OK):
        sys.exit(f"there is no llama-server at {path}; run make bench-peer (about 8 minutes on two cores)")
    return path


def versions() -> dict[str, str]:
    """What is being compared."""
    found = {OURS: __version__} | {name: version(name) for name in ("llama-cpp-python", "hypercorn", "trio")}
    git = shutil.which("git")
    if git:
        asked = subprocess.run(
            [git, "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        found["commit"] = asked.stdout.strip() or "none"
    return found


def peer_version(binary: Path) -> str:
    """What llama-server calls itself."""
    asked = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    return (asked.stdout + asked.stderr).partition("\n")[0]


@contextmanager
def running(system: str, setup: Setup, *, start_timeout: float = 120.0) -> Iterator[Server]:
    """Start a server, wait until it is ready, and stop it with everything it started.

    Raises:
        SystemExit: it did not become ready; the end of its log is shown.
    """
    port = _free_port()
    log_path = WORK / "logs" / f"{system}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, log_path.open("wb") as log:
        if system == OURS:
            argv, ready = _ours(setup, port, Path(scratch)), "/readyz"
        elif system == MLX_PEER:
            argv, ready = _mlx_peer(setup, port), "/health"
        else:
            argv, ready = _peer(setup, port), "/health"
        # A setting left in the environment would be measured without being on record.
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SUPERFLUIDD_", "LLAMA_"))}
        environ |= _mlx_environment() if system == MLX_PEER else {}
        with subprocess.Popen(
            argv, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            try:
                _wait_ready(process, port, ready, start_timeout, log_path)
                yield Server(system, argv, port, psutil.Process(process.pid))
            finally:
                _stop(process)


def _ours(setup: Setup, port: int, scratch: Path) -> list[str]:
    argv = [sys.executable, "-m", "superfluidd", "serve", str(setup.model), "--http", f"127.0.0.1:{port}"]
    argv += ["--socket", str(scratch / "control.sock"), "--max-batch", str(setup.lanes)]
    argv += ["--max-context", str(setup.context), "--kv-layout", setup.layout]
    return [*argv, *setup.ours_args]


def _peer(setup: Setup, port: int) -> list[str]:
    total = setup.lanes * setup.context
    argv = [str(peer_binary()), "-m", str(setup.model), "-np", str(setup.lanes), "-c", str(total)]
    argv += ["-t", str(setup.threads), "-b", "2048", "-ub", "512", "--host", "127.0.0.1", "--port", str(port)]
    # Its store of idle prompts costs copies and can win nothing here, where no prompt comes twice.
    return [*argv, "--cache-ram", "0", *setup.peer_args]


def _mlx_peer(setup: Setup, port: int) -> list[str]:
    argv = [sys.executable, "-m", "mlx_lm", "server", "--model", str(setup.model), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--log-level", "WARNING", "--decode-concurrency", str(setup.lanes)]
    return [*argv, *setup.peer_args]


def _mlx_environment() -> dict[str, str]:
    """What our worker does for itself: OpenBLAS, on every core; and nothing is fetched."""
    name = ctypes.util.find_library("openblas") if sys.platform == "linux" else None
    blas = {"LD_PRELOAD": name, "OPENBLAS_NUM_THREADS": str(os.cpu_count() or 1)} if name else {}
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **blas}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], port: int, path: str, timeout: float, log: Path) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    tail = log.read_text(errors="replace").splitlines()[-20:]
    what = "ended with code " + str(process.poll()) if process.poll() is not None else f"was not ready in {timeout:g} s"
    sys.exit("\n".join([f"{' '.join(process.args)} {what}; the end of {log}:", *tail]))  # type: ignore[arg-type]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15.0)
    except subprocess.TimeoutExpired:
        pass
    # The session is its own, so this reaches a worker that outlived its daemon.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class Recorder:
    """Takes measurements until one is clean, and keeps them as files; ``peer``: version of what is compared with."""

    def __init__(
        self, folder: Path, *, attempts: int, pause: float = 3.0, peer: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        self._attempts = attempts
        self._pause = pause
        self._versions = {**versions(), **(peer or {"llama-server": peer_version(peer_binary())})}
        self._machine = machine.describe()
        folder.mkdir(parents=True, exist_ok=True)

    def measure(
        self,
        server: Server,
        name: str,
        round_number: int,
        work: Callable[[str], tuple[dict[str, float], list[str]]],
        neighbours: Sequence[psutil.Process] = (),
    ) -> Cell:
        """Run ``work`` with a fresh nonce until no foreign process disturbed it.

        Args:
            server: what is measured.
            name: of the cell.
            round_number: of the cell.
            work: takes a nonce; returns figures and texts.
            neighbours: processes whose CPU time is part of the plan.
        """
        attempt = 0
        while True:
            attempt += 1
            meter = machine.Meter({**server.groups(), "neighbour": neighbours})
            # The same nonce for both systems: they are to compute the same prompts.
            values, texts = work(f"{name}-{round_number}-{attempt}")
            window = meter.stop()
            if not window.void:
                break
            print(f"  {server.name} {name}: void, {window.foreign:.2f} foreign cores", flush=True)
            if attempt >= self._attempts:
                break
            time.sleep(self._pause)
        cell = Cell(
            name=name,
            system=server.name,
            round=round_number,
            attempts=attempt,
            void=window.void,
            window=window,
            values=values,
            rss=server.rss(),
            texts=texts,
            argv=server.argv,
            versions=self._versions,
            machine=self._machine,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        path = self._folder / f"{round_number:02}-{server.name}-{name}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(cell), indent=1))
        figures = ", ".join(f"{key} {value:.3g}" for key, value in values.items())
        print(f"  {server.name} {name}: {figures}", flush=True)
        return cell


def check(replies: Sequence[Reply], completion_tokens: int, prompt_tokens: int | None = None) -> None:
    """Every reply is whole and as long as asked for.

    Raises:
        SystemExit: one is not; a figure from it would mean nothing.
    """
    for reply in replies:
        if reply.error:
            sys.exit(f"a reply failed: {reply.error}")
        if reply.completion_tokens != completion_tokens:
            sys.exit(f"a reply has {reply.completion_tokens} tokens instead of {completion_tokens}")
        if prompt_tokens is not None and reply.prompt_tokens != prompt_tokens:
            sys.exit(f"a prompt of {prompt_tokens} tokens was counted as {reply.prompt_tokens}")


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Options that every script has."""
    parser.add_argument("--model", type=Path, help="GGUF file; by default the bundled model requantized to Q4_0")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a lane's window (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works; no figures to publish")
    parser.add_argument("--ours-args", default="", metavar="'ARGS'", help="appended to superfluidd's command line")
    parser.add_argument("--peer-args", default="", metavar="'ARGS'", help="appended to llama-server's command line")
    parser.add_argument("--results", type=Path, help="folder for the JSON files (default: .bench/results/TIME)")


def results_folder(args: argparse.Namespace, kind: str) -> Path:
    """Where this run's files go."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path(args.results) if args.results else WORK / "results" / f"{kind}-{stamp}{'-quick' if args.quick else ''}"


def split_args(text: str) -> tuple[str, ...]:
    """Words of an option that holds arguments."""
    return tuple(shlex.split(text))

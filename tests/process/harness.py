"""A real daemon as a child process: start it, talk to it, end it. Everything stays on loopback and ends by itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]


def wait_for(what: Callable[[], Any], seconds: float, why: str) -> Any:
    """Poll until ``what`` is true; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := what():
            return result
        time.sleep(0.02)
    raise AssertionError(f"{why} did not happen within {seconds} s")


def environment() -> dict[str, str]:
    """The test's environment without settings of ours."""
    cleaned = {name: value for name, value in os.environ.items() if not name.startswith("SUPERFLUIDD_")}
    return cleaned | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'ctl'}"}


def run(*argv: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """``superfluidd ARGV`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "superfluidd", *argv],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment(),
    )


class Daemon:
    """A running ``superfluidd serve``; leaving the block kills it and its worker."""

    def __init__(self, directory: Path, *argv: str, ready: float = 120.0) -> None:
        self.socket = directory / "control.sock"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "superfluidd", "serve", "--http", "127.0.0.1:0"),
                # What else runs on the machine must not pause a test's requests.
                *("--socket", str(self.socket), "--os-pressure", "off", *argv),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.output: list[str] = []
        self._readers = [
            threading.Thread(target=self._collect, args=(pipe,), daemon=True)
            for pipe in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()
        try:
            self.url = wait_for(self._url, ready, "the ready line")
        except AssertionError:
            self.kill()
            raise AssertionError("the daemon did not get ready:\n" + "".join(self.output)) from None
        self.http = httpx.Client(base_url=self.url, timeout=120.0)

    def _collect(self, pipe: Any) -> None:
        for line in pipe:
            self.output.append(line)

    def _url(self) -> str | None:
        if self.process.poll() is not None:
            raise AssertionError
        found = re.search(r"ready: .* on (http://\S+)/v1", "".join(self.output))
        return found.group(1) if found else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        self.kill()

    def kill(self) -> None:
        """End daemon and worker now."""
        family = [self.process.pid]
        if self.process.poll() is None:
            family += [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(10)
        for reader in self._readers:
            reader.join(10)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def worker(self) -> psutil.Process:
        """The model's worker process."""
        children = psutil.Process(self.process.pid).children()
        assert len(children) == 1, children
        return children[0]

    def status(self) -> Any:
        """``sfctl status --json``."""
        return json.loads(self.sfctl("status", "--json").stdout)

    def sfctl(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run ``sfctl`` against this daemon."""
        return subprocess.run(
            [sys.executable, "-m", "sfctl", "--socket", str(self.socket), *argv],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env=environment(),
        )

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> Any:
        """A non-streaming completion, as its JSON."""
        reply = self.http.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stream(self, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> Iterator[Any]:
        """A streaming completion: its chunks as JSON, checked to end in [DONE]."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, **fields}
        with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            assert reply.status_code == 200, reply.read()
            last = ""
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    last = line.removeprefix("data: ")
                    if last != "[DONE]":
                        yield json.loads(last)
            assert last == "[DONE]"


def text_of(chunks: Iterator[Any]) -> tuple[str, str | None]:
    """Text and finish reason of a stream's chunks."""
    text, reason = "", None
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            text += choice["text"]
            reason = choice["finish_reason"] or reason
    return text, reason


class Stream(threading.Thread):
    """A streaming completion read in the background: its text, its comments, its finish reason."""

    def __init__(self, daemon: Daemon, prompt: str, headers: dict[str, str], **fields: Any) -> None:
        super().__init__()
        self.text, self.reason, self.comments, self.prompt_tokens = "", None, list[str](), 0
        self.output_tokens = 0
        self._daemon, self._headers = daemon, headers
        self._body = {"prompt": prompt, "temperature": 0, "stream": True, "ignore_eos": True, **fields}
        self._body["stream_options"] = {"include_usage": True}
        self.start()

    def run(self) -> None:
        with self._daemon.http.stream("POST", "/v1/completions", json=self._body, headers=self._headers) as reply:
            for line in reply.iter_lines():
                if line.startswith(":"):
                    self.comments.append(line)
                elif line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    usage = chunk["usage"] or {}
                    self.prompt_tokens, self.output_tokens = (
                        usage.get("prompt_tokens", 0),
                        usage.get("completion_tokens", 0),
                    )
                    for choice in chunk["choices"]:
                        self.text += choice["text"]
                        self.reason = choice["finish_reason"] or self.reason


def metric(daemon: Daemon, name: str) -> float:
    """The sum of a metric's samples."""
    lines = daemon.http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def generating(daemon: Daemon, lanes: int) -> bool:
    found = json.loads(daemon.sfctl("lanes", "--json").stdout)["lanes"]
    return len(found) == lanes and all(lane["generated"] > 3 for lane in found)

"""A trace from a running daemon, over its control socket."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from superfluidd.control import paths
from superfluidd.control.protocol import TraceEntry, TraceParams, TraceResult
from superfluidd.errors import StartupError
from superfluidd.simulate.trace import Line, write

POLL_SECONDS = 0.5


def record(out: Path, socket_path: str | None, seconds: float | None) -> str:
    """Collect requests until interrupted or for some seconds, then write them in order of arrival.

    Args:
        out: the trace.
        socket_path: the daemon's control socket; by default where one is looked for.
        seconds: how long; None is until Ctrl-C.

    Returns:
        What was done, in words.

    Raises:
        StartupError: there is no daemon, or it goes away, or the file cannot be written.
    """
    candidates = [Path(socket_path)] if socket_path else paths.candidates()
    entries: list[TraceEntry] = []
    lost = 0
    try:
        with out.open("w") as file, _connect(candidates) as link:
            stream = link.makefile("rwb")
            cursor = _ask(stream, -1).cursor  # from now on
            deadline = None if seconds is None else time.monotonic() + seconds
            try:
                while True:
                    left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, deadline - time.monotonic())
                    if left > 0:
                        time.sleep(left)
                    answer = _ask(stream, cursor)
                    entries += answer.entries
                    lost += answer.lost
                    cursor = answer.cursor
                    if left <= 0:
                        break
            except KeyboardInterrupt:
                pass
            finally:
                count = write(_lines(entries), file)
    except OSError as error:
        raise StartupError(f"recording ended: {error}") from error
    missed = f"; {lost} were missed because too many ended at once" if lost else ""
    return f"{count} requests written to {out}{missed}"


def _connect(candidates: Sequence[Path]) -> socket.socket:
    for path in candidates:
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(10.0)
        try:
            link.connect(os.fspath(path))
        except OSError:
            link.close()
            continue
        return link
    looked = ", ".join(map(str, candidates))
    raise StartupError(f"no daemon answers at {looked}; start one with `superfluidd serve`, or name its --socket")


def _ask(stream: object, cursor: int) -> TraceResult:
    request = {"jsonrpc": "2.0", "id": 1, "method": "trace"}
    line = json.dumps({**request, "params": msgspec.to_builtins(TraceParams(cursor))}).encode() + b"\n"
    stream.write(line)  # type: ignore[attr-defined]
    stream.flush()  # type: ignore[attr-defined]
    answer: bytes = stream.readline()  # type: ignore[attr-defined]
    if not answer:
        raise ConnectionError("the daemon has gone")
    reply = msgspec.json.decode(answer)
    if "error" in reply:
        raise StartupError(f"the daemon refused: {reply['error']['message']}")
    return msgspec.convert(reply["result"], TraceResult)


def _lines(entries: list[TraceEntry]) -> list[Line]:
    ordered = sorted(entries, key=lambda entry: entry.arrived)
    start = ordered[0].arrived if ordered else 0.0
    return [Line(round(one.arrived - start, 6), one.qos, one.prompt, max(1, one.output)) for one in ordered]

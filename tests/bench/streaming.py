"""A streaming client that costs next to nothing, because it shares the cores with the server that it measures.

While replies run it only stamps what arrives. HTTP and JSON are read afterwards.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

_END = b"0\r\n\r\n"


class Reply(msgspec.Struct, kw_only=True):
    """One reply.

    Attributes:
        started: when the request was sent, in seconds on the monotonic clock, as all times here.
        stamps: when each event with text in it arrived; a bare role does not count.
        finished: when the event with the finish reason arrived.
        text: all text.
        prompt_tokens, cached_tokens, completion_tokens: from the server's usage.
        finish_reason: as sent, None if there was none.
        error: why this is not a whole reply, None if it is one.
    """

    started: float
    stamps: list[float] = []
    finished: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from the request to the first text, or to the end of a reply whose text was empty."""
        return (self.stamps[0] if self.stamps else self.finished) - self.started


class _Stream:
    def __init__(self, sock: socket.socket, index: int, started: float) -> None:
        self.sock = sock
        self.index = index
        self.started = started
        self.arrived: list[tuple[float, bytes]] = []
        self.tail = b""


def run(
    port: int, path: str, bodies: Sequence[dict[str, object]], *, at_once: int, timeout: float = 600.0
) -> list[Reply]:
    """Send requests to the server on this machine, so many at once, each next one when one ends.

    Args:
        port: on 127.0.0.1.
        path: of the URL.
        bodies: JSON bodies; ``stream`` and ``stream_options`` are added.
        at_once: clients.
        timeout: seconds for everything; what is unfinished then has an error.
    """
    requests = deque((index, _request(port, path, body)) for index, body in enumerate(bodies))
    replies: list[Reply | None] = [None] * len(bodies)
    deadline = time.monotonic() + timeout
    ended: list[tuple[_Stream, str | None]] = []
    with selectors.DefaultSelector() as selector:

        def start() -> None:
            index, data = requests.popleft()
            sock = socket.create_connection(("127.0.0.1", port), timeout=30.0)
            started = time.monotonic()
            sock.sendall(data)
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, _Stream(sock, index, started))

        def end(stream: _Stream, error: str | None) -> None:
            selector.unregister(stream.sock)
            stream.sock.close()
            ended.append((stream, error))
            if requests and error is None:
                start()

        while requests and len(selector.get_map()) < at_once:
            start()
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                requests.clear()
                for key in list(selector.get_map().values()):
                    end(key.data, f"unfinished after {timeout:g} s")
            for key, _ in ready:
                stream: _Stream = key.data
                try:
                    data = stream.sock.recv(65536)
                except OSError as error:
                    end(stream, f"the connection broke: {error}")
                    continue
                stream.arrived.append((time.monotonic(), data))
                stream.tail = (stream.tail + data)[-len(_END) :]
                if not data or stream.tail == _END:
                    end(stream, None)
    for stream, problem in ended:
        replies[stream.index] = read_reply(stream.started, stream.arrived, problem)
    return [reply or Reply(started=0.0, error="never sent: an earlier request failed") for reply in replies]


def _request(port: int, path: str, body: dict[str, object]) -> bytes:
    data = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


def read_reply(started: float, arrived: Sequence[tuple[float, bytes]], error: str | None = None) -> Reply:
    """A reply from what arrived when.

    Args:
        started: when the request was sent.
        arrived: bytes of the connection, with their times.
        error: what the connection came to, if it was cut.
    """
    reply = Reply(started=started, error=error)
    body = _Body()
    pending = b""
    done = False
    for when, data in arrived:
        pending += body.feed(data)
        if body.status not in (0, 200):
            continue
        *lines, pending = pending.split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                done = True
            else:
                _take_event(reply, msgspec.json.decode(payload), when)
    if reply.error is None:
        if body.status != 200:
            reply.error = f"status {body.status}: {pending[:500].decode(errors='replace')}"
        elif not done or reply.finish_reason is None:
            reply.error = "the stream ended before the reply did"
    return reply


def _take_event(reply: Reply, event: dict[str, Any], when: float) -> None:
    if "error" in event:
        reply.error = str(event["error"])
    for choice in event.get("choices") or []:
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if text:
            reply.stamps.append(when)
            reply.text += text
        if choice.get("finish_reason"):
            reply.finish_reason = choice["finish_reason"]
            reply.finished = when
    usage = event.get("usage")
    if usage:
        reply.prompt_tokens = usage["prompt_tokens"]
        reply.completion_tokens = usage["completion_tokens"]
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class _Body:
    """Head and chunked coding of an HTTP/1.1 answer, taken off as the bytes come."""

    def __init__(self) -> None:
        self.status = 0
        self._buffer = b""
        self._chunked = False
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        self._buffer += data
        if not self.status:
            head, blank, rest = self._buffer.partition(b"\r\n\r\n")
            if not blank:
                return b""
            self.status = int(head.split(b" ", 2)[1])
            self._chunked = b"transfer-encoding: chunked" in head.lower()
            self._buffer = rest
        if not self._chunked:
            found, self._buffer = self._buffer, b""
            return found
        return self._dechunk()

    def _dechunk(self) -> bytes:
        found = b""
        while self._buffer:
            if self._left > 2:
                piece = self._buffer[: self._left - 2]
                found += piece
                self._buffer = self._buffer[len(piece) :]
                self._left -= len(piece)
            elif self._left:
                end = self._buffer[: self._left]
                self._buffer = self._buffer[len(end) :]
                self._left -= len(end)
            else:
                size, newline, rest = self._buffer.partition(b"\r\n")
                if not newline or not size:
                    break
                self._buffer = rest
                # What follows a chunk is its own line end; the last one has no data and no need to be counted.
                self._left = int(size.partition(b";")[0], 16) + 2
        return found

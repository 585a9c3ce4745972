"""A client made of bytes, for what no well-behaved client does; and a reader of SSE."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import h11
import trio


class Server:
    """A running listener.

    Attributes:
        shutdown: set it to stop.
        stopped: set once ``serve`` has returned.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.shutdown = trio.Event()
        self.stopped = trio.Event()
        self._clients: list[RawClient] = []

    async def connect(self, receive_buffer: int | None = None) -> RawClient:
        """A connection; a small receive buffer makes a stalled reader hurt sooner."""
        stdlib = socket.socket()
        if receive_buffer is not None:
            stdlib.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        stdlib.setblocking(False)
        sock = trio.socket.from_stdlib_socket(stdlib)
        try:
            await sock.connect(("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        client = RawClient(trio.SocketStream(sock))
        self._clients.append(client)
        return client

    async def hang_up(self) -> None:
        """Close every client's connection."""
        for client in self._clients:
            await client.stream.aclose()


class RawClient:
    """One connection, one request at a time."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._http = h11.Connection(h11.CLIENT)

    @property
    def reusable(self) -> bool:
        """Another request can be sent after this one."""
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def send(self, method: str, path: str, body: object = None, **headers: str) -> None:
        """Send a request whole; ``body`` is JSON unless it is bytes."""
        if self.reusable:
            self._http.start_next_cycle()
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = [("host", "x"), ("content-length", str(len(data)))]
        fields += [(name.replace("_", "-"), value) for name, value in headers.items()]
        wire = self._http.send(h11.Request(method=method, target=path, headers=fields))
        assert wire is not None
        wire += self._http.send(h11.Data(data=data)) or b""
        wire += self._http.send(h11.EndOfMessage()) or b""
        await self.stream.send_all(wire)

    async def _event(self) -> Any:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._http.receive_data(await self.stream.receive_some())

    async def response(self) -> h11.Response:
        """The head of the response."""
        event = await self._event()
        assert isinstance(event, h11.Response), event
        return event

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            assert isinstance(event, h11.Data), event
            yield bytes(event.data)

    async def until(self, wanted: bytes) -> bytes:
        """Read the body until it contains ``wanted``; what was read."""
        seen = b""
        while wanted not in seen:
            event = await self._event()
            assert isinstance(event, h11.Data), (event, seen)
            seen += bytes(event.data)
        return seen

    async def rest(self) -> bytes:
        """The rest of the body."""
        return b"".join([piece async for piece in self.pieces()])

    async def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
        """Status and body of one request."""
        await self.send(method, path, body, **headers)
        response = await self.response()
        return response.status_code, await self.rest()


def frames(data: bytes) -> list[Any]:
    """The ``data`` frames of an SSE body, decoded; ``[DONE]`` as that text."""
    found: list[Any] = []
    for block in data.decode().split("\n\n"):
        if block.startswith("data: "):
            payload = block.removeprefix("data: ")
            found.append(payload if payload == "[DONE]" else json.loads(payload))
        else:
            assert block == "" or block.startswith(":"), block
    return found


def text_of(chunks: list[Any], choice: int = 0) -> str:
    """The text a stream adds up to, of a chat or a completion."""
    found = ""
    for chunk in chunks:
        for part in chunk["choices"] if isinstance(chunk, dict) and "choices" in chunk else ():
            if part["index"] == choice:
                found += part["delta"].get("content", "") if "delta" in part else part["text"]
    return found


async def until(condition: Callable[[], bool]) -> float:
    """Wait for it in steps of a virtual millisecond; how long it took, seconds."""
    started = trio.current_time()
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110  # a view has no event to wait for
            await trio.sleep(0.001)
    return trio.current_time() - started

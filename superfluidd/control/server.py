"""The daemon's side of the control socket: a task per connection, one JSON-RPC message a line, answered in order."""

from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import Callable
from pathlib import Path

import trio

from superfluidd.control import dispatch, listener, peer, protocol
from superfluidd.control.listener import open_listener
from superfluidd.control.peer import Peer
from superfluidd.daemon.service import Service

__all__ = ["open_listener", "serve"]

log = logging.getLogger(__name__)

CONNECTIONS = 64
"""Connections served at once."""

WRITE_PATIENCE = 30.0
"""Seconds a client may leave an answer unread before its connection is closed."""

GONE_INTERVAL = 0.5
"""Seconds between looks whether a client whose call takes long has gone away."""

CHUNK = 65536

Credentials = Callable[[peer.HasOptions], Peer]


async def serve(
    control_socket: socket.socket,
    service: Service,
    *,
    credentials: Credentials = peer.credentials,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the control plane until cancelled.

    Args:
        control_socket: from :func:`open_listener`.
        service: what the methods act on.
        credentials: tells who is at the other end of a connection.
        task_status: started once connections are accepted.

    Resource handling: on the way out the connections and the listener are closed, and the socket's file is removed if
    it is still the one that was bound.
    Error handling: no fault of a client ends more than its own connection.
    """
    path = Path(os.fsdecode(control_socket.getsockname()))
    ours = listener.identify(path)
    server = _Server(service, credentials)
    try:
        async with trio.open_nursery() as nursery:
            accepting = trio.SocketListener(trio.socket.from_stdlib_socket(control_socket))
            await nursery.start(trio.serve_listeners, server.converse, [accepting])
            task_status.started()
    finally:
        listener.remove(path, ours)


class _Server:
    """What connections share."""

    def __init__(self, service: Service, credentials: Credentials) -> None:
        self._service = service
        self._credentials = credentials
        self._owner = os.geteuid()
        self._open = 0

    async def converse(self, stream: trio.SocketStream) -> None:
        """One connection, from accept to close."""
        self._open += 1
        try:
            if self._open > CONNECTIONS:
                await _send(stream, _refusal(f"{CONNECTIONS} control connections are open; try again", "busy"))
                return
            await self._answer_all(stream, self._credentials(stream.socket))
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
            log.debug("a control connection broke: %s", error)
        except Exception:
            log.exception("a control connection failed")
        finally:
            self._open -= 1

    async def _answer_all(self, stream: trio.SocketStream, who: Peer) -> None:
        lines = _Lines(stream)
        while True:
            try:
                line = await lines.next()
            except _TooLong:
                await _send(stream, _refusal(f"a message is at most {protocol.MAX_LINE} bytes", "payload_too_large"))
                return
            if line is None:
                return
            if not line.strip():
                continue
            reply: bytes | None = None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, stream.socket, nursery.cancel_scope)
                reply = await dispatch.answer(line, self._service, who, self._owner)
                nursery.cancel_scope.cancel()
            if reply is not None and not await _send(stream, reply):
                log.warning("uid %d (pid %d) did not read its answer; closing its connection", who.uid, who.pid)
                return


class _TooLong(Exception):
    """A message is longer than the protocol allows."""


class _Lines:
    """The messages on a connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._searched = 0
        self._ended = False

    async def next(self) -> bytes | None:
        """The next message without its line end; what comes before the end of the stream counts as one. None: no more.

        Raises:
            _TooLong: nothing more can be read.
        """
        while not self._ended:
            end = self._buffer.find(b"\n", self._searched)
            if (end if end >= 0 else len(self._buffer)) > protocol.MAX_LINE:
                raise _TooLong
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                self._searched = 0
                return line
            self._searched = len(self._buffer)
            data = await self._stream.receive_some(CHUNK)
            self._buffer += data
            self._ended = not data
        last, self._buffer = bytes(self._buffer), bytearray()
        return last or None


async def _send(stream: trio.SocketStream, line: bytes) -> bool:
    """Whether the client took the line in time."""
    with trio.move_on_after(WRITE_PATIENCE) as patience:
        await stream.send_all(line)
    return not patience.cancelled_caught


def _refusal(why: str, code: str) -> bytes:
    return dispatch.failure(None, protocol.REFUSED, why, code)


async def _cancel_when_gone(sock: trio.socket.SocketType, scope: trio.CancelScope) -> None:
    """Cancel once the client has closed its socket.

    Reading would not tell: it may have sent more, and one that has only shut down its sending half still listens.
    """
    poller = select.poll()
    poller.register(sock.fileno(), 0)
    while not poller.poll(0):  # noqa: ASYNC110 - the kernel sets no event of Trio's
        await trio.sleep(GONE_INTERVAL)
    scope.cancel()

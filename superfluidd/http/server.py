"""The listener: accepts connections and hands them to hypercorn, which speaks HTTP to the application.

The accept loop is ours and not hypercorn's for one reason. Hypercorn shields socket writes from cancellation, so a
client that has stopped reading holds its connection, and with it a shutdown, for as long as it likes. Every connection
here is a :class:`BoundedStream`: a write that makes no progress for long enough breaks the connection, on every
platform, and a shutdown breaks those that are left when its grace is over.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import struct
import sys
from functools import partial

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from quart_trio import QuartTrio

from superfluidd.errors import AlreadyRunning, StartupError, UsageError

log = logging.getLogger("superfluidd.http")

BACKLOG = 512

KEEP_ALIVE = 75.0
"""Seconds an idle connection is kept, and a client may take to send its headers. Longer than the pools of the usual
clients keep theirs, so that it is they who close."""

SEND_BUFFER = 128 * 1024
"""Kernel send buffer of a connection, bytes. Left to itself it grows to megabytes, and a client that has stopped
reading would look healthy for a whole conversation."""


class BoundedStream:
    """A connection whose writes cannot block for ever. It is what hypercorn's connection handler asks of a stream.

    Args:
        stream: the accepted connection.
        stall: seconds a write may make no progress.
    """

    def __init__(self, stream: trio.SocketStream, stall: float) -> None:
        self._stream = stream
        self._stall = stall
        self.socket = stream.socket

    async def send_all(self, data: bytes) -> None:
        """Send everything.

        Raises:
            trio.BrokenResourceError: the peer is gone, or has not read for too long.
        """
        with memoryview(data) as rest:
            sent = 0
            while sent < len(rest):
                progress = 0
                with trio.move_on_after(self._stall):
                    try:
                        progress = await self.socket.send(rest[sent : sent + SEND_BUFFER])
                    except OSError as error:
                        raise trio.BrokenResourceError(f"the peer is gone: {error}") from error
                if not progress:
                    log.info("a client has not read for %g s: connection dropped", self._stall)
                    self.abort()
                    raise trio.BrokenResourceError("the peer does not read")
                sent += progress

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """See :class:`trio.abc.ReceiveStream`."""
        return bytes(await self._stream.receive_some(max_bytes))

    async def send_eof(self) -> None:
        """See :class:`trio.abc.HalfCloseableStream`."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()

    def abort(self) -> None:
        """Close it now and throw away what was not sent; whoever is writing or reading gets an error."""
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass  # already closed
        self.socket.close()


def open_listener(host: str, port: int, stall: float = 60.0) -> socket.socket:
    """A bound, listening socket. Bind it before loading anything: it is also the lock against a second daemon.

    Args:
        stall: seconds after which the kernel gives a connection up whose peer acknowledges nothing.

    Raises:
        UsageError: the host cannot be resolved.
        AlreadyRunning: the address is in use.
        StartupError: it cannot be bound for another reason.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else error
        raise UsageError(
            f"--http: cannot resolve {host!r} ({reason}); use an address of this machine", param="http"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            # Connections inherit it. It catches the peer that vanished without a word, which no write ever reports.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall * 1000))
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AlreadyRunning(
                f"{where} is in use, maybe by another superfluidd; stop it or choose another address with --http",
                param="http",
            ) from None
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StartupError(
            f"cannot listen on {where}: {reason}; choose another address with --http", param="http"
        ) from None
    return listener


def url(listener: socket.socket, host: str) -> str:
    """The base URL of a listener; ``host`` as the operator wrote it, the port as the system gave it."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


async def serve(
    app: QuartTrio,
    listener: socket.socket,
    shutdown: trio.Event,
    grace: float = 3.0,
    stall: float = 60.0,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until ``shutdown`` is set and the connections are done. Started once connections are accepted.

    Args:
        app: what answers.
        listener: listening socket; it is closed in any case.
        shutdown: no new connection is accepted from then on, idle ones are closed, busy ones finish their reply.
        grace: seconds they have for that; then they are broken.
        stall: seconds a client may leave a write blocked.

    Resource handling: when this returns, or is cancelled, no connection and no listener is left.
    Error handling: a connection that fails is logged and hurts no other.
    """
    context = WorkerContext(None)
    config = _config()
    connections: dict[BoundedStream, None] = {}

    async def handle(accepted: trio.SocketStream) -> None:
        stream = BoundedStream(accepted, stall)
        connections[stream] = None
        try:
            await TCPServer(ASGIWrapper(app), config, context, ConnectionState({}), stream).run()  # type: ignore[arg-type]
        except Exception:
            log.exception("a connection failed")
        finally:
            del connections[stream]

    async def break_all_after(seconds: float) -> None:
        # Cancelling is not enough: a blocked write is shielded from it. So this also runs when we are cancelled.
        try:
            await trio.sleep(seconds)
        finally:
            for stream in list(connections):
                stream.abort()

    async with trio.open_nursery() as guard:
        guard.start_soon(break_all_after, math.inf)
        async with trio.open_nursery() as busy:
            async with trio.open_nursery() as accepting:
                sockets = [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
                accepting.start_soon(partial(trio.serve_listeners, handle, sockets, handler_nursery=busy))
                task_status.started()
                await shutdown.wait()
                accepting.cancel_scope.cancel()
            await context.terminated.set()
            busy.cancel_scope.deadline = trio.current_time() + grace
            guard.start_soon(break_all_after, grace)
        guard.cancel_scope.cancel()


def _config() -> Config:
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("superfluidd.http.protocol")
    config.include_server_header = False
    config.keep_alive_timeout = KEEP_ALIVE
    config.keep_alive_max_requests = 1_000_000
    return config

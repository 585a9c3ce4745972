"""What one HTTP request owns, and the guarantee that it is given back.

A handler returns its response before the first byte of it is sent, and a client may vanish in between: a generator
that was never started is never closed. So generations do not belong to handlers or generators. They belong to the
request's :class:`Lifetime`, which the connection closes whatever happens: reply sent, client gone, handler failed.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import cast

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from quart import request
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest

from superfluidd.daemon.streams import Generation

MAX_ID = 128
"""Longest ``x-request-id`` taken over from a client, characters."""


class Lifetime:
    """One request's id, helpers and generations.

    Attributes:
        id: the ``x-request-id``: the client's where it is fit to be repeated, else one of ours.
        started: time of arrival, seconds of Trio's clock.
    """

    def __init__(self, ident: str, nursery: trio.Nursery, stack: ExitStack) -> None:
        self.id = ident
        self.started = trio.current_time()
        self._nursery = nursery
        self._stack = stack

    def own(self, generation: Generation) -> Generation:
        """Close the generation when the request ends, at the latest."""
        return self._stack.enter_context(generation)

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a helper until the response has been sent or the client is gone."""
        self._nursery.start_soon(function, *args)


class Request(TrioRequest):
    """A request that knows its lifetime."""

    lifetime: Lifetime


class Connection(TrioASGIHTTPConnection):
    """Runs a request inside its lifetime; a disconnect cancels all of it."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Serve one request. Raises what the handler raised; nothing the request owned outlives the call."""

        async def send_whole(message: ASGISendEvent) -> None:
            # With the last piece of a response hypercorn first reports a disconnect, which cancels us, and then starts
            # the connection's idle timer. Without the shield it never gets to the timer: the connection stays open for
            # as long as the client likes, and a shutdown has to break it.
            if message.get("more_body", True):
                await send(message)
            else:
                with trio.CancelScope(shield=True):
                    await send(message)

        request = cast("Request", self._create_request_from_scope(send))
        with ExitStack() as stack:
            async with trio.open_nursery() as nursery:
                request.lifetime = Lifetime(choose_id(request.headers.get("x-request-id")), nursery, stack)
                nursery.start_soon(self.handle_messages, nursery, request, receive)
                nursery.start_soon(self.handle_request, nursery, request, send_whole)


def choose_id(offered: str | None) -> str:
    """The client's id if it is 1 to 128 visible ASCII characters, else a new one."""
    if offered and len(offered) <= MAX_ID and all("!" <= letter <= "~" for letter in offered):
        return offered
    return "req-" + secrets.token_hex(12)


def lifetime() -> Lifetime:
    """The present request's."""
    return cast("Request", request).lifetime

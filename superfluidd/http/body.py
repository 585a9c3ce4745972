"""Bodies in and out: a bounded read, and JSON replies."""

from __future__ import annotations

import msgspec
import trio
from quart import request
from quart.wrappers import Response

from superfluidd.errors import ClientError, PayloadTooLarge

MAX_BODY = 32 * 1024 * 1024
"""Largest request body, bytes."""

READ_TIMEOUT = 60.0
"""Seconds a client may take to send its body."""

DISCARD_SECONDS = 5.0
"""How long the rest of a body that is too large is read and thrown away. Answering and closing at once would reset
the connection under a client that is still writing, and it would never see the answer."""


class BodyTimeout(ClientError):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


async def read_body() -> bytes:
    """The present request's body.

    Raises:
        PayloadTooLarge: it is larger than :data:`MAX_BODY`.
        BodyTimeout: it took longer than :data:`READ_TIMEOUT`.
    """
    declared = request.content_length
    data = bytearray()
    too_large = declared is not None and declared > MAX_BODY
    with trio.move_on_after(READ_TIMEOUT) as scope:
        async for piece in request.body:
            if not too_large:
                data += piece
                too_large = len(data) > MAX_BODY
            if too_large:
                data.clear()
                scope.deadline = min(scope.deadline, trio.current_time() + DISCARD_SECONDS)
    if too_large:
        raise PayloadTooLarge(f"the request body is larger than {MAX_BODY >> 20} MiB; send less")
    if scope.cancelled_caught:
        raise BodyTimeout(f"the request body did not arrive within {READ_TIMEOUT:g} s; send it again")
    return bytes(data)


def json_reply(record: object, status: int = 200) -> Response:
    """Anything msgspec can encode, as a JSON response."""
    return Response(msgspec.json.encode(record), status=status, content_type="application/json")

"""OpenAI's error envelope, and the way from every kind of failure to it."""

from __future__ import annotations

import math

import msgspec
from quart.wrappers import Response
from werkzeug.exceptions import HTTPException

from superfluidd.daemon.streams import Done
from superfluidd.errors import (
    Draining,
    EngineFault,
    ModelFailed,
    ModelLoading,
    ModelUnloaded,
    PayloadTooLarge,
    ServiceError,
    SuperfluidError,
)
from superfluidd.types import FinishReason


class RequestCancelled(ServiceError):
    """Somebody other than the client ended the request: an operator, the stall rule."""

    code = "cancelled"


class ShuttingDown(Draining):
    """The daemon stopped before the request was complete."""

    code = "shutting_down"


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong, in OpenAI's four words."""

    message: str
    type: str
    param: str | None
    code: str | None


class Envelope(msgspec.Struct, frozen=True):
    """The body of every refusal."""

    error: ErrorBody


_HTTP_CODES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: PayloadTooLarge.code,
    414: "uri_too_long",
    415: "unsupported_media_type",
}

_BY_CODE: dict[str, type[ServiceError]] = {
    kind.code: kind
    for kind in (EngineFault, ModelFailed, ModelLoading, ModelUnloaded, Draining, ShuttingDown, RequestCancelled)
}


def encode(error: SuperfluidError) -> bytes:
    """The envelope of an error as JSON."""
    return msgspec.json.encode(Envelope(ErrorBody(error.message, error.type, error.param, error.code)))


def reply(error: SuperfluidError) -> Response:
    """The response to a request that failed before its reply began."""
    response = Response(encode(error), status=error.status, content_type="application/json")
    if error.retry_after is not None:
        # Whole seconds are all the header can say; rounding down would invite a retry that fails.
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return response


def http_reply(error: HTTPException) -> Response:
    """The same for what the routing refuses: unknown paths, wrong methods."""
    status = error.code or 500
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = error.description or error.name
    code = _HTTP_CODES.get(status, "invalid_request" if status < 500 else "internal_error")
    body = msgspec.json.encode(Envelope(ErrorBody(message, kind, None, code)))
    response = Response(body, status=status, content_type="application/json")
    methods = getattr(error, "valid_methods", None)
    if methods:
        response.headers["Allow"] = ", ".join(sorted(methods))
    return response


def failure(done: Done) -> SuperfluidError | None:
    """The error a finished generation stands for, or None where it ended as it should.

    A code that no class carries becomes the general one of its reason: clients match on codes.
    """
    if done.reason is FinishReason.ABORT:
        kind = _BY_CODE.get(done.code, RequestCancelled)
        return kind(done.error or "the request was cancelled by the server before it was complete; send it again")
    if done.reason is FinishReason.ERROR:
        kind = _BY_CODE.get(done.code, EngineFault)
        return kind(done.error or "the engine failed this request; send it again")
    return None

"""What a request's headers ask of the scheduler, and what of it this server grants."""

from __future__ import annotations

import msgspec
from quart import request

from superfluidd.config import Settings
from superfluidd.errors import InvalidValue, PermissionDenied
from superfluidd.scheduling.qos import parse_class
from superfluidd.types import QosClass

QOS_HEADER = "x-superfluid-qos"
"""Of a request: the class it asks for. Of a response: the class it was served in."""

CACHED_HEADER = "x-superfluid-cached-tokens"
"""In whole replies: prompt tokens that came from the prefix cache. A stream's headers leave before that is known; its
usage says it."""

INVARIANT_HEADER = "x-superfluid-batch-invariant"

_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")


class Asked(msgspec.Struct, frozen=True):
    """What was asked for and is granted."""

    qos: QosClass
    batch_invariant: bool = False


def read_headers(settings: Settings) -> Asked:
    """The class of the present request, and whether its lane shall tick alone.

    Raises:
        InvalidValue: a header has no such value.
        PermissionDenied: batch invariance is not allowed over HTTP.
    """
    default = parse_class(settings.http_default_qos)
    if settings.no_http_qos_header:
        return Asked(default)
    named = request.headers.get(QOS_HEADER)
    qos = default if named is None else parse_class(named, param=QOS_HEADER)
    alone = _boolean(request.headers.get(INVARIANT_HEADER, "0"))
    if alone and not settings.http_allow_batch_invariant:
        raise PermissionDenied(
            f"{INVARIANT_HEADER} is not allowed here, since such a request holds everybody else up; "
            "leave it out, or start the daemon with --http-allow-batch-invariant",
            param=INVARIANT_HEADER,
        )
    return Asked(qos, alone)


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in _YES + _NO:
        legal = ", ".join(_YES + _NO)
        raise InvalidValue(f"{INVARIANT_HEADER}: {text!r} is not one of {legal}", param=INVARIANT_HEADER)
    return word in _YES

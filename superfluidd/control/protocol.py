"""The control protocol: JSON-RPC 2.0, one message per line, over the Unix socket. Shared with ``sfctl``.

This module holds the records and the method table and does no I/O. It imports nothing but types, so that ``sfctl``
starts fast. Fields are only ever added, with defaults; :data:`SCHEMA` counts changes of meaning.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = 1
"""Version of the results' meaning; every ``sfctl --json`` output carries it."""

MAX_LINE = 1 << 20
"""Longest message accepted, bytes."""

Role = Literal["observer", "admin"]
"""Who may call a method: an observer only reads, an admin changes things."""


class LaneView(msgspec.Struct, frozen=True):
    """A running request.

    Attributes:
        lane: lane number, from 0; ``request``: its id; ``origin``: its ``x-request-id``.
        phase: ``prefill`` or ``decode``.
        prompt, prefilled, generated, max_tokens: tokens. ``prefilled`` counts all tokens in KV while in prefill.
        cells: KV cells promised to it.
        age: seconds since it arrived; ``ttft``: seconds from arrival to first token, null before that.
    """

    model: str
    lane: int
    request: int
    origin: str
    qos: str
    phase: Literal["prefill", "decode"]
    prompt: int
    prefilled: int
    generated: int
    max_tokens: int
    cells: int
    age: float
    ttft: float | None = None


class QueueView(msgspec.Struct, frozen=True):
    """A waiting request.

    Attributes:
        position: place in its class's queue, from 1.
        waited: seconds in this queue; ``why``: what it waits for, in words.
        generated: tokens it had already produced, if it ran before.
    """

    model: str
    request: int
    origin: str
    qos: str
    position: int
    prompt: int
    generated: int
    waited: float
    why: str


class ModelView(msgspec.Struct, frozen=True):
    """A served model and its engine.

    Attributes:
        state: ``loading``, ``ready``, ``recovering`` (its worker is being replaced) or ``failed``.
        layout: ``per-sequence`` or ``shared``; ``window``: longest context, tokens.
        cells, cells_promised, cells_used: KV cells: in all, promised to lanes, filled by the engine's count.
        tick_seconds: how long the tick in flight has been running, null between ticks.
        silent_seconds: time since the engine last showed progress in that tick.
        stalled: the engine has been silent for longer than any honest step.
        decode_rate: tokens per second of the last second of decoding; ``prefill_rate`` likewise.
        threads: compute threads in use; ``worker_pid``: 0 when in process.
        submitted: requests ever queued; ``finished``: requests ended, by finish reason; ``pauses``: lanes lost.
        prefill_tokens, decode_tokens: prompt tokens fed and tokens generated, ever; ``prefill_seconds``,
            ``decode_seconds``: time the engine spent on it, in ``decode_rounds`` rounds.
    """

    name: str
    path: str
    state: Literal["loading", "ready", "recovering", "failed"]
    error: str
    engine: str
    architecture: str
    layout: str
    window: int
    lanes: int
    lanes_busy: int
    queued: int
    cells: int
    cells_promised: int
    cells_used: int
    ticks: int
    tick_seconds: float | None
    silent_seconds: float | None
    stalled: bool
    decode_rate: float
    prefill_rate: float
    threads: int
    worker_pid: int
    respawns: int
    submitted: int = 0
    finished: dict[str, int] = {}
    pauses: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_rounds: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class StatusResult(msgspec.Struct, frozen=True):
    """The daemon in one record."""

    version: str
    pid: int
    uptime: float
    http: str
    socket: str
    draining: bool
    models: tuple[ModelView, ...]
    schema: int = SCHEMA


class LanesResult(msgspec.Struct, frozen=True):
    """Every running request, by model and lane."""

    lanes: tuple[LaneView, ...]
    schema: int = SCHEMA


class QueueResult(msgspec.Struct, frozen=True):
    """Every waiting request, in the order it would be served."""

    queue: tuple[QueueView, ...]
    schema: int = SCHEMA


class CancelParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``id``: a request id (``42``) or an ``x-request-id``, which may stand for several requests."""

    id: str


class CancelResult(msgspec.Struct, frozen=True):
    """Ids that were cancelled; their lanes are free at the engine's next step."""

    cancelled: tuple[int, ...]
    schema: int = SCHEMA


class DrainParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``wait``: answer only when nothing is left running or queued."""

    wait: bool = False


class DrainResult(msgspec.Struct, frozen=True):
    """How much was left when the call returned."""

    running: int
    queued: int
    schema: int = SCHEMA


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A method that takes nothing."""


class Method(msgspec.Struct, frozen=True):
    """One row of the method table."""

    name: str
    params: type[msgspec.Struct]
    result: type[msgspec.Struct]
    role: Role


METHODS: tuple[Method, ...] = (
    Method("status", NoParams, StatusResult, "observer"),
    Method("lanes", NoParams, LanesResult, "observer"),
    Method("queue", NoParams, QueueResult, "observer"),
    Method("cancel", CancelParams, CancelResult, "admin"),
    Method("drain", DrainParams, DrainResult, "admin"),
)


class Request(msgspec.Struct, frozen=True):
    """A JSON-RPC 2.0 request. A message without an id is a notification and gets no answer."""

    jsonrpc: Literal["2.0"]
    method: str
    id: int | str | msgspec.UnsetType | None = msgspec.UNSET
    params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """A JSON-RPC error. ``data`` is the stable name of the error."""

    code: int
    message: str
    data: str = ""


class Reply(msgspec.Struct, frozen=True):
    """A JSON-RPC 2.0 response: exactly one of ``result`` and ``error``.

    ``id`` is the request's, or null where that could not be told.
    """

    jsonrpc: Literal["2.0"] = "2.0"
    id: int | str | None = None
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: ErrorBody | msgspec.UnsetType = msgspec.UNSET


PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
REFUSED = -32000
"""The daemon understood and said no; ``data`` carries the error's stable name."""

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


ModelState = Literal["loading", "ready", "recovering", "failed", "unloading", "unloaded", "resting"]
"""``unloaded``: until an operator loads it again. ``resting``: unloaded for want of work; the next request loads it."""


class LaneView(msgspec.Struct, frozen=True):
    """A running request.

    Attributes:
        lane: lane number, from 0; ``request``: its id; ``origin``: its ``x-request-id``.
        phase: ``prefill`` or ``decode``.
        prompt, prefilled, generated, max_tokens: tokens. ``prefilled`` counts all tokens in KV while in prefill.
        cells: KV cells promised to it.
        age: seconds since it arrived; ``ttft``: seconds from arrival to first token, null before that.
        pauses: how often it has lost a lane; ``batch_invariant``: it ticks alone.
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
    pauses: int = 0
    batch_invariant: bool = False


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
        preemptions, starvation_grants: by class, of the request that lost a lane to another, or got one for having
            waited.
        abandoned_prefill_tokens: tokens of prefill steps that were given up in their middle.
        engine_tokens: tokens computed for whatever purpose, by the engine's own count.
        prefill_budget, decode_grant: tokens the latest tick was allowed to feed and to decode.
        cells_kept: KV cells of preempted requests and of the prefix cache.
        prefix_hits: requests that were seeded; ``cached_tokens``: prompt tokens they did not have to feed.
        evictions: prefixes that had to leave the pool; ``exports``, ``imports``: to and from host memory.
        prefixes: kept now, ``host_prefixes`` of them in host memory, where they take ``host_bytes`` of
            ``host_limit_bytes``.
        parks, recalls: KV written to disk, and brought back; ``parked``: prefixes there, which take ``parked_bytes`` of
            ``parked_limit_bytes``.
        pins: prefixes that are pinned, with ``pinned_tokens`` in all; ``pins_yielded``: times that one had to leave the
            pool or lost its pin to a newer one; ``pins_expired``: times that one's time was over.
        cut: what prefixes can be used: ``anywhere`` (any beginning), ``window`` or ``head`` (only whole ones).
        device: what computes. granular: a running tick can be ended after a step; ``abandons``: a step, too.
    """

    name: str
    path: str
    state: ModelState
    error: str
    engine: str
    architecture: str
    layout: str
    window: int = 0
    lanes: int = 0
    lanes_busy: int = 0
    queued: int = 0
    cells: int = 0
    cells_promised: int = 0
    cells_used: int = 0
    ticks: int = 0
    tick_seconds: float | None = None
    silent_seconds: float | None = None
    stalled: bool = False
    decode_rate: float = 0.0
    prefill_rate: float = 0.0
    threads: int = 0
    worker_pid: int = 0
    respawns: int = 0
    submitted: int = 0
    finished: dict[str, int] = {}
    pauses: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_rounds: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    preemptions: dict[str, int] = {}
    starvation_grants: dict[str, int] = {}
    abandoned_prefill_tokens: int = 0
    engine_tokens: int = 0
    prefill_budget: int = 0
    decode_grant: int = 0
    cells_kept: int = 0
    prefix_hits: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    exports: int = 0
    imports: int = 0
    prefixes: int = 0
    host_prefixes: int = 0
    host_bytes: int = 0
    host_limit_bytes: int = 0
    cut: str = ""
    device: str = ""
    granular: bool = True
    abandons: bool = False
    parks: int = 0
    recalls: int = 0
    parked: int = 0
    parked_bytes: int = 0
    parked_limit_bytes: int = 0
    pins: int = 0
    pinned_tokens: int = 0
    pins_yielded: int = 0
    pins_expired: int = 0


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
    """Every waiting request, by class and place in its queue."""

    queue: tuple[QueueView, ...]
    schema: int = SCHEMA


class ModelsResult(msgspec.Struct, frozen=True):
    """Every served model."""

    models: tuple[ModelView, ...]
    schema: int = SCHEMA


class LoadParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``model``: the name of a model, or the absolute path of a file that is not served yet."""

    model: str


class UnloadParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``now``: end what is queued and running, instead of waiting for it."""

    model: str
    now: bool = False


class ModelResult(msgspec.Struct, frozen=True):
    """A model after it was loaded or unloaded."""

    model: ModelView
    schema: int = SCHEMA


class PressureResult(msgspec.Struct, frozen=True):
    """The operating system's memory, as the watcher sees it.

    Attributes:
        mode: ``on``, ``off`` or ``dry-run``; ``source``: what is armed; ``refused``: better sources, and why not.
        level: ``unknown``, ``normal``, ``warning`` or ``critical``; ``rung``: what is done; ``does``: that in words.
        since: seconds since the rung was last changed; null at ``normal``.
        some, full: percent of the last ten seconds in which some task, or every task, stalled for memory;
            ``available``: share of the memory that can be had; ``kernel``: macOS's own level. Null: not measured here.
        events: events of the armed trigger, ever; ``false_alarms``: those that were not confirmed.
    """

    mode: str
    source: str
    refused: tuple[str, ...]
    level: str
    rung: str
    does: str
    since: float | None
    some: float | None = None
    full: float | None = None
    available: float | None = None
    kernel: int | None = None
    events: int = 0
    false_alarms: int = 0
    schema: int = SCHEMA


class MemoryOwner(msgspec.Struct, frozen=True):
    """What holds memory, or disk space.

    Attributes:
        model: whose it is; empty for the daemon's own.
        owner: ``weights``, ``pool``, ``host tier``, ``parked``, ``worker`` (what else its process holds) or ``daemon``.
        size: bytes; ``most``: bytes it may grow to, null where that is not bounded by a setting.
        disk: it is disk space and no memory.
    """

    model: str
    owner: str
    size: int
    most: int | None = None
    disk: bool = False


class MemResult(msgspec.Struct, frozen=True):
    """Who holds how much.

    Attributes:
        owners: by model, the daemon last.
        resident: bytes of memory that daemon and workers hold by the operating system's count.
        available: bytes that can still be had; ``total``: the machine's, or the smallest limit's.
    """

    owners: tuple[MemoryOwner, ...]
    resident: int
    available: int
    total: int
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


class ClassView(msgspec.Struct, frozen=True):
    """One class of one model: ``cap`` is the most lanes it may hold (null: no cap), ``held`` what it holds."""

    model: str
    qos: str
    cap: int | None
    held: int
    queued: int
    lanes: int
    paused: bool


class ClassesResult(msgspec.Struct, frozen=True):
    """Every class of every model, as it is now: the answer of ``caps`` and of everything that changes classes."""

    classes: tuple[ClassView, ...]
    schema: int = SCHEMA


class SetCapsParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``caps``: most lanes by class; null takes a cap away. Classes that are not named keep theirs."""

    caps: dict[str, int | None]


class ClassParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``qos``: a class, by any of its names."""

    qos: str


class SetQosParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``id``: as for ``cancel``; ``qos``: the new class."""

    id: str
    qos: str


class SetQosResult(msgspec.Struct, frozen=True):
    """Ids that were re-classed, and the class they are in now."""

    requests: tuple[int, ...]
    qos: str
    schema: int = SCHEMA


class PinParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``id``: as for ``explain``; ``ttl``: seconds that the pin lasts, null for no end."""

    id: str
    ttl: float | None = None


class UnpinParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``id``: as for ``explain``, or a number from ``pins``."""

    id: str


class PinView(msgspec.Struct, frozen=True):
    """KV that an operator wants kept.

    Attributes:
        requests: those that have fed it, oldest first; ``origin``: the last one's ``x-request-id``, if it is known.
        tokens: how much it is; ``left``: seconds until it expires, null for never.
        place: ``pool``, ``host memory`` or ``disk``; ``running`` or ``waiting`` if the last request has not ended yet.
    """

    model: str
    requests: tuple[int, ...]
    origin: str
    tokens: int
    place: str
    left: float | None


class PinBudget(msgspec.Struct, frozen=True):
    """What may be pinned of a model's pool, and what is: tokens."""

    model: str
    pinned: int
    most: int


class PinsResult(msgspec.Struct, frozen=True):
    """Every pin, by model, oldest first: the answer of ``pins`` and of everything that changes them."""

    pins: tuple[PinView, ...]
    budgets: tuple[PinBudget, ...]
    schema: int = SCHEMA


class ExplainParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``id``: as for ``cancel``; a request that has ended is known for a while."""

    id: str


class Explanation(msgspec.Struct, frozen=True):
    """What was decided about one request.

    Attributes:
        state: ``queued``, ``running``, ``paused`` or ``ended``.
        now: what it is doing, or waits for, in words.
        sentences: the decisions in words, oldest first; ``trail``: the same as records; ``dropped``: how many are
            not kept.
    """

    model: str
    request: int
    origin: str
    state: Literal["queued", "running", "paused", "ended"]
    now: str
    sentences: tuple[str, ...]
    trail: tuple[dict[str, str | int | float], ...]
    dropped: int = 0


class ExplainResult(msgspec.Struct, frozen=True):
    """One entry per request of that id."""

    requests: tuple[Explanation, ...]
    schema: int = SCHEMA


class TraceParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``cursor``: where the last answer ended; -1 asks only for the present cursor."""

    cursor: int


class TraceEntry(msgspec.Struct, frozen=True):
    """A request that has ended: when it arrived (seconds since the daemon started), its class, its tokens. No text."""

    arrived: float
    qos: str
    prompt: int
    output: int


class TraceResult(msgspec.Struct, frozen=True):
    """Requests that have ended since the cursor, in order of their end; ``lost`` of them are not kept any more."""

    entries: tuple[TraceEntry, ...]
    cursor: int
    lost: int = 0
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
    Method("explain", ExplainParams, ExplainResult, "observer"),
    Method("trace", TraceParams, TraceResult, "observer"),
    Method("caps", NoParams, ClassesResult, "observer"),
    Method("set_caps", SetCapsParams, ClassesResult, "admin"),
    Method("set_qos", SetQosParams, SetQosResult, "admin"),
    Method("pause", ClassParams, ClassesResult, "admin"),
    Method("resume", ClassParams, ClassesResult, "admin"),
    Method("models", NoParams, ModelsResult, "observer"),
    Method("load", LoadParams, ModelResult, "admin"),
    Method("unload", UnloadParams, ModelResult, "admin"),
    Method("pressure", NoParams, PressureResult, "observer"),
    Method("mem", NoParams, MemResult, "observer"),
    Method("pins", NoParams, PinsResult, "observer"),
    Method("pin", PinParams, PinsResult, "admin"),
    Method("unpin", UnpinParams, PinsResult, "admin"),
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

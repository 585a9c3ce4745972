"""Plan, TickReport, Effect: the plain records between the scheduler and the world.

A *plan* says what one tick shall do, a *report* what it did, an *effect* what the shell around the scheduler must
tell a client. They are frozen, ordered and printable, so they are also the format of the golden traces.

Lists are tuples in the order the engine works them off. Requests are named by id, sequences (the engine's own
slots of KV) by number. Counts are tokens; seconds are floats.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from superfluidd.types import FinishReason, RequestId, SamplingParams


class OutOfOrder(Exception):
    """The engine sent a token or a report that cannot follow what it sent before. It is not to be trusted further."""


class Admit(msgspec.Struct, frozen=True):
    """Seat a request in a lane.

    Attributes:
        request: the request's id.
        sequence: the engine sequence that will hold its KV; it is to hold ``cached`` tokens of it already.
        tokens: every token known so far: the prompt and, after a preemption or a worker's death, what was generated.
        prompt: how many of ``tokens`` are the client's prompt; the rest count as generated for penalties.
        cached: how many leading tokens the sequence already holds.
        sampling: how to draw.
    """

    request: RequestId
    sequence: int
    tokens: tuple[int, ...]
    prompt: int
    sampling: SamplingParams
    cached: int = 0


class Free(msgspec.Struct, frozen=True, tag="free", array_like=True):
    """Empty a sequence."""

    sequence: int


class Cut(msgspec.Struct, frozen=True, tag="cut", array_like=True):
    """Shorten a sequence to ``length`` tokens."""

    sequence: int
    length: int


class Copy(msgspec.Struct, frozen=True, tag="copy", array_like=True):
    """Make an empty sequence hold the first ``length`` tokens of another."""

    source: int
    sequence: int
    length: int


class Export(msgspec.Struct, frozen=True, tag="export", array_like=True):
    """Save a sequence's KV in the engine's host memory, under the number ``blob``."""

    sequence: int
    blob: int


class Import(msgspec.Struct, frozen=True, tag="import", array_like=True):
    """Make an empty sequence hold the first ``length`` tokens of what was saved as ``blob``, which stays saved."""

    blob: int
    sequence: int
    length: int


class Discard(msgspec.Struct, frozen=True, tag="discard", array_like=True):
    """Forget what was saved as ``blob``."""

    blob: int


class Park(msgspec.Struct, frozen=True, tag="park", array_like=True):
    """Write KV to disk under a key, together with its token ids (packed, 32 bits each): that of ``sequence``, or what
    is saved as ``blob``. How that went is told whenever it is over."""

    key: str
    tokens: bytes
    sequence: int = -1
    blob: int = 0


class Recall(msgspec.Struct, frozen=True, tag="recall", array_like=True):
    """Make an empty sequence hold the first ``length`` tokens of what was parked under a key, which stays parked."""

    key: str
    sequence: int
    length: int


class Forget(msgspec.Struct, frozen=True, tag="forget", array_like=True):
    """Remove what was parked under a key."""

    key: str


KvOp = Free | Cut | Copy | Export | Import | Discard | Park | Recall | Forget


class Prefill(msgspec.Struct, frozen=True, array_like=True):
    """Feed the next ``tokens`` known tokens of a lane. Reaching the last one yields the lane's next token."""

    request: RequestId
    tokens: int


class Decode(msgspec.Struct, frozen=True, array_like=True):
    """Let a lane run at most ``rounds`` decode rounds, one token each."""

    request: RequestId
    rounds: int


class Plan(msgspec.Struct, frozen=True):
    """One tick. The engine works it off in field order, then in steps until nothing granted is left.

    A step is one decode round for every lane with grant left, then one prefill micro-batch of at most
    ``step_tokens`` tokens, taken from ``prefill`` in order. A lane that finishes its prefill in the tick may use its
    decode grant in the same tick.

    Attributes:
        tick: number of this tick, from 1; the report echoes it.
        retire: requests whose lanes the engine forgets.
        kv: what to do with sequences, in that order. What cannot be done leaves the sequence empty; the report says so.
        admit: requests to seat.
        prefill: prompt chunks, most urgent first.
        decode: decode grants, in lane order.
        step_tokens: cap of one prefill micro-batch.
        exact: the one lane that ticks is batch-invariant: nothing that could change rounding may be tuned meanwhile.
    """

    tick: int
    retire: tuple[RequestId, ...] = ()
    kv: tuple[KvOp, ...] = ()
    admit: tuple[Admit, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    decode: tuple[Decode, ...] = ()
    step_tokens: int = 512
    exact: bool = False

    @property
    def freed(self) -> tuple[int, ...]:
        """Sequences that are emptied."""
        return tuple(op.sequence for op in self.kv if isinstance(op, Free))


class LaneFault(msgspec.Struct, frozen=True):
    """The engine could not go on with one lane; its neighbours are unharmed."""

    request: RequestId
    message: str


class Timing(msgspec.Struct, frozen=True):
    """What a tick cost, for the scheduler's measured rates.

    Attributes:
        decode_rounds: decode rounds run.
        decode_tokens: tokens they produced.
        decode_seconds: time they took.
        prefill_tokens: prompt tokens fed.
        prefill_seconds: time that took.
        threads: compute threads in use when the tick ended; 0 where that has no meaning.
    """

    decode_rounds: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    threads: int = 0


class TickReport(msgspec.Struct, frozen=True):
    """What one tick did. Tokens were streamed ahead of it; ``prefilled`` and ``decoded`` only confirm counts.

    Attributes:
        tick: the plan's number.
        outcome: ``done``; ``stopped`` (ended early because it was told to); ``replan`` (nothing ran: the engine
            cannot hold the plan, ``reason`` says why).
        prefilled: (request, prompt tokens fed) for every lane fed.
        decoded: (request, tokens produced) for every lane that produced any, prefill's first token included.
        faults: lanes that failed.
        cells_used: KV cells in use by the engine's own count.
        timing: measured cost.
        reason: why ``replan``.
        abandoned: (request, prompt tokens) of a prefill step that was given up in its middle; none of it is in KV.
        emptied: sequences that do not hold what the plan wanted in them: they were emptied, and a lane that was seated
            in one has nothing cached.
        exported: (blob, bytes) of what was saved; 0 bytes if that failed and nothing was.
        computed: tokens computed since the engine was loaded, by the runtime's own count.
    """

    tick: int
    outcome: Literal["done", "stopped", "replan"]
    prefilled: tuple[tuple[RequestId, int], ...] = ()
    decoded: tuple[tuple[RequestId, int], ...] = ()
    faults: tuple[LaneFault, ...] = ()
    cells_used: int = 0
    timing: Timing = Timing()
    reason: str = ""
    abandoned: tuple[tuple[RequestId, int], ...] = ()
    emptied: tuple[int, ...] = ()
    exported: tuple[tuple[int, int], ...] = ()
    computed: int = 0


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A request ended; it produces nothing more."""

    request: RequestId
    reason: FinishReason
    error: str = ""
    """What went wrong, for ``FinishReason.ERROR``."""


class Paused(msgspec.Struct, frozen=True, tag=True):
    """A running request lost its lane and waits at the head of its queue; its stream pauses."""

    request: RequestId
    why: str


class Urgency(enum.IntEnum):
    """What the tick in flight should be told."""

    NONE = 0
    """Nothing: it is still the best plan."""
    STOP = 1
    """End at the engine's next step."""
    ABANDON = 2
    """The same, and give a prefill step that is running up."""


Effect = Finished | Paused

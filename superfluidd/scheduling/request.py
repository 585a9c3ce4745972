"""The request record and its phases.

Everything that may change a phase goes through :meth:`Request.move`, and the legal moves are a table. An illegal
move raises and changes nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from superfluidd.scheduling.trail import Trail
from superfluidd.types import FinishReason, QosClass, RequestId, SamplingParams


class Phase(enum.Enum):
    """Where a request is. The phase says which structure holds it."""

    WAITING = "waiting"
    """In its class's queue, never seated yet."""
    RUNNING = "running"
    """In a lane."""
    PREEMPTED = "preempted"
    """Back in its class's queue; it keeps its tokens."""
    FINISHED = "finished"
    """Nowhere: its lane, if it had one, is emptied by the next plan."""


MOVES: dict[Phase, tuple[Phase, ...]] = {
    Phase.WAITING: (Phase.RUNNING, Phase.FINISHED),
    Phase.RUNNING: (Phase.PREEMPTED, Phase.WAITING, Phase.FINISHED),
    Phase.PREEMPTED: (Phase.RUNNING, Phase.FINISHED),
    Phase.FINISHED: (),
}
"""Legal moves. ``RUNNING`` to ``WAITING`` undoes an admission that the engine refused before anything ran."""


class IllegalMove(Exception):
    """A phase change that the table does not allow: a fault of ours, never of a client."""


class Pin(NamedTuple):
    """A wish that KV be kept: its number, the older the smaller, and when it expires, seconds on the caller's clock."""

    number: int
    expires: float


@dataclass(slots=True, eq=False)
class Request:
    """One generation, from submit to its end.

    Attributes:
        id: also the order of arrival.
        qos: class it is queued and judged in; an operator may change it.
        tokens: prompt and generated tokens, all observed; never shortened.
        prompt: how many of them are the prompt.
        max_new: most tokens it may generate, fitted to the window.
        sampling: how it draws.
        batch_invariant: its lane ticks alone.
        media: it holds media, which cannot be fed again.
        arrived: when it was submitted; ``queued``: when it last joined a queue; ``seated``: when it last got a lane;
            ``first_token``, ``last_token``: when those were observed, None before. Seconds on the caller's clock.
        queued_tick, seated_tick: number of the latest tick when it last joined a queue; of the tick that seated it.
        risen: it got its lane because it had waited, ahead of a better class.
        lane, sequence: its seat, None without one.
        fed: how many of ``tokens`` its sequence holds KV for.
        cached: how many tokens of the prompt it did not have to feed when it was first seated.
        lineage: ids of ended requests whose KV it has taken over, oldest first.
        pin: what it leaves when it ends is to be pinned.
        awaits_tick: number of the tick since which it waits for a prefix that another lane is being fed, None if not.
        decoding: its known tokens are all fed but the last, and it draws one more each round.
        pauses: how often it lost its lane.
        starved: ticks in a row in which a younger lane was fed and this one, in prefill, was not.
        abandoned: its latest prefill step was given up, and none has been finished since.
        trail: what was decided about it.
    """

    id: RequestId
    qos: QosClass
    tokens: list[int]
    prompt: int
    max_new: int
    sampling: SamplingParams
    arrived: float
    batch_invariant: bool = False
    media: bool = False
    queued: float = 0.0
    seated: float = 0.0
    first_token: float | None = None
    last_token: float | None = None
    queued_tick: int = 0
    seated_tick: int = 0
    risen: bool = False
    lane: int | None = None
    sequence: int | None = None
    fed: int = 0
    cached: int = 0
    lineage: tuple[RequestId, ...] = ()
    pin: Pin | None = None
    awaits_tick: int | None = None
    decoding: bool = False
    pauses: int = 0
    starved: int = 0
    abandoned: bool = False
    reason: FinishReason | None = None
    phase: Phase = field(default=Phase.WAITING)
    trail: Trail = field(default_factory=Trail)

    def move(self, to: Phase) -> None:
        """Change phase.

        Raises:
            IllegalMove: the table does not allow it; nothing changed.
        """
        if to not in MOVES[self.phase]:
            raise IllegalMove(f"request {self.id} cannot go from {self.phase.value} to {to.value}")
        self.phase = to

    @property
    def preemptible(self) -> bool:
        """Its lane may be taken: it is neither batch-invariant nor holds media."""
        return not self.batch_invariant and not self.media

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt

    @property
    def remaining_new(self) -> int:
        """Tokens it may still generate."""
        return self.max_new - self.generated

    @property
    def unfed(self) -> int:
        """Known tokens the engine does not hold yet. A decoding lane has one."""
        return len(self.tokens) - self.fed

    @property
    def cells(self) -> int:
        """KV cells it needs to its end. The last token is never fed, so it needs none."""
        return self.prompt + self.max_new - 1

"""The request record and its phases.

Everything that may change a phase goes through :meth:`Request.move`, and the legal moves are a table. An illegal
move raises and changes nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

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


@dataclass(slots=True, eq=False)
class Request:
    """One generation, from submit to its end.

    Attributes:
        id: also the order of arrival.
        qos: class it is queued in.
        tokens: prompt and generated tokens, all observed; never shortened.
        prompt: how many of them are the prompt.
        max_new: most tokens it may generate, fitted to the window.
        sampling: how it draws.
        arrived: when it was submitted; ``queued``: when it last joined a queue; ``first_token``: when its first token
            was observed, None before. Seconds on the caller's clock.
        lane, sequence: its seat, None without one.
        fed: how many of ``tokens`` the engine holds KV for.
        decoding: its known tokens are all fed but the last, and it draws one more each round.
        pauses: how often it lost its lane.
    """

    id: RequestId
    qos: QosClass
    tokens: list[int]
    prompt: int
    max_new: int
    sampling: SamplingParams
    arrived: float
    queued: float = 0.0
    first_token: float | None = None
    lane: int | None = None
    sequence: int | None = None
    fed: int = 0
    decoding: bool = False
    pauses: int = 0
    reason: FinishReason | None = None
    phase: Phase = field(default=Phase.WAITING)

    def move(self, to: Phase) -> None:
        """Change phase.

        Raises:
            IllegalMove: the table does not allow it; nothing changed.
        """
        if to not in MOVES[self.phase]:
            raise IllegalMove(f"request {self.id} cannot go from {self.phase.value} to {to.value}")
        self.phase = to

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

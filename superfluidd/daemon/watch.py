"""The tick in flight as an operator sees it: how long it has been running, and when it last showed progress."""

from __future__ import annotations

from collections.abc import Sequence

from superfluidd.scheduling.plan import Urgency
from superfluidd.types import RequestId

SILENT = 10.0
"""Seconds without a step after which an engine is called stalled, or four times its slowest step if that is more."""


class TickWatch:
    """Notes of one model's ticks. Times are the caller's, seconds.

    Attributes:
        tick: number of the tick in flight, or of the last one.
        told: what it has been told, if anything.
        prefilled: prompt tokens fed in it so far, by request.
    """

    def __init__(self) -> None:
        self.tick = 0
        self.told = Urgency.NONE
        self.prefilled: dict[RequestId, int] = {}
        self._started: float | None = None
        self._last_step = 0.0
        self._slowest_step = 0.0

    def begin(self, tick: int, now: float) -> None:
        """A tick is on its way to the engine."""
        self.tick = tick
        self.told = Urgency.NONE
        self._started = self._last_step = now

    def step(self, prefilled: Sequence[tuple[RequestId, int]], now: float) -> None:
        """The engine showed progress."""
        self._slowest_step = max(self._slowest_step, now - self._last_step)
        self._last_step = now
        self.prefilled.update(prefilled)

    def end(self) -> None:
        """The tick is over, one way or the other."""
        self._started = None
        self.prefilled.clear()

    def running(self, now: float) -> float | None:
        """Seconds the tick has been running; None between ticks."""
        return None if self._started is None else now - self._started

    def silent(self, now: float) -> float | None:
        """Seconds since its last progress; None between ticks."""
        return None if self._started is None else now - self._last_step

    def stalled(self, now: float) -> bool:
        """The engine has been silent for longer than any honest step."""
        silent = self.silent(now)
        return silent is not None and silent > max(SILENT, 4 * self._slowest_step)

"""How many compute threads the next step gets, chosen from what steps have been costing.

Compute threads of one step meet at a barrier after every operation, so on a busy machine a thread that waits for a
core makes all the others wait. That is a cliff, not a slope: on two cores beside one busy process, two threads have
measured 10 to 20 times slower than one. No static count is right, so this policy does two things:

* It leaves room at once. Cores that other processes are using (:mod:`.neighbours`) are not used for compute threads,
  for prefill as for decode, and are taken again as soon as they are free.
* It measures. Every decode round is timed; now and then a neighbouring count is tried for a few rounds, soon after
  rounds have become slower than they were, rarely otherwise. A trial that is clearly slower ends after one round; a
  count that was clearly faster is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from superfluidd.engine.port import Runtime


class ThreadPolicy(Protocol):
    """What the executor tells and asks around every step."""

    current: int
    """Compute threads in use; 0 where that has no meaning."""

    def before_round(self, runtime: Runtime, lanes: int) -> None:
        """A decode round of that many lanes is about to run."""

    def after_round(self, lanes: int, seconds: float) -> None:
        """It took that long."""

    def before_prefill(self, runtime: Runtime) -> None:
        """A prefill micro-batch is about to run."""

    def before_exact(self, runtime: Runtime) -> None:
        """A step is about to run whose result must not depend on how many threads there happen to be."""


class FixedThreads:
    """Leaves the runtime's threads alone."""

    current = 0

    def before_round(self, runtime: Runtime, lanes: int) -> None:
        """Nothing to do."""

    def after_round(self, lanes: int, seconds: float) -> None:
        """Nothing to do."""

    def before_prefill(self, runtime: Runtime) -> None:
        """Nothing to do."""

    def before_exact(self, runtime: Runtime) -> None:
        """Nothing to do."""


WARM = 1
"""Rounds of a trial that are not counted: the first round after a change pays for the change."""

PROBE = 3
"""Rounds of a trial that are."""

FEWER, MORE = 0.8, 0.94
"""A count is better if its rounds take less than this share of the present one's. Fewer threads have to show it more
clearly: beside a busy neighbour they win by a factor, and a slip costs a core until the next trial."""

HOPELESS = 1.25
"""A trial ends when a round of it takes this many times as long as the present count's do."""

SLOWED = 2.0
"""Rounds this many times slower than usual mean that something has changed: try fewer threads at once."""

SOON, LATE = 24, 768
"""Rounds until the next trial: after a change, and at most. Every trial in vain doubles the wait."""

ROOM = 0.85
"""Share of a core that others may use before it counts as theirs. A process that never waits uses all of one; clients
and the daemon come in bursts, and less than a whole core is left to the measuring."""


class MeasuredThreads:
    """Uses the cores that others leave, and moves from there towards what measures fastest.

    Args:
        most: threads to use at most.
        foreign: cores that other processes are using now.
    """

    def __init__(self, most: int, foreign: Callable[[], float] = lambda: 0.0) -> None:
        self.current = most
        self._most = most
        self._foreign = foreign
        self._allowed = most
        self._applied = 0
        self._lanes = 0
        self._recent: list[float] = []
        """Seconds of the latest rounds at the present count and number of lanes."""
        self._usual: dict[int, float] = {}
        """Seconds of a round at the present count, by number of lanes: a slow moving average."""
        self._trial: int | None = None
        self._trial_times: list[float] = []
        self._wait = SOON
        self._until = SOON
        self._up = False

    def before_round(self, runtime: Runtime, lanes: int) -> None:
        """Apply the present count, or the one on trial."""
        self._leave_room()
        if lanes != self._lanes:
            # Rounds of different width cannot be compared: a trial under way starts over.
            self._lanes = lanes
            self._recent.clear()
            self._trial = None
        if self._trial is None and self._until <= 0 and len(self._recent) >= PROBE:
            self._begin_trial()
        self._apply(runtime, self.current if self._trial is None else self._trial)

    def after_round(self, lanes: int, seconds: float) -> None:
        """Learn from a round."""
        if self._trial is not None:
            self._trial_times.append(seconds)
            counted = self._trial_times[WARM:]
            if counted and (len(counted) == PROBE or counted[-1] > HOPELESS * _middle(self._recent)):
                self._judge(counted)
            return
        self._until -= 1
        self._recent = [*self._recent[-PROBE:], seconds]
        usual = self._usual.get(lanes)
        if usual is not None and len(self._recent) > PROBE and _middle(self._recent) > SLOWED * usual:
            self._usual[lanes] = _middle(self._recent)
            self._wait, self._until, self._up = SOON, 0, False
        else:
            self._usual[lanes] = seconds if usual is None else 0.95 * usual + 0.05 * seconds

    def before_prefill(self, runtime: Runtime) -> None:
        """Prefill steps are too few and too long to experiment on: they use the present count."""
        self._leave_room()
        self._apply(runtime, self.current)

    def before_exact(self, runtime: Runtime) -> None:
        """Use them all: how work is split between threads can change how sums are rounded."""
        self._apply(runtime, self._most)

    def _leave_room(self) -> None:
        allowed = max(1, self._most - int(self._foreign() + 1 - ROOM))
        if allowed != self._allowed:
            self._allowed = allowed
            self._settle_on(allowed)

    def _settle_on(self, count: int) -> None:
        self.current = count
        self._trial = None
        self._recent.clear()
        self._usual.clear()
        self._wait = self._until = SOON

    def _apply(self, runtime: Runtime, count: int) -> None:
        if count != self._applied:
            runtime.set_threads(count, count)
            self._applied = count

    def _begin_trial(self) -> None:
        """Try fewer and more threads in turn. Never more than others leave room for.

        With many threads one more or less makes no clear difference, and one less than too many is still too many:
        so half of them is tried below, and from there the way up goes by quarters.
        """
        if self._up and self.current >= self._allowed:
            self._up = False
        elif not self._up and self.current == 1:
            self._up = True
        more = min(self.current + max(1, self.current // 4), self._allowed)
        other = more if self._up else (self.current + 1) // 2
        if 1 <= other != self.current:
            self._trial = other
            self._trial_times = []
        else:
            self._until = LATE

    def _judge(self, times: list[float]) -> None:
        assert self._trial is not None
        enough = FEWER if self._trial < self.current else MORE
        if len(times) == PROBE and _middle(times) < enough * _middle(self._recent):
            self._settle_on(self._trial)
            return
        self._trial = None
        self._wait = min(2 * self._wait, LATE)
        self._until = self._wait
        self._up = not self._up


def _middle(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]

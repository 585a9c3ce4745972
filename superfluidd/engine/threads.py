"""How many compute threads the next step gets, chosen from what steps have been costing.

Compute threads of one step meet at a barrier after every operation, so on a busy machine a thread that waits for a
core makes all the others wait: two threads beside one busy neighbour are slower than one. The count that is best can
only be measured, and it changes with the neighbours. So the executor times every decode round, and this policy

* keeps a moving average of a round's time per thread count, by number of lanes (their cost differs);
* tries a neighbouring count now and then: rarely while the present one is as fast as it has been, soon after it has
  become slower than it was;
* moves when the other count was clearly faster in paired rounds, taken one after the other.

Prefill follows the decision made on decode rounds, because a prefill step is too rare and too long to experiment on.
"""

from __future__ import annotations

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

    def after_prefill(self, tokens: int, seconds: float) -> None:
        """It fed that many tokens in that time."""


class FixedThreads:
    """Leaves the runtime's threads alone."""

    current = 0

    def before_round(self, runtime: Runtime, lanes: int) -> None:
        """Nothing to do."""

    def after_round(self, lanes: int, seconds: float) -> None:
        """Nothing to do."""

    def before_prefill(self, runtime: Runtime) -> None:
        """Nothing to do."""

    def after_prefill(self, tokens: int, seconds: float) -> None:
        """Nothing to do."""


WARM = 1
"""Rounds of a probe that are not counted: the first round after a change pays for the change."""

PROBE = 3
"""Rounds of a probe that are."""

CLEARLY = 0.94
"""A count is better if its rounds take less than this share of the present one's."""

SLOWED = 1.3
"""Rounds this many times slower than usual mean that something has changed: probe at once."""

SOON, LATE_DOWN, LATE_UP = 16, 512, 128
"""Rounds until the next probe: after a change, and at most, towards fewer and towards more threads. More threads are
tried more often, because nothing else would show that the machine has become quiet again."""


class MeasuredThreads:
    """Moves the thread count towards what has been measured to be fastest.

    Args:
        most: threads to use at most; it starts there.
    """

    def __init__(self, most: int) -> None:
        self.current = most
        self._most = most
        self._applied = 0
        self._lanes = 0
        self._recent: list[float] = []
        self._usual: dict[int, float] = {}
        """Seconds per round at the present count, by number of lanes: a slow moving average."""
        self._trial: int | None = None
        self._trial_times: list[float] = []
        self._down = True
        self._until = SOON
        self._wait = {True: SOON, False: SOON}

    def before_round(self, runtime: Runtime, lanes: int) -> None:
        """Apply the present count, or the one on trial."""
        if lanes != self._lanes:
            # Rounds of different width cannot be compared: a trial under way starts over.
            self._lanes = lanes
            self._recent.clear()
            self._trial_times.clear()
            self._trial = None
        if self._trial is None and self._until <= 0 and len(self._recent) >= PROBE:
            self._begin_trial()
        self._apply(runtime, self.current if self._trial is None else self._trial)

    def after_round(self, lanes: int, seconds: float) -> None:
        """Learn from a round."""
        if self._trial is not None:
            self._trial_times.append(seconds)
            if len(self._trial_times) == WARM + PROBE:
                self._judge()
            return
        self._until -= 1
        self._recent = [*self._recent[-(PROBE + 1) :], seconds]
        usual = self._usual.get(lanes)
        if usual is not None and len(self._recent) > PROBE and _middle(self._recent) > SLOWED * usual:
            self._until = 0
            self._usual[lanes] = _middle(self._recent)
            self._wait = {True: SOON, False: SOON}
            self._down = True
        else:
            self._usual[lanes] = seconds if usual is None else 0.95 * usual + 0.05 * seconds

    def before_prefill(self, runtime: Runtime) -> None:
        """Prefill uses the present count."""
        self._apply(runtime, self.current)

    def after_prefill(self, tokens: int, seconds: float) -> None:
        """Prefill steps are too few to learn from."""

    def _apply(self, runtime: Runtime, count: int) -> None:
        if count != self._applied:
            runtime.set_threads(count, count)
            self._applied = count

    def _begin_trial(self) -> None:
        if self._down and self.current == 1:
            self._down = False
        elif not self._down and self.current == self._most:
            self._down = True
        other = self.current - 1 if self._down else self.current + 1
        if 1 <= other <= self._most:
            self._trial = other
            self._trial_times = []
        else:
            self._until = LATE_DOWN

    def _judge(self) -> None:
        other = _middle(self._trial_times[WARM:])
        present = _middle(self._recent)
        assert self._trial is not None
        if other < CLEARLY * present:
            self.current = self._trial
            self._usual = {self._lanes: other}
            self._recent = self._trial_times[WARM:]
            self._wait = {True: SOON, False: SOON}
            self._until = SOON
        else:
            self._wait[self._down] = min(2 * self._wait[self._down], LATE_DOWN if self._down else LATE_UP)
            self._until = self._wait[self._down]
            if 1 < self.current < self._most:
                self._down = not self._down
        self._trial = None
        self._trial_times = []


def _middle(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]

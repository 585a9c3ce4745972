"""Who ticks: all seated lanes together, or one batch-invariant lane alone."""

from __future__ import annotations

from collections.abc import Sequence

from superfluidd.scheduling.qos import URGENT
from superfluidd.scheduling.request import Request
from superfluidd.types import RequestId


class Turns:
    """Takes turns between the lanes that share their ticks and those that tick alone.

    A batch-invariant lane never shares a tick, so that its output does not depend on other traffic (source: the
    specification, "Batch-invariant lanes"). One such tick is followed by one of the others, so neither side stands
    still; and while an interactive or completion prompt of a better class is being prefilled, it does not wait.
    """

    def __init__(self) -> None:
        self._alone = False
        self._last: RequestId = 0

    def take(self, seated: Sequence[Request]) -> tuple[list[Request], bool]:
        """The lanes of the next tick, and whether it is a batch-invariant one's."""
        together = [lane for lane in seated if not lane.batch_invariant]
        alone = sorted((lane for lane in seated if lane.batch_invariant), key=lambda lane: lane.id)
        if not alone:
            self._alone = False
            return together, False
        following = next((lane for lane in alone if lane.id > self._last), alone[0])
        hurry = any(lane.qos <= URGENT and lane.qos < following.qos and not lane.decoding for lane in together)
        if together and (self._alone or hurry):
            self._alone = False
            return together, False
        self._alone, self._last = True, following.id
        return [following], True

"""Lanes: who sits where, how many lanes a class may hold, and which classes an operator has paused."""

from __future__ import annotations

from collections.abc import Mapping

from superfluidd.scheduling.request import Request
from superfluidd.types import QosClass


class Lanes:
    """The seats of one engine.

    Args:
        count: lanes there are.
        caps: most lanes of a class; a class that is not in it has no cap.
    """

    def __init__(self, count: int, caps: Mapping[QosClass, int] | None = None) -> None:
        self.count = count
        self.caps: dict[QosClass, int] = dict(caps or {})
        self.paused: set[QosClass] = set()
        """Classes that get no lanes. Asked for membership only: its order means nothing."""
        self._seats: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def full(self) -> bool:
        """No lane is free."""
        return len(self._seats) >= self.count

    def in_order(self) -> list[Request]:
        """Seated requests by lane number."""
        return [self._seats[lane] for lane in sorted(self._seats)]

    def held_by(self, qos: QosClass) -> int:
        """Lanes a class holds."""
        return sum(record.qos is qos for record in self._seats.values())

    def capped(self, qos: QosClass) -> bool:
        """Whether a class may have no more lanes. A cap below what it holds takes nothing away: running lanes end in
        their own time."""
        return qos in self.caps and self.held_by(qos) >= self.caps[qos]

    def seat(self, record: Request) -> int:
        """Give a request the lowest free lane."""
        record.lane = next(lane for lane in range(self.count) if lane not in self._seats)
        self._seats[record.lane] = record
        return record.lane

    def leave(self, record: Request) -> int:
        """Take the lane back."""
        assert record.lane is not None
        lane = record.lane
        del self._seats[lane]
        record.lane = None
        return lane

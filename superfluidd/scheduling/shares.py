"""Bytes that several schedulers share: host memory for KV, and disk space for what is parked.

Whoever needs room takes what nobody holds. Who holds more than an equal part gives that back when another one that
holds less asks, with its next plan; until then the other one does without, so the limit always holds.
"""

from __future__ import annotations

from collections.abc import Callable


class Budget:
    """A limit over all its shares.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._shares: list[Share] = []

    def join(self, nudge: Callable[[], None]) -> Share:
        """A new share; ``nudge`` is called when something is to be given back with the next plan."""
        share = Share(self, nudge)
        self._shares.append(share)
        return share

    @property
    def part(self) -> int:
        """What each of them may always have in the end."""
        return self.limit // max(1, len(self._shares))

    def others(self, share: Share) -> list[Share]:
        """All but that one."""
        return [other for other in self._shares if other is not share]

    def leave(self, share: Share) -> None:
        """It holds nothing any more. May be called more than once."""
        self._shares = self.others(share)


class Share:
    """What one scheduler holds of a budget. Made by :meth:`Budget.join`."""

    def __init__(self, budget: Budget, nudge: Callable[[], None]) -> None:
        self.held: Callable[[], int] = lambda: 0
        """Bytes that are held now; set by who holds them."""
        self.owed = 0
        """Bytes to give back."""
        self._budget = budget
        self._nudge = nudge

    @property
    def room(self) -> int:
        """Most bytes that may be held now: the limit without what the others hold."""
        return self._budget.limit - sum(other.held() for other in self._budget.others(self))

    def ask(self, size: int) -> None:
        """There is no room for ``size`` bytes more. Those who hold more than their part are to make it, as far as this
        one has a right to it."""
        wanted = min(self.held() + size, self._budget.part) - self.room
        for other in self._budget.others(self):
            owes = min(wanted, other.held() - self._budget.part)
            if owes > other.owed:
                other.owed = owes
                other._nudge()
            wanted -= max(0, owes)

    def leave(self) -> None:
        """Nothing is held any more."""
        self.held = lambda: 0
        self._budget.leave(self)

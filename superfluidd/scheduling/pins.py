"""Pins: KV that an operator wants kept, within a part of the pool, as long as nothing else can make room.

A pinned entry goes after every other one, the oldest pin first. Its pin is not more than that: live lanes come first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from superfluidd.errors import InvalidValue
from superfluidd.scheduling.entries import Entry, Pin
from superfluidd.scheduling.request import Request
from superfluidd.scheduling.tiers import Tiers
from superfluidd.types import RequestId

Place = Literal["running", "waiting", "pool", "host memory", "disk"]


class Pinned(msgspec.Struct, frozen=True):
    """A pin, to look at.

    Attributes:
        requests: whose KV it is, oldest first.
        tokens: how much of it there is.
        place: where it is, or what its request does: it is pinned once that has ended.
        expires: on the scheduler's clock; infinite if it never does.
    """

    requests: tuple[RequestId, ...]
    tokens: int
    place: Place
    expires: float


class Pins(Tiers):
    """Tiers of which some entries are pinned."""

    @property
    def pin_cells(self) -> int:
        """How much may be pinned, tokens."""
        return int(self.cache.pin_part * self._pool.cells)

    @property
    def pin_expires(self) -> float:
        """When the next pin expires; infinite if none does."""
        return min((entry.pin.expires for entry in self._entries if entry.pin), default=math.inf)

    def pin(self, request: RequestId, live: Iterable[Request], expires: float) -> int:
        """Pin what a request has left, or will leave when it ends.

        Args:
            request: it is queued, running or has ended.
            live: those that have not.
            expires: when the pin does.

        Returns:
            How many tokens that is by now.

        Raises:
            InvalidValue: there is nothing, or it is too much.
        """
        if not self.cache.enabled:
            raise InvalidValue("nothing is kept to be pinned: the daemon runs with --prefix-cache off", param="id")
        record = next((one for one in live if one.id == request or request in one.lineage), None)
        entry = self._left_by(request)
        length = len(record.tokens) if record is not None else entry.length if entry is not None else 0
        if length > self.pin_cells:
            raise InvalidValue(
                f"request {request} has {length} tokens, and {self.pin_cells} of the pool's {self._pool.cells} may be "
                f"pinned; raise --pin-budget-pct, which is {self.cache.pin_part * 100:g}",
                param="id",
            )
        self._last_pin += 1
        pin = Pin(self._last_pin, expires)
        if record is not None:
            record.pin = pin
        elif entry is not None:
            self._pin(entry, pin)
        else:
            raise InvalidValue(
                f"nothing of request {request} is kept any more; send its conversation again, and pin that", param="id"
            )
        return length

    def unpin(self, request: RequestId, live: Iterable[Request]) -> bool:
        """Take a request's pin away; False if it has none."""
        found = False
        for record in live:
            if record.pin and (record.id == request or request in record.lineage):
                record.pin, found = None, True
        for entry in [entry for entry in self._entries if entry.pin and request in entry.requests]:
            self._release(entry)
            found = True
        return found

    def pins(self, live: Iterable[Request]) -> list[Pinned]:
        """Every pin, oldest first."""
        found = [(entry.pin, _describe(entry, entry.pin)) for entry in self._entries if entry.pin]
        found += [(record.pin, _foresee(record, record.pin)) for record in live if record.pin]
        return [pinned for _, pinned in sorted(found, key=lambda pair: pair[0])]

    def expire_pins(self, now: float) -> None:
        """Pins whose time is over are pins no more."""
        if self.pin_expires <= now:
            for entry in [entry for entry in self._entries if entry.pin and entry.pin.expires <= now]:
                self._counters.pins_expired += 1
                self._release(entry)

    def _left_by(self, request: RequestId) -> Entry | None:
        """What holds most of what a request has left."""
        choice = [entry for entry in self._entries if request in entry.requests and entry.owner is None]
        return max(choice, key=lambda entry: entry.length, default=None)

    def _pin(self, entry: Entry, pin: Pin) -> bool:
        """Pin an entry; the oldest pins make room for it. False if even all of them would not."""
        if entry.length > self.pin_cells:
            return False
        entry.pin = None
        while sum(other.length for other in self._entries if other.pin) + entry.length > self.pin_cells:
            oldest = min((other for other in self._entries if other.pin), key=lambda other: other.pin or pin)
            self._counters.pins_yielded += 1
            self._release(oldest)
        entry.pin = pin
        return True

    def _release(self, entry: Entry) -> None:
        """An entry is like any other again, and gone if another one begins with all of it."""
        entry.pin = None
        if self.cache.cut != "anywhere" or entry.owner is not None:
            return
        for other in self._entries:
            if other is not entry and other.tokens.startswith(entry.tokens) and other.sequence is not None:
                self._supersede(entry, other)
                return


def _describe(entry: Entry, pin: Pin) -> Pinned:
    place: Place = "pool" if entry.sequence is not None else "host memory" if entry.blob is not None else "disk"
    return Pinned(entry.requests, entry.length, place, pin.expires)


def _foresee(record: Request, pin: Pin) -> Pinned:
    place: Place = "waiting" if record.lane is None else "running"
    return Pinned((*record.lineage, record.id), len(record.tokens), place, pin.expires)

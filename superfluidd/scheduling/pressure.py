"""Memory pressure of the operating system: samples become a level, levels in time become a rung of the ladder. Pure.

A *level* says how things are by what was just measured. A *rung* says what is done about it: it rises at once and falls
only after a hold time, so that pressure that comes and goes does not make the daemon throw its caches away and fill
them again (source: the specification, "Memory pressure").
"""

from __future__ import annotations

import enum
from collections import deque

import msgspec

from superfluidd.types import QosClass

SOME_WARNING, FULL_CRITICAL = 10.0, 5.0
"""Percent of the last ten seconds in which some task, or every task, stood still for want of memory."""

AVAILABLE_WARNING, AVAILABLE_CRITICAL = 0.10, 0.05
"""Shares of the memory that can still be had; they count only where the kernel does not measure pressure."""

EVENTS_SECONDS = 10.0
"""Events are news for so long."""

EVENTS_CRITICAL = 3
"""Events within that time after which pressure has outlasted what was done about it. A kernel sends one in two seconds
at most."""

STALE_SECONDS = 5.0
"""After that a reading says nothing about the present."""

HOLD_SECONDS = 30.0
"""How long a lower level must have lasted before the rung falls to it."""

STEP_SECONDS = 15.0
"""How long critical pressure lasts before the next class is not admitted."""

TINY_CELLS = 1024
"""A chat of at most so many tokens is served whatever happens."""


class Level(enum.IntEnum):
    """What a reading says."""

    UNKNOWN = -1
    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


class Rung(enum.IntEnum):
    """What is done: each rung includes those below it, NORMAL does nothing.

    WARNING drops what is in host memory, evicts once, and saves nothing there. CRITICAL takes the lanes of decoding
    background requests and admits none; then no agents are admitted, then no completions, at last no chats but tiny
    ones.
    """

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2
    NO_AGENTS = 3
    NO_COMPLETIONS = 4
    TINY_CHATS = 5

    def admits(self, qos: QosClass, cells: int) -> bool:
        """Whether a request of a class that needs so many cells may be given a lane."""
        if self < Rung.CRITICAL:
            return True
        if qos is QosClass.INTERACTIVE:
            return self < Rung.TINY_CHATS or cells <= TINY_CELLS
        return qos < QosClass.BACKGROUND - (self - Rung.CRITICAL)


class Reading(msgspec.Struct, frozen=True):
    """What sensors said at one moment. None is what there is no sensor for.

    Attributes:
        at: seconds on the caller's clock.
        some, full: percent of the last ten seconds in which some task, or every task, stalled for memory.
        available: share of the memory that can still be had.
        kernel: macOS's own level: 1 normal, 2 warning, 4 critical.
        event: this was sent because of pressure, not asked for.
    """

    at: float
    some: float | None = None
    full: float | None = None
    available: float | None = None
    kernel: int | None = None
    event: bool = False


class Gauge:
    """Levels from the readings of one source."""

    def __init__(self) -> None:
        self._latest: Reading | None = None
        self._events: deque[float] = deque()

    def take(self, reading: Reading) -> None:
        """A sensor has said something. An event without figures does not replace figures."""
        if reading.event:
            self._events.append(reading.at)
        figures = (reading.some, reading.full, reading.available, reading.kernel)
        if any(figure is not None for figure in figures):
            self._latest = reading

    @property
    def latest(self) -> Reading | None:
        """The latest reading with figures."""
        return self._latest

    def level(self, now: float) -> Level:
        """What is known at this moment. What nothing has been heard of lately is unknown: neither well nor ill."""
        while self._events and now - self._events[0] > EVENTS_SECONDS:
            self._events.popleft()
        told = Level.UNKNOWN
        if self._events:
            told = Level.CRITICAL if len(self._events) >= EVENTS_CRITICAL else Level.WARNING
        latest = self._latest
        if latest is None or now - latest.at > STALE_SECONDS:
            return told
        return max(told, measured(latest))


def measured(reading: Reading) -> Level:
    """What a reading's figures say by themselves."""
    if reading.kernel is not None:
        return {1: Level.NORMAL, 2: Level.WARNING, 4: Level.CRITICAL}.get(reading.kernel, Level.UNKNOWN)
    if reading.some is not None or reading.full is not None:
        if (reading.full or 0.0) >= FULL_CRITICAL:
            return Level.CRITICAL
        return Level.WARNING if (reading.some or 0.0) >= SOME_WARNING else Level.NORMAL
    if reading.available is not None:
        if reading.available <= AVAILABLE_CRITICAL:
            return Level.CRITICAL
        return Level.WARNING if reading.available <= AVAILABLE_WARNING else Level.NORMAL
    return Level.UNKNOWN


class Ladder:
    """The rung that levels in time come to.

    Args:
        hold: seconds that a lower level must last before the rung falls to it.
        step: seconds of critical pressure from one class to the next.
    """

    def __init__(self, hold: float = HOLD_SECONDS, step: float = STEP_SECONDS) -> None:
        self.rung = Rung.NORMAL
        self.since = 0.0
        """When the rung was last changed."""
        self._hold = hold
        self._step = step
        self._lower_since: float | None = None
        self._lower = Rung.NORMAL
        """The highest that was asked for since then."""
        self._critical_since: float | None = None

    def feed(self, level: Level, now: float) -> Rung:
        """Take the present level, at least once a second, and return the rung.

        The rung falls to the highest of the levels that the hold time has seen, and only if all of them were below it.
        Unknown is not normal: the rung falls from critical to warning, since nothing says that it still is critical,
        and no further. Nor does it rise.
        """
        target = self._target(level, now)
        if target >= self.rung:
            self._lower_since = None
            if target > self.rung:
                self.rung, self.since = target, now
            return self.rung
        if self._lower_since is None:
            self._lower_since, self._lower = now, Rung.NORMAL
        self._lower = max(self._lower, target)
        if now - self._lower_since >= self._hold:
            self.rung, self.since, self._lower_since = self._lower, now, None
        return self.rung

    def _target(self, level: Level, now: float) -> Rung:
        if level is not Level.CRITICAL:
            self._critical_since = None
            if level is Level.UNKNOWN:
                return min(self.rung, Rung.WARNING)
            return Rung.WARNING if level is Level.WARNING else Rung.NORMAL
        if self._critical_since is None:
            self._critical_since = now
        steps = int((now - self._critical_since) / self._step)
        return Rung(min(Rung.CRITICAL + steps, Rung.TINY_CHATS))

"""How many cores the rest of the machine is using: what leaves how much room for compute threads.

Looks only at the processors this process may run on, so that a neighbour pinned elsewhere does not count.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

WINDOW = 0.25
"""Seconds between two looks at least: the kernel counts processor time in hundredths of a second."""

STEADY = 1.0
"""Seconds of use that count at once. A shorter burst, such as a client starting up, counts only if it goes on."""


class Neighbours:
    """Cores that other processes have been using steadily, averaged since the last look.

    Args:
        busy: seconds the processors have been busy so far, by everybody; by default the system's own count.
        own: seconds of it that were ours.
        clock: wall-clock seconds.
    """

    def __init__(
        self,
        busy: Callable[[], float] | None = None,
        own: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy = busy or _busy_seconds
        self._own = own or _own_seconds
        self._clock = clock
        self._at = clock()
        self._others = self._busy() - self._own()
        self._latest = 0.0
        self._cores = 0.0

    def cores(self) -> float:
        """The latest figure; a new one once the last is WINDOW seconds old."""
        now = self._clock()
        if now - self._at >= WINDOW:
            others = self._busy() - self._own()
            span, before = now - self._at, self._latest
            self._latest = max(0.0, (others - self._others) / span)
            self._cores = self._latest if span >= STEADY else min(self._latest, before)
            self._at, self._others = now, others
        return self._cores


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity, and the processor quota of its cgroup if that is less; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return max(1, count)
    if quota == "max":
        return max(1, count)
    return max(1, min(count, math.ceil(int(quota) / int(period))))


def _busy_seconds() -> float:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return sum(
        times.user + times.system + times.nice + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
        for number, times in enumerate(psutil.cpu_times(percpu=True))
        if allowed is None or number in allowed
    )


def _own_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system

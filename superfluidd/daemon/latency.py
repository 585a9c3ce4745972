"""How long requests of each class wait: histograms, fed by the model's task and read by ``/metrics``."""

from __future__ import annotations

from bisect import bisect_left

from superfluidd.types import QosClass

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
"""Upper bounds, seconds; what takes longer is counted beyond the last."""


class Histogram:
    """Counts of durations, by bucket."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, how many were no longer), as Prometheus writes it."""
        rows: list[tuple[str, int]] = []
        below = 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            below += count
            rows.append((bound, below))
        return rows


def _by_class() -> dict[QosClass, Histogram]:
    return {qos: Histogram() for qos in QosClass}


class Latency:
    """One model's histograms by class.

    Attributes:
        queue_wait: from joining a queue to getting a lane, every time.
        ttft: from arrival to the first token, waiting included.
        gap: between tokens of one request, as the daemon sees them; a preemption is a gap, too.
    """

    def __init__(self) -> None:
        self.queue_wait = _by_class()
        self.ttft = _by_class()
        self.gap = _by_class()

    def token(self, qos: QosClass, arrived: float, last: float | None, now: float) -> None:
        """A token was observed; ``last`` is when the one before was. Tokens of one frame have no gap."""
        if last is None:
            self.ttft[qos].add(now - arrived)
        elif now > last:
            self.gap[qos].add(now - last)

"""What a simulation counts: durations by class in bounded memory, and what the engine did."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from superfluidd.types import QosClass

GROWTH = 1.02
"""Ratio of neighbouring buckets: a percentile is right to one part in a hundred."""

_LOG = math.log(GROWTH)
LEAST = 1e-6
"""Seconds below which durations are not told apart."""


class Durations:
    """Counts of durations in buckets that grow by a factor."""

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}
        self.count = 0
        self.most = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        bucket = math.floor(math.log(seconds) / _LOG) if seconds > LEAST else _FLOOR
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1
        if seconds > self.most:
            self.most = seconds

    def percentile(self, share: float) -> float:
        """The duration that this share of them does not exceed; 0 if there are none."""
        wanted, seen = math.ceil(share * self.count), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= wanted:
                return 0.0 if bucket <= _FLOOR else min(self.most, GROWTH ** (bucket + 0.5))
        return 0.0


_FLOOR = math.floor(math.log(LEAST) / _LOG) - 1


@dataclass
class ClassStats:
    """One class.

    Attributes:
        queue_wait: from joining a queue to a lane, every time; ``ttft``: from arrival to the first token; ``gap``:
            between tokens of a request.
    """

    requests: int = 0
    finished: int = 0
    tokens: int = 0
    queue_wait: Durations = field(default_factory=Durations)
    ttft: Durations = field(default_factory=Durations)
    gap: Durations = field(default_factory=Durations)
    preemptions: int = 0
    starvation_grants: int = 0


@dataclass
class Stats:
    """A whole run.

    Attributes:
        seconds: virtual time from the first arrival to the last token.
        busy: of which the engine worked; ``lane_seconds``: lanes in use, integrated over time.
        prefill_tokens: fed; ``abandoned_tokens``: of them in steps that were given up; ``cached_tokens``: not fed,
            because what another request had left was used.
    """

    classes: dict[QosClass, ClassStats] = field(default_factory=lambda: {qos: ClassStats() for qos in QosClass})
    ticks: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    lane_seconds: float = 0.0
    lanes: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    abandoned_tokens: int = 0
    cached_tokens: int = 0

    @property
    def utilisation(self) -> float:
        """Share of the time in which the engine worked."""
        return self.busy / self.seconds if self.seconds else 0.0

    @property
    def mean_lanes(self) -> float:
        """Lanes in use on average."""
        return self.lane_seconds / self.seconds if self.seconds else 0.0


class Timeline:
    """Lanes by class over time, in at most :data:`MOST` spans: they double in length when there would be more."""

    MOST = 2000

    def __init__(self) -> None:
        self.span = 1.0
        self.rows: list[list[float]] = []
        """Per span and class: lanes in use, integrated over the span."""

    def add(self, start: float, seconds: float, lanes: list[int]) -> None:
        """So many lanes of each class were in use from ``start`` on for so long."""
        end = start + seconds
        while end / self.span >= self.MOST:
            self.span *= 2
            odd = [*self.rows, [0.0] * len(QosClass)] if len(self.rows) % 2 else self.rows
            self.rows = [
                [a + b for a, b in zip(first, second, strict=True)]
                for first, second in zip(odd[::2], odd[1::2], strict=True)
            ]
        while len(self.rows) <= int(end / self.span):
            self.rows.append([0.0] * len(QosClass))
        while start < end:
            index = int(start / self.span)
            until = min(end, (index + 1) * self.span)
            if until <= start:
                break
            for qos, count in enumerate(lanes):
                self.rows[index][qos] += count * (until - start)
            start = until

    def mean_lanes(self) -> list[list[float]]:
        """Per span: lanes of each class on average."""
        return [[value / self.span for value in row] for row in self.rows]

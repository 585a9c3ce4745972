"""What a scheduler has counted, and its present state, in one record."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from superfluidd.scheduling import budget
from superfluidd.scheduling.plan import TickReport
from superfluidd.types import FinishReason, QosClass


def _per_class() -> dict[QosClass, int]:
    return dict.fromkeys(QosClass, 0)


@dataclass(slots=True)
class Counters:
    """Counts since the start. ``pauses`` counts lanes lost for any reason, ``preemptions`` those given to somebody."""

    ticks: int = 0
    submitted: int = 0
    pauses: int = 0
    replans: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    abandoned_tokens: int = 0
    decode_tokens: int = 0
    decode_rounds: int = 0
    decode_seconds: float = 0.0
    computed: int = 0
    prefix_hits: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    exports: int = 0
    imports: int = 0
    parks: int = 0
    recalls: int = 0
    pins_yielded: int = 0
    pins_expired: int = 0
    engine_computed: int = 0
    """What the running engine had counted at its latest report."""
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    preemptions: dict[QosClass, int] = field(default_factory=_per_class)
    starvation_grants: dict[QosClass, int] = field(default_factory=_per_class)

    def take(self, report: TickReport) -> None:
        """Add what a tick did; its decoded tokens were counted as they were observed."""
        self.computed += report.computed - self.engine_computed
        self.engine_computed = report.computed
        self.prefill_tokens += sum(fed for _, fed in report.prefilled)
        self.prefill_seconds += report.timing.prefill_seconds
        self.abandoned_tokens += sum(lost for _, lost in report.abandoned)
        self.decode_rounds += report.timing.decode_rounds
        self.decode_seconds += report.timing.decode_seconds


class KvStatistics(msgspec.Struct, frozen=True):
    """The prefix cache.

    Attributes:
        hits: requests that were seeded when they were first seated; ``cached_tokens``: prompt tokens they did not have
            to feed.
        evictions: entries that had to leave the pool.
        exports, imports: KV saved in host memory, and brought back.
        parks, recalls: KV written to disk, and brought back.
        entries: prefixes held now, ``host_entries`` of them in host memory, where they take ``host_bytes``,
            ``parked_entries`` on disk, where they take ``parked_bytes``.
        pins: entries that are pinned now, with ``pinned_tokens`` in all; ``pins_yielded``: times that one had to leave
            the pool or lost its pin to a newer one; ``pins_expired``: times that one was over.
    """

    hits: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    exports: int = 0
    imports: int = 0
    entries: int = 0
    host_entries: int = 0
    host_bytes: int = 0
    parks: int = 0
    recalls: int = 0
    parked_entries: int = 0
    parked_bytes: int = 0
    pins: int = 0
    pinned_tokens: int = 0
    pins_yielded: int = 0
    pins_expired: int = 0


class Statistics(msgspec.Struct, frozen=True):
    """Counters since the start, and the present state.

    Attributes:
        computed: tokens the engine itself has counted, whatever they were for.
        preemptions, starvation_grants: by class of the request that lost a lane, or got one for having waited.
        prefill_budget: prompt tokens the latest tick was allowed; ``decode_grant``: tokens it was allowed to decode.
        cells_kept: KV cells of preempted requests and of the prefix cache.
        kv: what the cache has done and holds.
    """

    ticks: int
    submitted: int
    finished: dict[FinishReason, int]
    pauses: int
    preemptions: dict[QosClass, int]
    starvation_grants: dict[QosClass, int]
    replans: int
    prefill_tokens: int
    prefill_seconds: float
    abandoned_tokens: int
    computed: int
    decode_tokens: int
    decode_rounds: int
    decode_seconds: float
    lanes: int
    lanes_busy: int
    queued: dict[QosClass, int]
    caps: dict[QosClass, int]
    paused: tuple[QosClass, ...]
    cells: int
    cells_promised: int
    cells_kept: int
    cells_used: int
    prefill_budget: int
    decode_grant: int
    rates: budget.Rates
    threads: int
    kv: KvStatistics

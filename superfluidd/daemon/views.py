"""Requests and counts as records for the edges: pure functions of the scheduler's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from superfluidd.control.protocol import LaneView, ModelView, QueueView
from superfluidd.scheduling.request import Request
from superfluidd.scheduling.statistics import Statistics
from superfluidd.types import RequestId

Why = Callable[[Request], str]
"""What a waiting request waits for, in words."""

Origin = Callable[[RequestId], str]
"""The ``x-request-id`` of a request."""


def lane_views(
    model: str, seated: Sequence[Request], origin: Origin, prefilled: Mapping[RequestId, int], now: float
) -> list[LaneView]:
    """Running requests, in the order given.

    Args:
        model: its name.
        seated: requests with a lane.
        origin: names them.
        prefilled: prompt tokens fed in the tick in flight, which the records do not count yet.
        now: seconds on the clock of the records.
    """
    return [
        LaneView(
            model=model,
            lane=record.lane,
            request=record.id,
            origin=origin(record.id),
            qos=record.qos.label,
            phase="decode" if record.decoding else "prefill",
            prompt=record.prompt,
            prefilled=record.fed if record.decoding else record.fed + prefilled.get(record.id, 0),
            generated=record.generated,
            max_tokens=record.max_new,
            cells=record.cells,
            age=now - record.arrived,
            ttft=None if record.first_token is None else record.first_token - record.arrived,
            pauses=record.pauses,
            batch_invariant=record.batch_invariant,
        )
        for record in seated
        if record.lane is not None
    ]


def queue_views(model: str, queued: Sequence[Request], origin: Origin, why: Why, now: float) -> list[QueueView]:
    """Waiting requests, by class and place; ``why`` is asked about the first of each class."""
    places: Counter[str] = Counter()
    views: list[QueueView] = []
    for record in queued:
        places[record.qos.label] += 1
        views.append(
            QueueView(
                model=model,
                request=record.id,
                origin=origin(record.id),
                qos=record.qos.label,
                position=places[record.qos.label],
                prompt=record.prompt,
                generated=record.generated,
                waited=now - record.queued,
                why=why(record) if places[record.qos.label] == 1 else "its turn",
            )
        )
    return views


def counted(view: ModelView, stats: Statistics, window: int) -> ModelView:
    """A model's record with what its scheduler has counted and holds; ``window``: of a request, tokens."""
    kv = stats.kv
    return msgspec.structs.replace(
        view,
        window=window,
        lanes=stats.lanes,
        lanes_busy=stats.lanes_busy,
        queued=sum(stats.queued.values()),
        cells=stats.cells,
        cells_promised=stats.cells_promised,
        cells_used=stats.cells_used,
        cells_kept=stats.cells_kept,
        ticks=stats.ticks,
        threads=stats.threads,
        submitted=stats.submitted,
        finished={reason.value: count for reason, count in stats.finished.items()},
        pauses=stats.pauses,
        prefill_tokens=stats.prefill_tokens,
        decode_tokens=stats.decode_tokens,
        decode_rounds=stats.decode_rounds,
        prefill_seconds=stats.prefill_seconds,
        decode_seconds=stats.decode_seconds,
        preemptions={qos.label: count for qos, count in stats.preemptions.items()},
        starvation_grants={qos.label: count for qos, count in stats.starvation_grants.items()},
        abandoned_prefill_tokens=stats.abandoned_tokens,
        engine_tokens=stats.computed,
        prefill_budget=stats.prefill_budget,
        decode_grant=stats.decode_grant,
        cached_tokens=kv.cached_tokens,
        prefix_hits=kv.hits,
        evictions=kv.evictions,
        exports=kv.exports,
        imports=kv.imports,
        parks=kv.parks,
        recalls=kv.recalls,
        parked=kv.parked_entries,
        parked_bytes=kv.parked_bytes,
        prefixes=kv.entries,
        host_prefixes=kv.host_entries,
        host_bytes=kv.host_bytes,
        pins=kv.pins,
        pinned_tokens=kv.pinned_tokens,
        pins_yielded=kv.pins_yielded,
        pins_expired=kv.pins_expired,
    )

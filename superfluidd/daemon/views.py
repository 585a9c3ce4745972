"""Running and waiting requests as records for the edges: pure functions of the scheduler's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from superfluidd.control.protocol import LaneView, QueueView
from superfluidd.scheduling.request import Request
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

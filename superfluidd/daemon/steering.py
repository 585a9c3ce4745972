"""What an operator does to classes and single requests of a served model, and what they are told about them.

Everything is checked before anything is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from superfluidd.control.protocol import ClassView, Explanation, PinBudget, PinsResult, PinView
from superfluidd.daemon.model import Model
from superfluidd.errors import InvalidValue
from superfluidd.scheduling.qos import parse_caps, parse_class
from superfluidd.scheduling.request import Phase
from superfluidd.scheduling.scheduler import Scheduler
from superfluidd.scheduling.trail import sentences
from superfluidd.types import QosClass, RequestId

LONGEST_TTL = 366 * 86400
"""Seconds that a pin with an end lasts at most."""


def classes(models: Iterable[Model]) -> tuple[ClassView, ...]:
    """Every class of every model that is loaded."""
    views: list[ClassView] = []
    for model in models:
        if model.scheduler is None:
            continue
        stats = model.scheduler.statistics()
        held = dict.fromkeys(QosClass, 0)
        for record in model.scheduler.seated():
            held[record.qos] += 1
        views += [
            ClassView(
                model=model.name,
                qos=qos.label,
                cap=stats.caps.get(qos),
                held=held[qos],
                queued=stats.queued[qos],
                lanes=stats.lanes,
                paused=qos in stats.paused,
            )
            for qos in QosClass
        ]
    return tuple(views)


def set_caps(models: Iterable[Model], caps: Mapping[str, int | None]) -> None:
    """Set lane caps of every model, or change nothing. One that is not loaded takes them when it is, as far as it has
    the lanes.

    Raises:
        InvalidValue: no class of that name, a class twice, or a cap that is not 1 to the lanes there are.
        ModelLoading: one is being loaded for the first time: how many lanes it will have is not known yet.
    """
    if not caps:
        raise InvalidValue("no caps are named; send at least one CLASS=LANES, such as background=2", param="caps")
    words = [f"{name}={'off' if lanes is None else lanes}" for name, lanes in caps.items()]
    parsed = [(model, parse_caps(words, model.most_lanes, "caps")) for model in models]
    for model, one in parsed:
        model.set_caps(one)


def set_paused(models: Iterable[Model], qos: str, paused: bool) -> None:
    """Give a class no more lanes of any model, or again."""
    parsed = parse_class(qos, "qos")
    for model in models:
        model.set_paused(parsed, paused)


def set_qos(model: Model, request: RequestId, qos: QosClass, now: float) -> None:
    """Re-class a queued or running request."""
    if model.scheduler is not None:
        model.scheduler.set_qos(request, qos, now)
        model.nudge()


def pin(requests: Sequence[tuple[Model, RequestId]], ttl: float | None, now: float) -> None:
    """Keep the KV of all of these requests of which there is any.

    Raises:
        InvalidValue: there is none, or too much, of each of them; or the time is none.
    """
    if ttl is not None and not 0 < ttl <= LONGEST_TTL:
        raise InvalidValue(f"ttl is {ttl:g}; give seconds, more than 0 and at most {LONGEST_TTL}", param="ttl")
    expires = math.inf if ttl is None else now + ttl
    _each(requests, lambda scheduler, request: scheduler.pin(request, expires, now))


def unpin(requests: Sequence[tuple[Model, RequestId]], now: float) -> None:
    """Take the pins of these requests away. Raises :class:`InvalidValue` if none of them has any."""
    _each(requests, lambda scheduler, request: scheduler.unpin(request, now))


def _each(requests: Sequence[tuple[Model, RequestId]], act: Callable[[Scheduler, RequestId], object]) -> None:
    refused: list[InvalidValue] = []
    for model, request in requests:
        assert model.scheduler is not None
        try:
            act(model.scheduler, request)
            model.nudge()
        except InvalidValue as error:
            refused.append(error)
    if len(refused) == len(requests):
        raise refused[-1]


def pinned(models: Iterable[Model], ident: str) -> list[tuple[Model, RequestId]]:
    """Pins of the request of that number, also if it ended so long ago that nothing else is known of it."""
    found = [(model, pin) for model in models if model.scheduler is not None for pin in model.scheduler.pins()]
    return [(model, int(ident)) for model, pin in found if ident in map(str, pin.requests)]


def pins(models: Iterable[Model], now: float) -> PinsResult:
    """What is pinned of every model that is loaded, and what may be."""
    loaded = [(model, model.scheduler) for model in models if model.scheduler is not None]
    return PinsResult(
        pins=tuple(
            PinView(
                model=model.name,
                requests=pin.requests,
                origin=model.origin(pin.requests[-1]) if pin.requests else "",
                tokens=pin.tokens,
                place=pin.place,
                left=None if pin.expires == math.inf else max(0.0, pin.expires - now),
            )
            for model, scheduler in loaded
            for pin in scheduler.pins()
        ),
        budgets=tuple(
            PinBudget(model.name, scheduler.statistics().kv.pinned_tokens, scheduler.pin_cells)
            for model, scheduler in loaded
        ),
    )


def explain(model: Model, request: RequestId) -> Explanation:
    """What was decided about a request that :meth:`Model.find` found."""
    scheduler = model.scheduler
    assert scheduler is not None
    trail = scheduler.trail(request)
    assert trail is not None
    record = scheduler.request(request)
    state, now = _state(scheduler, model, request) if record is not None else ("ended", "it has ended")
    entries = list(trail)
    return Explanation(
        model=model.name,
        request=request,
        origin=model.origin(request),
        state=state,  # type: ignore[arg-type]
        now=now,
        sentences=tuple(sentences(entries, trail.dropped)),
        trail=tuple(msgspec.to_builtins(entry) for entry in entries),
        dropped=trail.dropped,
    )


def _state(scheduler: Scheduler, model: Model, request: RequestId) -> tuple[str, str]:
    record = scheduler.request(request)
    assert record is not None
    if record.phase is Phase.RUNNING:
        return "running", f"in lane {record.lane}: {model.whereabouts(request)}"
    word = "paused" if record.phase is Phase.PREEMPTED else "queued"
    place = scheduler.position(request)
    why = scheduler.why_waiting(record) if place == 1 else f"the {place - 1} ahead of it in its class"
    return word, f"number {place} of the {record.qos.label} queue; it waits for {why}"

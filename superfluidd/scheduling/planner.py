"""One tick's prefill and decode grants, from read-only views of the seated requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from superfluidd.scheduling.plan import Decode, Prefill
from superfluidd.scheduling.qos import URGENT
from superfluidd.scheduling.request import Request


def grant_prefill(lanes: Sequence[Request], tokens: int, starvation_ticks: int) -> tuple[Prefill, ...]:
    """Share ``tokens`` of prefill among the lanes that are not decoding.

    Starving lanes first, then by class, then the shortest remaining prompt, then age, so that a short prompt does not
    wait behind a long one. A tick in which an interactive or completion prompt finishes feeds nothing of a lower class
    beside it (source: the specification, "Prefill and decode budgets"). Where a starving lane's turn meets such a
    prompt the starving lane has the tick, and the prompt finishes in the next one.
    """
    order = sorted(
        (lane for lane in lanes if not lane.decoding),
        key=lambda lane: (lane.starved < starvation_ticks, lane.qos, lane.unfed, lane.id),
    )
    chosen = _share(order, tokens)
    urgent = _finishing(chosen)
    while urgent:
        best = min(lane.qos for lane in urgent)
        worse = [lane for lane, _ in chosen if lane.qos > best]
        if not worse:
            break
        hungry = min((lane.qos for lane in worse if lane.starved >= starvation_ticks), default=None)
        if hungry is None or any(lane.qos == best and lane.starved >= starvation_ticks for lane in urgent):
            order = [lane for lane in order if lane.qos <= best]
        else:
            order = [lane for lane in order if lane not in urgent or lane.qos >= hungry]
        chosen = _share(order, tokens)
        urgent = _finishing(chosen)
    return tuple(Prefill(lane.id, share) for lane, share in chosen)


def _share(order: Iterable[Request], tokens: int) -> list[tuple[Request, int]]:
    chosen: list[tuple[Request, int]] = []
    for lane in order:
        share = min(tokens, lane.unfed)
        if share == 0:
            break
        chosen.append((lane, share))
        tokens -= share
    return chosen


def _finishing(chosen: Iterable[tuple[Request, int]]) -> list[Request]:
    """Interactive and completion prompts that these shares finish."""
    return [lane for lane, share in chosen if lane.qos <= URGENT and share == lane.unfed]


def grant_exact(lane: Request, tokens: int, step: int) -> tuple[Prefill, ...]:
    """Prefill of a batch-invariant lane: whole steps of a fixed size, so that its prompt is always cut at the same
    places."""
    whole = max(step, tokens // step * step)
    return () if lane.decoding else (Prefill(lane.id, min(whole, lane.unfed)),)


def grant_decode(
    lanes: Sequence[Request],
    prefill: Sequence[Prefill],
    *,
    rounds: int,
    patient: bool,
    step: int,
    most: int,
    waiting: bool,
    starvation_ticks: int,
) -> tuple[Decode, ...]:
    """Decode rounds for every lane that decodes, or begins to in this tick.

    Args:
        lanes: those that tick, in lane order.
        prefill: the tick's prefill.
        rounds: what a tick of the length aimed at holds.
        patient: nobody would notice if decoding stood back: while prompts are left to feed it gets no more than the
            rounds between steps, and is done later with more lanes in a round.
        step: the tick's prefill micro-batch; each brings one decode round, so that decoding lanes never stand still
            for longer than one micro-batch.
        most: tokens to decode over all lanes; 0 is no bound. Starving lanes come first, then classes, then age.
        waiting: someone waits for a lane, so the tick ends when the first lane is known to.
        starvation_ticks: ticks without a grant after which a lane is starving.
    """
    fed = {chunk.request: chunk.tokens for chunk in prefill}
    going = [
        (lane, lane.remaining_new - (not lane.decoding))
        for lane in lanes
        if lane.decoding or fed.get(lane.id) == lane.unfed
    ]
    going = [(lane, left) for lane, left in going if left > 0]
    if not going:
        return ()
    steps = -(-sum(fed.values()) // step)
    unfinished = any(not lane.decoding and fed.get(lane.id, 0) < lane.unfed for lane in lanes)
    rounds = max(1, steps) if patient and unfinished else max(rounds, steps)
    if waiting:
        rounds = min(rounds, min(left for _, left in going))
    if most:
        rounds = min(rounds, max(1, most // len(going)))
        going.sort(key=lambda entry: (entry[0].starved < starvation_ticks, entry[0].qos, entry[0].id))
        going = sorted(going[:most], key=lambda entry: entry[0].lane or 0)
    return tuple(Decode(lane.id, min(rounds, left)) for lane, left in going)


def count_starved(lanes: Iterable[Request], prefill: Sequence[Prefill], decode: Sequence[Decode]) -> None:
    """Book who got nothing out of a tick.

    A lane in prefill starves while younger lanes are fed; one that decodes starves while it gets no grant. So equal
    prompts are finished one after the other, oldest first, and none of them counts as starving meanwhile.
    """
    served = {chunk.request for chunk in prefill}
    granted = {grant.request for grant in decode}
    youngest = max(served, default=0)
    for lane in lanes:
        if lane.id in served or lane.id in granted:
            lane.starved = 0
        elif lane.decoding or youngest > lane.id:
            lane.starved += 1

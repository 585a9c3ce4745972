"""One tick's prefill and decode grants, from read-only views of the seated requests."""

from __future__ import annotations

from collections.abc import Sequence

from superfluidd.scheduling import budget
from superfluidd.scheduling.plan import Decode, Prefill
from superfluidd.scheduling.request import Request


def grant_prefill(seated: Sequence[Request], tokens: int) -> tuple[Prefill, ...]:
    """Share ``tokens`` of prefill: by class, then shortest remaining prompt first, then age.

    A short prompt does not wait behind a long one (source: the specification, "Prefill and decode budgets").
    """
    chosen: list[Prefill] = []
    order = sorted((lane for lane in seated if not lane.decoding), key=lambda lane: (lane.qos, lane.unfed, lane.id))
    for lane in order:
        share = min(tokens, lane.unfed)
        if share == 0:
            break
        chosen.append(Prefill(lane.id, share))
        tokens -= share
    return tuple(chosen)


def grant_decode(
    seated: Sequence[Request],
    prefill: Sequence[Prefill],
    rates: budget.Rates,
    *,
    step: int,
    open_tick: bool,
    waiting: bool,
) -> tuple[Decode, ...]:
    """Decode rounds for every lane that decodes, or begins to in this tick.

    Args:
        seated: requests in lanes, in lane order.
        prefill: the tick's prefill.
        rates: measured rates.
        step: the tick's prefill micro-batch; each brings one decode round, so that decoding lanes never stand still
            for longer than one micro-batch.
        open_tick: a lane is free.
        waiting: someone waits for a lane, so the tick ends when the first lane is known to.
    """
    completing = {chunk.request for chunk in prefill}
    granted = sum(chunk.tokens for chunk in prefill)
    lanes = [
        (lane, lane.remaining_new if lane.decoding else lane.remaining_new - 1)
        for lane in seated
        if lane.decoding or (lane.id in completing and _completes(lane, prefill))
    ]
    lanes = [(lane, left) for lane, left in lanes if left > 0]
    if not lanes:
        return ()
    shortest = min(left for _, left in lanes)
    rounds = budget.decode_rounds(rates, open_tick=open_tick or shortest < budget.ROUNDS_FLOOR)
    rounds = max(rounds, -(-granted // step))
    if waiting:
        rounds = min(rounds, max(1, shortest))
    return tuple(Decode(lane.id, min(rounds, left)) for lane, left in lanes)


def _completes(lane: Request, prefill: Sequence[Prefill]) -> bool:
    return any(chunk.request == lane.id and chunk.tokens == lane.unfed for chunk in prefill)

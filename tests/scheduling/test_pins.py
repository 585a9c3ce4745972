"""Pins: what an operator wants kept, within its budget, for its time, and never at the cost of a live lane."""

from __future__ import annotations

import math

import pytest

from superfluidd.errors import InvalidValue
from superfluidd.scheduling.pins import Pinned
from superfluidd.scheduling.plan import Copy, Cut, Import
from superfluidd.scheduling.pressure import Rung
from superfluidd.types import FinishReason
from tests.scheduling.fake_engine import CELL_BYTES
from tests.scheduling.test_kv import AGENT, CHAT, ONE, OTHER, REPLY, SYSTEM, cached_world, held, serve, settle
from tests.scheduling.world import World, kinds

LATER = [*ONE, REPLY, REPLY, REPLY, 5]
"""The next turn of the conversation that ONE begins."""


def pin(world: World, request: int, ttl: float = math.inf) -> int:
    return world.scheduler.pin(request, world.now + ttl, world.now)


def pinned(world: World) -> list[tuple[tuple[int, ...], int, str]]:
    """Pins without their times."""
    return [(pin.requests, pin.tokens, pin.place) for pin in world.scheduler.pins()]


def test_a_pin_holds_what_an_ended_request_left() -> None:
    world = cached_world(sequences=2)
    serve(world, ONE)
    assert pin(world, 1) == 62
    assert world.scheduler.pins() == [Pinned((1,), 62, "pool", math.inf)]
    assert kinds(world, 1)[-1] == "pinned"
    for first in (3, 4, 5):
        serve(world, range(1000 * first, 1000 * first + 60))
    assert 62 in held(world)
    assert serve(world, LATER)[0] == 62


def test_what_runs_or_waits_is_pinned_when_it_has_ended() -> None:
    world = cached_world(sequences=3)
    running, waiting = (world.ask(AGENT, most=3, prompt=prompt) for prompt in (ONE, OTHER))
    world.tick(steps=1)
    assert (pin(world, running), pin(world, waiting)) == (61, 60)
    assert pinned(world) == [((1,), 61, "running"), ((2,), 60, "waiting")]
    assert world.scheduler.statistics().kv.pins == 0
    while not world.scheduler.idle:
        world.tick()
    assert pinned(world) == [((1,), 62, "pool"), ((2,), 62, "pool")]
    assert world.scheduler.statistics().kv.pinned_tokens == 124


def test_a_pinned_request_that_is_cancelled_while_it_waits_leaves_its_pin_on_what_it_had() -> None:
    world = cached_world(sequences=2)
    paused = world.ask(AGENT, most=50, prompt=ONE)
    world.tick(steps=3)
    world.ask(CHAT, most=50, prompt=OTHER)
    world.tick()
    pin(world, paused)
    world.scheduler.finish(paused, FinishReason.ABORT)
    assert pinned(world) == [((1,), 62, "pool")]
    short = world.ask(AGENT, most=50, prompt=[1, 2])
    world.tick()
    pin(world, short)
    world.scheduler.finish(short, FinishReason.ABORT)
    assert pinned(world) == [((1,), 62, "pool")], "nothing of the other one was ever fed"


def test_a_conversation_is_known_by_each_of_its_requests() -> None:
    world = cached_world()
    serve(world, ONE)
    serve(world, LATER)
    assert pin(world, 1) == 66, "the second turn took over what the first had left"
    assert pinned(world) == [((1, 2), 66, "pool")]
    world.scheduler.unpin(2, world.now)
    assert not pinned(world)
    again = world.ask(AGENT, most=3, prompt=[*LATER, REPLY, REPLY, 6])
    world.tick(steps=1)
    assert pin(world, 2) == len(world.record(again).tokens), "a lane has it now"
    world.scheduler.unpin(1, world.now)
    assert not pinned(world)
    settle(world)
    assert kinds(world, 1)[-3:] == ["finished", "pinned", "unpinned"]


def test_a_request_that_adds_nothing_is_known_by_what_holds_its_kv() -> None:
    world = cached_world(lanes=2)
    long, short = world.ask(AGENT, most=40, prompt=ONE), world.ask(AGENT, most=2, prompt=ONE)
    while not world.scheduler.idle:
        world.tick()
    assert [entry.requests for entry in world.scheduler.kept()] in ([(short, long)], [(long, short)])
    assert pin(world, short) == 99


def test_pins_are_copied_and_stay_when_the_conversation_goes_on() -> None:
    world = cached_world()
    serve(world, ONE)
    pin(world, 1)
    cached, plan = serve(world, LATER)
    assert (cached, plan.kv) == (62, (Copy(0, 1, 62),))
    assert held(world) == [62, 66]
    world.scheduler.unpin(1, world.now)
    assert held(world) == [66], "no more than what begins with it"
    settle(world)


def test_a_lane_that_needs_the_place_of_a_pin_takes_the_pin_along() -> None:
    world = cached_world(sequences=1)
    serve(world, ONE)
    pin(world, 1)
    again = world.ask(AGENT, most=3, prompt=LATER)
    world.tick(steps=1)
    assert pinned(world)[0][0] == (1, again)
    while not world.scheduler.idle:
        world.tick()
    assert pinned(world) == [((1, 2), 66, "pool")]
    fork = world.ask(AGENT, most=3, prompt=[*ONE[:40], 7, 7])
    plan = world.tick(steps=1)
    assert plan.kv == (Cut(0, 40),), "there is one sequence, and live work has it"
    pin(world, fork, 100.0)
    assert [pin.expires for pin in world.scheduler.pins()] == [world.now + 100.0], "its own wish comes last"
    while not world.scheduler.idle:
        world.tick()


def test_pins_that_leave_the_pool_go_last_and_oldest_first() -> None:
    world = cached_world(sequences=3, host_bytes=10_000 * CELL_BYTES)
    for prompt in (ONE, OTHER, SYSTEM):
        serve(world, prompt)
    pin(world, 2)
    pin(world, 1)
    serve(world, range(5000, 5060))
    assert [entry.requests for entry in world.scheduler.kept() if entry.sequence is None] == [(3,)]
    world.scheduler.unpin(2, world.now)
    serve(world, range(6000, 6060))
    assert pinned(world) == [((1,), 62, "pool")]
    world.ask(AGENT, most=900, prompt=range(7000, 7050))
    plan = world.tick()
    assert len(plan.admit) == 1
    assert pinned(world) == [((1,), 62, "host memory")]
    assert world.scheduler.statistics().kv.pins_yielded == 1


def test_what_is_pinned_in_host_memory_stays_there() -> None:
    world = cached_world(sequences=1, host_bytes=10_000 * CELL_BYTES)
    serve(world, ONE)
    pin(world, 1)
    serve(world, OTHER)
    cached, plan = serve(world, LATER)
    assert (cached, [type(op) for op in plan.kv][-1]) == (62, Import)
    assert ((1,), 62, "host memory") in pinned(world)


def test_the_budget_is_kept_by_the_oldest_pins_giving_way() -> None:
    world = cached_world(sequences=6, cells=400, window=400, pin_part=0.4)
    for number in range(4):
        serve(world, range(1000 * number, 1000 * number + 60))
    for request in (1, 2, 3):
        pin(world, request)
    assert [requests for requests, *_ in pinned(world)] == [(2,), (3,)], "124 of 160"
    pin(world, 2)
    pin(world, 4)
    assert [requests for requests, *_ in pinned(world)] == [(2,), (4,)], "who pins again is not the oldest"
    assert world.scheduler.statistics().kv.pins_yielded == 2
    settle(world)


def test_a_pin_that_would_never_fit_is_refused_with_the_figures() -> None:
    world = cached_world(cells=400, window=400, pin_part=0.4)
    serve(world, range(1000, 1200))
    assert world.scheduler.pin_cells == 160
    message = "request 1 has 202 tokens, and 160 of the pool's 400 may be pinned; raise --pin-budget-pct, which is 40"
    with pytest.raises(InvalidValue) as caught:
        pin(world, 1)
    assert caught.value.message == message
    grows = world.ask(AGENT, most=60, prompt=range(2000, 2120))
    world.tick(steps=1)
    pin(world, grows)
    while not world.scheduler.idle:
        world.tick()
    assert not pinned(world), "it outgrew the budget"
    assert held(world)[-1] == 179, "and is kept like anything else"


def test_what_cannot_be_pinned() -> None:
    world = cached_world(sequences=1)
    serve(world, ONE)
    serve(world, OTHER)
    with pytest.raises(InvalidValue, match="nothing of request 1 is kept any more"):
        pin(world, 1)
    with pytest.raises(InvalidValue, match="request 2 is not pinned; `sfctl pins` lists what is"):
        world.scheduler.unpin(2, world.now)
    with pytest.raises(InvalidValue, match="--prefix-cache off"):
        pin(cached_world(enabled=False), 1)


def test_a_pin_ends_with_its_time() -> None:
    world = cached_world()
    serve(world, ONE)
    pin(world, 1, 5.0)
    serve(world, LATER)
    pin(world, 2, 10.0)
    ends = [pin.expires for pin in world.scheduler.pins()]
    assert world.scheduler.expire_pins(ends[0] - 0.001) == ends[0]
    assert world.scheduler.expire_pins(ends[0]) == ends[1]
    assert pinned(world) == [((1, 2), 66, "pool")], "it was no more than what begins with it"
    assert world.scheduler.expire_pins(ends[1]) == math.inf
    statistics = world.scheduler.statistics().kv
    assert (statistics.pins, statistics.pins_expired, statistics.pins_yielded) == (0, 2, 0)
    settle(world)


def test_only_the_pin_of_the_named_request_goes() -> None:
    world = cached_world(sequences=3)
    serve(world, ONE)
    pin(world, 1)
    other = world.ask(AGENT, most=30, prompt=OTHER)
    world.tick(steps=1)
    pin(world, other)
    world.scheduler.unpin(1, world.now)
    assert [requests for requests, *_ in pinned(world)] == [(other,)]
    while not world.scheduler.idle:
        world.tick()


def test_what_ended_so_long_ago_that_its_trail_is_gone_can_be_unpinned() -> None:
    world = cached_world(sequences=3)
    serve(world, ONE)
    pin(world, 1)
    while world.scheduler.trail(1) is not None:
        serve(world, [1, 2])
    world.scheduler.unpin(1, world.now)
    assert not pinned(world)


@pytest.mark.parametrize("cut", ["window", "head"])
def test_where_only_whole_prefixes_can_be_used_what_is_unpinned_stays(cut: str) -> None:
    world = cached_world(cut=cut)
    serve(world, ONE)
    pin(world, 1)
    serve(world, LATER)
    world.scheduler.unpin(1, world.now)
    assert sorted(held(world)) == [62, 66]


def test_memory_pressure_and_a_refused_plan_take_pins_too() -> None:
    world = cached_world(sequences=2, high=0.5, low=0.0)
    serve(world, ONE)
    pin(world, 1)
    world.scheduler.set_pressure(Rung.WARNING)
    settle(world)
    assert not pinned(world)
    assert world.scheduler.statistics().kv.pins_yielded == 1


def test_a_pin_on_disk_outlives_its_engine() -> None:
    world = cached_world(park_bytes=1000 * CELL_BYTES, park_least=4)
    serve(world, ONE)
    serve(world, OTHER)
    pin(world, 1)
    settle(world)
    world.restart()
    assert pinned(world) == [((1,), 62, "disk")]
    world.restart()
    assert pinned(world) == [((1,), 62, "disk")]
    assert serve(world, LATER)[0] == 62

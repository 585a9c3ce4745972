"""KV on disk, by the books: what is written when, what is forgotten, what a restart finds again."""

from __future__ import annotations

import math

import pytest

from superfluidd.scheduling.entries import key_of, pack
from superfluidd.scheduling.plan import Discard, Export, Free, Park, Recall
from superfluidd.scheduling.pressure import Rung
from tests.scheduling.fake_engine import CELL_BYTES
from tests.scheduling.test_kv import AGENT, BACKGROUND, CHAT, ONE, OTHER, REPLY, cached_world, held, serve, settle
from tests.scheduling.world import World

LATER = [*ONE, REPLY, REPLY, REPLY, 5]
"""The next turn of the conversation that ONE begins."""


def parking_world(**cache: object) -> World:
    """A disk of 1,000 tokens behind a pool with one lane."""
    return cached_world(**{"park_bytes": 1000 * CELL_BYTES, "park_least": 4, **cache})


def on_disk(world: World) -> list[int]:
    """Lengths of what is parked by the books, which must be what is there."""
    parked = {entry.key: entry.length for entry in world.scheduler.kept() if entry.parked}
    assert parked == {key: len(tokens) for key, tokens in world.engine.disk.items()}
    return list(parked.values())


def test_what_a_request_leaves_is_parked_once_nothing_runs() -> None:
    world = parking_world()
    request = world.ask(AGENT, most=3, prompt=ONE)
    while world.scheduler.request(request) is not None:
        assert not any(isinstance(op, Park) for op in world.tick().kv), "a running lane would have waited for it"
    assert world.scheduler.parking
    plan = world.scheduler.plan(world.now)
    assert plan is not None
    assert plan.kv == (Park(key_of(pack([*ONE, REPLY, REPLY])), pack([*ONE, REPLY, REPLY]), sequence=0),)
    world.run(plan)
    assert not world.scheduler.parking
    assert world.scheduler.plan(world.now) is None
    assert on_disk(world) == [62]
    assert held(world) == [62], "it is still in the pool"
    statistics = world.scheduler.statistics().kv
    assert (statistics.parks, statistics.parked_entries, statistics.parked_bytes) == (1, 1, 62 * CELL_BYTES)


def test_one_thing_is_written_at_a_time() -> None:
    world = parking_world(lanes=2)
    for prompt in (ONE, OTHER):
        serve(world, prompt)
    first = world.scheduler.plan(world.now)
    assert first is not None
    assert len(first.kv) == 1
    told, world.tell = world.tell, lambda: None  # type: ignore[method-assign]
    world.run(first)
    assert world.scheduler.plan(world.now) is None, "the first is not written yet"
    assert world.scheduler.parking
    told()
    second = world.scheduler.plan(world.now)
    assert second is not None
    assert len(second.kv) == 1


def test_after_a_restart_a_session_goes_on_from_the_disk() -> None:
    world = parking_world()
    serve(world, ONE)
    settle(world)
    world.restart()
    assert held(world) == []
    cached, plan = serve(world, [*ONE, REPLY, REPLY, REPLY, *OTHER])
    assert cached == 62
    assert plan.kv == (Recall(key_of(pack([*ONE, REPLY, REPLY])), 0, 62),)
    assert world.scheduler.statistics().kv.recalls == 1


def test_a_longer_turn_replaces_the_shorter_on_disk_once_it_is_there() -> None:
    world = parking_world()
    serve(world, ONE)
    settle(world)
    serve(world, [*ONE, REPLY, REPLY, REPLY, *OTHER])
    assert on_disk(world) == [62], "were the daemon to die now, this would be what is left"
    settle(world)
    assert on_disk(world) == [62 + 1 + 60 + 2]


def test_a_turn_told_again_is_parked_already() -> None:
    world = parking_world()
    serve(world, ONE)
    settle(world)
    assert serve(world, ONE)[0] == 59
    assert not world.scheduler.parking
    assert on_disk(world) == held(world) == [62]


def test_two_that_wait_with_the_same_tokens_need_one_artifact() -> None:
    world = parking_world(lanes=2, cells=400, window=200)
    for _ in range(2):
        world.ask(BACKGROUND, most=100, prompt=ONE)
    for _ in range(3):
        world.tick(steps=3)
    for _ in range(2):
        world.ask(CHAT, most=100, prompt=OTHER)
    world.tick()
    waiting = [entry for entry in world.scheduler.kept() if entry.owner is not None]
    assert len({entry.tokens for entry in waiting}) == 1
    assert len(waiting) == 2
    for _ in range(5):
        world.tick()
    assert len(on_disk(world)) <= 1


def test_what_leaves_the_pool_without_room_in_host_memory_goes_straight_to_disk() -> None:
    world = parking_world(sequences=1)
    serve(world, ONE)
    _, plan = serve(world, OTHER)
    assert plan.kv[0] == Park(key_of(pack([*ONE, REPLY, REPLY])), pack([*ONE, REPLY, REPLY]), sequence=0)
    assert plan.kv[1] == Free(0)
    assert on_disk(world) == [62]
    assert serve(world, ONE)[0] == 59


@pytest.mark.parametrize("cell_bytes", [0, CELL_BYTES])
def test_without_a_disk_nothing_is_parked(cell_bytes: int) -> None:
    world = parking_world(sequences=1, park_bytes=0, cell_bytes=cell_bytes)
    serve(world, ONE)
    _, plan = serve(world, OTHER)
    assert plan.kv == (Free(0),)
    assert not world.scheduler.parking


def test_what_is_in_host_memory_is_parked_beside_running_lanes() -> None:
    world = parking_world(sequences=1, host_bytes=1000 * CELL_BYTES)
    serve(world, ONE)
    world.ask(AGENT, most=30, prompt=OTHER)
    plan = world.tick()
    assert [type(op) for op in plan.kv] == [Export, Free, Park]
    assert on_disk(world) == [62]


def test_host_memory_that_runs_over_leaves_what_is_parked_on_disk() -> None:
    world = parking_world(sequences=1, host_bytes=70 * CELL_BYTES)
    for first in (1, 2, 3):
        serve(world, range(1000 * first, 1000 * first + 60))
    settle(world)
    assert sorted(on_disk(world)) == [62, 62, 62]
    assert [entry.length for entry in world.scheduler.kept() if entry.blob is not None] == [62]


def test_the_budget_of_the_disk_is_kept_and_the_oldest_goes() -> None:
    world = parking_world(park_bytes=130 * CELL_BYTES)
    for first in (1, 2, 3):
        serve(world, range(1000 * first, 1000 * first + 60))
        settle(world)
    assert on_disk(world) == [62, 62]
    world.restart()
    settle(world)
    assert serve(world, range(1000, 1060))[0] == 0
    assert serve(world, range(3000, 3060))[0] == 59


def test_a_smaller_budget_after_a_restart_holds_at_once() -> None:
    world = parking_world(park_bytes=70 * CELL_BYTES)
    for first in (1, 2):
        tokens = list(range(1000 * first, 1000 * first + 60))
        world.engine.disk[key_of(pack(tokens))] = tokens
    world.scheduler.adopt_parked(world.engine.parked())
    settle(world)
    assert on_disk(world) == [60]


@pytest.mark.parametrize("fails", ["write", "read"])
def test_a_disk_that_fails_means_that_tokens_are_computed_again(fails: str) -> None:
    world = parking_world()
    kind = Park if fails == "write" else Recall
    world.engine.fails = lambda op: isinstance(op, kind)  # type: ignore[method-assign]
    serve(world, ONE)
    settle(world)
    assert world.scheduler.plan(world.now) is None, "nobody tries for ever"
    assert len(world.engine.disk) == (0 if fails == "write" else 1)
    world.restart()
    world.engine.fails = lambda op: isinstance(op, kind)  # type: ignore[method-assign]
    assert serve(world, [*ONE, 7])[0] == 0
    settle(world)
    assert len(on_disk(world)) == (0 if fails == "write" else 1)


def test_under_pressure_nothing_is_parked_but_what_is_there_is_used() -> None:
    world = parking_world()
    serve(world, ONE)
    settle(world)
    world.scheduler.set_pressure(Rung.WARNING)
    settle(world)
    serve(world, OTHER)
    assert not world.scheduler.parking
    assert on_disk(world) == [62]
    world.scheduler.set_pressure(Rung.NORMAL)
    assert world.scheduler.parking


def test_a_waiting_requests_kv_is_parked_and_it_goes_on_from_there_after_a_death() -> None:
    world = parking_world(sequences=1, cells=400, window=400)
    background = world.ask(BACKGROUND, most=200, prompt=ONE)
    for _ in range(3):
        world.tick(steps=3)
    world.ask(CHAT, most=3, prompt=OTHER)
    plan = world.tick()
    assert [type(op) for op in plan.kv] == [Park, Free]
    [length] = on_disk(world)
    world.restart()
    plan = world.tick()
    while background not in {seat.request for seat in plan.admit}:
        plan = world.tick()
    assert next(seat.cached for seat in plan.admit if seat.request == background) == length


def test_what_is_only_read_whole_stays_on_disk_beside_what_begins_with_it() -> None:
    world = parking_world(cut="head")
    for prompt in (ONE, LATER):
        serve(world, prompt)
        settle(world)
    assert sorted(on_disk(world)) == [62, 66]


@pytest.mark.parametrize("host", [False, True], ids=["pool", "host memory"])
def test_what_was_pinned_and_parked_stays_on_disk_until_more_is_there(host: bool) -> None:
    world = parking_world(host_bytes=1000 * CELL_BYTES if host else 0, sequences=1 if host else 4)
    serve(world, ONE)
    settle(world)
    world.scheduler.pin(1, math.inf, world.now)
    if host:
        serve(world, OTHER)
        serve(world, LATER)
    else:
        serve(world, LATER)
        settle(world)
        assert sorted(on_disk(world)) == [62, 66], "a pin keeps it there too"
    world.scheduler.unpin(1, world.now)
    plan = world.scheduler.plan(world.now)
    assert plan is not None
    assert any(isinstance(op, Discard if host else Free) for op in plan.kv), "but in memory once is enough"
    world.run(plan)
    settle(world)
    assert 66 in on_disk(world)


def test_what_is_known_to_be_parked_is_not_adopted_twice() -> None:
    world = parking_world()
    serve(world, ONE)
    settle(world)
    world.scheduler.adopt_parked(world.engine.parked())
    assert on_disk(world) == [62]
    world.scheduler.sealed("what nobody has asked for", 100)
    assert world.scheduler.statistics().kv.parks == 1


def test_two_that_are_to_start_from_what_cannot_be_read_both_begin_from_nothing() -> None:
    world = parking_world(lanes=2)
    for prompt in (OTHER, ONE):
        serve(world, prompt)
        settle(world)
    world.restart()
    world.engine.fails = lambda op: isinstance(op, Recall)  # type: ignore[method-assign]
    asked = [world.ask(AGENT, most=3, prompt=[*ONE, number]) for number in (7, 8)]
    records = [world.record(request) for request in asked]
    plan = world.tick()
    assert [type(op) for op in plan.kv].count(Recall) == 2
    assert [record.cached for record in records] == [0, 0]
    settle(world)
    assert 62 in on_disk(world), "the other one is still there"

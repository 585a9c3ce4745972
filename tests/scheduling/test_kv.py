"""The prefix cache and the host-memory tier: who starts from what, and what goes when room is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest

from superfluidd.scheduling.admission import AWAIT_TICKS
from superfluidd.scheduling.books import Limits
from superfluidd.scheduling.entries import Cache, pack, shared_length
from superfluidd.scheduling.plan import Copy, Cut, Discard, Export, Free, Import, Plan
from superfluidd.scheduling.pressure import Rung
from superfluidd.scheduling.shares import Share
from superfluidd.types import FinishReason, QosClass
from tests.scheduling.fake_engine import CELL_BYTES, FakeEngine
from tests.scheduling.world import World, kinds

CHAT, COMPLETION, AGENT, BACKGROUND = QosClass
REPLY = 100
"""The only token that the engine of these worlds says."""

SYSTEM = range(1000, 1040)
ONE, OTHER = range(2000, 2060), range(3000, 3060)


def cached_world(
    *,
    lanes: int = 1,
    sequences: int = 4,
    cells: int = 1000,
    window: int = 1000,
    shared: bool = True,
    host: Share | None = None,
    disk: Share | None = None,
    **cache: object,
) -> World:
    """Nothing goes but for want of room, unless a test says otherwise."""
    settings = {"least": 4, "cell_bytes": CELL_BYTES, "high": 1.0, "low": 1.0, **cache}
    kept = msgspec.convert({"enabled": True, **settings}, Cache)
    limits = Limits(lanes=lanes, shared=shared, cells=cells, sequences=sequences, window=window, cache=kept)
    return World(limits, host=host, disk=disk)


def serve(world: World, prompt: Sequence[int], most: int = 3, qos: QosClass = AGENT) -> tuple[int, Plan]:
    """One request from arrival to end: how many tokens of its prompt were cached, and the plan that seated it."""
    request = world.ask(qos, most=most, prompt=prompt)
    record = world.record(request)
    first = None
    while world.scheduler.request(request) is not None:
        plan = world.tick()
        first = first or plan
    assert first is not None
    world.scheduler.check_integrity()
    return record.cached, first


def settle(world: World) -> None:
    """Work off what there is still to do."""
    while (plan := world.scheduler.plan(world.now)) is not None:
        world.run(plan)
    world.scheduler.check_integrity()


def held(world: World) -> list[int]:
    """Lengths of what is kept in the pool, oldest first."""
    return [entry.length for entry in world.scheduler.kept() if entry.sequence is not None]


# -- comparing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 7, 63, 64])
def test_shared_lengths_are_exact(length: int) -> None:
    one = [7] * 64
    other = one[:length] + [8] * (64 - length)
    assert shared_length(pack(one), pack(other)) == length
    assert shared_length(pack(one[:length]), pack(one)) == length
    # Ids that differ in one byte only: a comparison of bytes must not call them a part alike.
    assert shared_length(pack([256 * 256] * 3), pack([256 * 256 + 1] * 3)) == 0


# -- seeding ------------------------------------------------------------------------------------------------------


def test_the_next_turn_starts_where_the_last_one_ended() -> None:
    world = cached_world()
    assert serve(world, ONE)[0] == 0
    turn = [*ONE, REPLY, REPLY, REPLY, *OTHER]
    cached, plan = serve(world, turn)
    assert cached == len(ONE) + 2, "the last token of a reply has not been fed to anybody"
    assert plan.admit[0].cached == cached
    assert plan.kv == (), "it went on in the sequence of the turn before"
    statistics = world.scheduler.statistics().kv
    assert (statistics.hits, statistics.cached_tokens, statistics.entries) == (1, cached, 1)


def test_a_fork_gets_a_copy_and_leaves_the_original() -> None:
    world = cached_world()
    serve(world, [*SYSTEM, *ONE])
    cached, plan = serve(world, [*SYSTEM, *OTHER])
    assert cached == len(SYSTEM)
    assert plan.kv == (Copy(0, 1, len(SYSTEM)),)
    assert held(world) == [len(SYSTEM) + 62] * 2


def test_a_fork_that_has_no_room_beside_the_original_shortens_it() -> None:
    world = cached_world(sequences=1)
    serve(world, [*SYSTEM, *ONE])
    cached, plan = serve(world, [*SYSTEM, *OTHER])
    assert cached == len(SYSTEM)
    assert plan.kv == (Cut(0, len(SYSTEM)),)


def test_the_same_prompt_again_is_fed_its_last_token_only() -> None:
    world = cached_world()
    serve(world, ONE)
    assert serve(world, ONE)[0] == len(ONE) - 1


def test_a_request_starts_from_the_longest_of_several() -> None:
    world = cached_world(sequences=8)
    serve(world, [*SYSTEM, *OTHER])
    serve(world, [*SYSTEM, *ONE[:30]])
    serve(world, [*SYSTEM, *OTHER[:20], 7, 7, 7, 7, 7, 7])
    assert serve(world, [*SYSTEM, *OTHER[:25], 8])[0] == len(SYSTEM) + 25


def test_what_is_too_short_to_be_worth_it_is_not_used_and_not_kept() -> None:
    world = cached_world(cells=4000)
    serve(world, [1, 2], most=2)
    assert not world.scheduler.kept(), "3 tokens"
    long = [*ONE[:5], *range(5000, 5900)]
    serve(world, long)
    assert serve(world, [*ONE[:5], *OTHER])[0] == 0, "5 of 907 tokens"
    assert serve(world, [*ONE[:5], *OTHER[:20], 3])[0] == 25


def test_nobody_is_seeded_with_the_cache_off() -> None:
    world = cached_world(enabled=False)
    serve(world, ONE)
    assert serve(world, ONE)[0] == 0
    settle(world)
    assert not world.scheduler.kept()
    assert not world.engine.cells_used


def test_two_conversations_that_share_a_system_prompt_each_keep_their_tail() -> None:
    world = cached_world()
    turns = {0: [*SYSTEM, *ONE], 1: [*SYSTEM, *OTHER]}
    serve(world, turns[0])
    serve(world, turns[1])
    for turn in range(4):
        for said in turns.values():
            before = len(said) + 2
            said += [REPLY] * 3 + [turn] * 20
            assert serve(world, said)[0] == before


def big_and_small(count: int) -> list[list[int]]:
    return [[*range(1000 * n, 1000 * n + (400 if n == 0 else 40))] for n in range(1, count)] + [
        [*range(400)],
    ]


@pytest.mark.parametrize(
    ("sequences", "host_bytes"), [(4, 0), (2, 10_000_000)], ids=["a spare sequence", "host memory"]
)
@pytest.mark.parametrize("lanes", [2, 3])
def test_one_conversation_more_than_lanes_and_one_of_them_large(lanes: int, sequences: int, host_bytes: int) -> None:
    world = cached_world(lanes=lanes, sequences=lanes + sequences - 2, cells=1000, host_bytes=host_bytes)
    said = big_and_small(lanes + 1)
    known = reused = 0
    for turn in range(3):
        asked = [world.ask(AGENT, most=4, prompt=prompt) for prompt in said]
        records = [world.record(request) for request in asked]
        while not world.scheduler.idle:
            world.tick()
        settle(world)
        if turn:
            known += sum(len(prompt) - 21 for prompt in said)
            reused += sum(record.cached for record in records)
        for prompt in said:
            prompt += [*[REPLY] * 4, *[turn] * 20]
    assert reused >= 0.9 * known


def test_a_request_is_seeded_from_a_running_lane() -> None:
    world = cached_world(lanes=2)
    world.ask(AGENT, most=50, prompt=[*SYSTEM, *ONE])
    world.tick(steps=2)
    second = world.ask(AGENT, most=50, prompt=[*SYSTEM, *OTHER])
    plan = world.tick(steps=1)
    assert plan.kv == (Copy(0, 1, len(SYSTEM)),)
    assert world.record(second).cached == len(SYSTEM)


def test_a_cancelled_request_leaves_what_it_was_certain_to_have_been_fed() -> None:
    world = cached_world()
    request = world.ask(AGENT, prompt=ONE)
    world.tick()
    fed = world.record(request).fed
    plan = world.plan()
    world.scheduler.finish(request, FinishReason.ABORT)
    world.run(plan)
    settle(world)
    assert held(world) == [fed], "the engine was ahead by what it did in the last tick, and was cut back"
    assert world.engine.cells_used == fed


def test_a_lane_that_failed_leaves_nothing() -> None:
    world = cached_world()
    request = world.ask(AGENT, prompt=ONE)
    world.tick()
    world.scheduler.finish(request, FinishReason.ERROR, "the engine could not go on")
    settle(world)
    assert not held(world)
    assert not world.engine.cells_used


def test_media_lanes_neither_give_nor_take() -> None:
    world = cached_world(lanes=2)
    serve(world, ONE)
    media = world.ask(AGENT, most=50, prompt=[*OTHER], media=True)
    world.tick(steps=1)
    copy = world.ask(AGENT, most=3, prompt=[*OTHER, 1])
    world.tick(steps=1)
    assert world.record(copy).cached == 0
    world.scheduler.finish(media, FinishReason.ABORT)
    world.scheduler.finish(copy, FinishReason.ABORT)
    settle(world)
    again = world.ask(AGENT, most=3, prompt=[*ONE, 1], media=True)
    world.tick(steps=1)
    assert world.record(again).cached == 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_batch_invariant_request_starts_from_nothing_and_alone_in_a_shared_pool(shared: bool) -> None:
    world = cached_world(lanes=2, shared=shared, cells=4000)
    serve(world, ONE)
    exact = world.ask(AGENT, most=3, prompt=ONE, alone=True)
    plan = world.plan()
    assert plan.kv == ((Free(0),) if shared else ())
    world.run(plan)
    record = world.record(exact) if world.scheduler.request(exact) else None
    assert record is None or record.cached == 0
    assert plan.admit[0].cached == 0
    assert plan.admit[0].sequence == (0 if shared else 1)


@pytest.mark.parametrize("cut", ["window", "head"])
def test_where_a_sequence_cannot_be_shortened_only_wholes_are_used(cut: str) -> None:
    world = cached_world(cut=cut, shared=False, cells=4000)
    serve(world, ONE)
    assert serve(world, [*ONE[:30], *OTHER])[0] == 0, "a part of it"
    assert serve(world, ONE)[0] == 0, "all but its end"
    assert serve(world, [*ONE, REPLY, REPLY, REPLY, 5])[0] == len(ONE) + 2
    request = world.ask(AGENT, prompt=range(5000, 5050))
    plan = world.plan()
    world.scheduler.finish(request, FinishReason.ABORT)
    world.run(plan)
    settle(world)
    assert all(entry.tokens != pack(range(5000, 5050)) for entry in world.scheduler.kept()), (
        "nobody knows what it holds"
    )


# -- waiting for one that is being fed the same -----------------------------------------------------------------------


def fed_together(world: World, first: QosClass, second: QosClass, shared: int = 600) -> tuple[int, int]:
    head = [*range(10_000, 10_000 + shared)]
    return world.ask(first, most=50, prompt=[*head, 1, 2]), world.ask(second, most=5, prompt=[*head, 3, 4])


def test_requests_that_arrive_together_start_from_the_first_ones_prefix() -> None:
    world = cached_world(lanes=2, cells=4000)
    first, second = fed_together(world, AGENT, AGENT)
    world.tick(steps=1)
    assert world.seated == [first], "it waits, though there is a lane"
    assert world.scheduler.why_waiting(world.record(second)) == (
        f"what its prompt begins with: request {first} is being fed it"
    )
    world.tick(steps=1)
    plan = world.tick(steps=1)
    assert plan.kv == (Copy(0, 1, 600),)
    assert world.record(second).cached == 600
    assert kinds(world, second) == ["queued", "awaits-prefix", "admitted"]
    world.tick()
    assert world.scheduler.statistics().prefill_tokens == 602 + 2


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        pytest.param(BACKGROUND, CHAT, 600, id="a chat for background work"),
        pytest.param(AGENT, AGENT, 200, id="a prefix that is soon fed"),
    ],
)
def test_who_does_not_wait(first: QosClass, second: QosClass, shared: int) -> None:
    world = cached_world(lanes=2, cells=4000)
    running, newcomer = fed_together(world, first, second, shared)
    world.scheduler.set_paused(second, second is not first)
    world.tick(steps=0)
    world.scheduler.set_paused(second, False)
    world.tick(steps=0)
    assert set(world.seated) == {running, newcomer}


def test_batch_invariant_requests_and_media_do_not_wait_and_nobody_waits_for_media() -> None:
    world = cached_world(lanes=2, cells=4000, shared=False)
    head = [*range(10_000, 10_600)]
    world.ask(AGENT, prompt=head, media=True)
    world.tick(steps=0)
    world.ask(AGENT, prompt=[*head, 1])
    world.tick(steps=0)
    assert len(world.seated) == 2, "nobody waits for media"
    other = cached_world(lanes=3, cells=4000, shared=False)
    other.ask(AGENT, prompt=head)
    other.tick(steps=0)
    other.ask(AGENT, prompt=[*head, 1], media=True)
    other.ask(AGENT, prompt=[*head, 2], alone=True)
    other.tick(steps=0)
    assert len(other.seated) == 3


def test_nobody_waits_where_there_is_as_much_to_start_from_already() -> None:
    world = cached_world(lanes=2, cells=4000)
    head = [*range(10_000, 10_600)]
    serve(world, head)
    world.ask(AGENT, prompt=[*head, 1])
    world.ask(AGENT, prompt=[*head, 2])
    world.tick(steps=0)
    assert len(world.seated) == 2


def test_a_wait_for_a_prefix_is_bounded() -> None:
    world = cached_world(lanes=2, cells=4000)
    first, second = fed_together(world, AGENT, AGENT)
    for _ in range(AWAIT_TICKS):
        world.tick(steps=0)
        assert world.seated == [first]
    world.tick(steps=0)
    assert world.seated == [first, second]


# -- what goes ----------------------------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_goes_first_and_not_to_host_memory_if_there_is_none() -> None:
    world = cached_world(sequences=3)
    serve(world, ONE)
    serve(world, OTHER)
    serve(world, ONE, most=1)
    settle(world)
    assert held(world) == [62, 62], "all of it was there already, so nothing new was kept"
    serve(world, SYSTEM)
    _, plan = serve(world, range(5000, 5050))
    assert plan.kv == (Free(1),), "OTHER"
    assert world.scheduler.statistics().kv.evictions == 1


def test_what_is_pinned_goes_last_and_is_copied_not_taken() -> None:
    world = cached_world(sequences=3)
    serve(world, ONE)
    world.scheduler.pin(1, math.inf, 0.0)
    cached, plan = serve(world, [*ONE, REPLY, REPLY, REPLY, 5])
    assert (cached, plan.kv) == (62, (Copy(0, 1, 62),))
    assert held(world) == [62, 66], "the pinned one is not replaced by what begins with it"
    serve(world, OTHER)
    serve(world, SYSTEM)
    assert world.scheduler.kept()[0].pin


def test_host_memory_keeps_what_leaves_the_pool_and_gives_it_back() -> None:
    world = cached_world(sequences=1, host_bytes=1000 * CELL_BYTES)
    serve(world, ONE)
    _, plan = serve(world, OTHER)
    assert plan.kv == (Export(0, 1), Free(0))
    cached, plan = serve(world, [*ONE, REPLY, REPLY, REPLY, 5])
    assert cached == 62
    assert plan.kv == (Export(0, 2), Free(0), Import(1, 0, 62), Discard(1)), "whole: it has no more use there"
    statistics = world.scheduler.statistics().kv
    assert (statistics.exports, statistics.imports, statistics.host_entries) == (2, 1, 1)
    assert statistics.host_bytes == 62 * CELL_BYTES
    cached, plan = serve(world, [*OTHER[:30], 6, 7])
    assert (cached, plan.kv[-1]) == (30, Import(2, 0, 30)), "a part: the whole stays"


def test_host_memory_is_bounded_by_what_the_engine_measured() -> None:
    world = cached_world(sequences=1, host_bytes=150 * CELL_BYTES, cell_bytes=1)
    for start in (1000, 2000, 3000, 4000):
        serve(world, range(start, start + 60))
    assert world.scheduler.statistics().kv.host_bytes == 2 * 62 * CELL_BYTES
    assert len(world.engine.blobs) == 2, "the oldest has been forgotten"
    serve(world, range(5000, 5200))
    serve(world, SYSTEM)
    assert world.scheduler.statistics().kv.host_entries == 2, "202 tokens are more than there is room for in all"


def test_what_is_being_brought_back_does_not_go_to_make_room_for_what_leaves() -> None:
    world = cached_world(sequences=1, host_bytes=70 * CELL_BYTES)
    serve(world, ONE)
    serve(world, OTHER)
    cached, plan = serve(world, [*ONE, 5])
    assert cached == len(ONE)
    assert plan.kv == (Free(0), Import(1, 0, 60)), "no room for both, so the other one is gone"


def test_host_memory_that_is_dropped_is_given_back() -> None:
    world = cached_world(sequences=1, host_bytes=1000 * CELL_BYTES)
    serve(world, ONE)
    serve(world, OTHER)
    assert world.engine.blobs
    world.scheduler._kv.drop_host()
    settle(world)
    assert not world.engine.blobs
    assert world.scheduler.statistics().kv.host_bytes == 0


def test_above_the_high_watermark_entries_go_until_the_low_one() -> None:
    world = cached_world(sequences=8, cells=1000, high=0.5, low=0.3)
    for start in range(1000, 9000, 1000):
        serve(world, range(start, start + 98))
    settle(world)
    assert held(world) == [100] * 5, "at 600 they went until 300, and two more came"
    running = world.ask(CHAT, most=50, prompt=range(90, 600))
    world.tick(steps=2)
    assert world.seated == [running]
    assert held(world) == [100] * 4, "559 cells are promised to it"
    world.tick(steps=2)
    world.tick(steps=2)
    assert not held(world), "510 cells of a live lane count, and it stays"
    world.tick(steps=2)
    assert world.seated == [running], "nothing is left to go"


def test_a_warning_drops_what_is_in_host_memory_evicts_once_and_saves_nothing_until_it_is_over() -> None:
    world = cached_world(sequences=3, host_bytes=10_000, low=0.1)
    for start in range(1000, 5000, 1000):
        serve(world, range(start, start + 60))
    assert world.engine.blobs
    world.scheduler.set_pressure(Rung.WARNING)
    settle(world)
    assert not world.engine.blobs, "dropped first"
    assert held(world) == [62], "to the low watermark, and not to host memory"
    for start in range(5000, 9000, 1000):
        serve(world, range(start, start + 60))
    assert not world.engine.blobs, "not filled again"
    assert world.scheduler.statistics().kv.entries == 3, "the pool is there anyhow"
    world.scheduler.set_pressure(Rung.WARNING)
    assert len(held(world)) == 3, "once"
    world.scheduler.set_pressure(Rung.NO_AGENTS)
    assert len(held(world)) == 3, "the rung before has seen to it"
    world.scheduler.set_pressure(Rung.NORMAL)
    serve(world, range(9000, 9060))
    assert world.engine.blobs


@pytest.mark.parametrize("rung", [Rung.WARNING, Rung.CRITICAL])
def test_pressure_with_nothing_to_give_changes_nothing(rung: Rung) -> None:
    world = cached_world()
    world.scheduler.set_pressure(rung)
    assert world.scheduler.plan(1.0) is None
    assert serve(world, ONE)[0] == 0


def test_at_the_last_rung_a_tiny_chat_passes_a_large_one_and_is_served() -> None:
    world = cached_world(lanes=2, cells=8000, window=2000, shared=False)
    world.scheduler.set_pressure(Rung.TINY_CHATS)
    large = world.ask(CHAT, most=500, prompt=range(1000, 1700))
    agent, tiny = world.ask(AGENT, prompt=ONE), world.ask(CHAT, most=3, prompt=OTHER)
    assert world.scheduler.why_waiting(world.record(large)) == "memory: the machine is out of it"
    world.tick(steps=1)
    assert world.seated == [tiny]
    assert kinds(world, agent) == ["queued", "memory-critical", "overtaken", "memory-critical"]
    world.tick()
    world.tick()
    assert world.scheduler.plan(world.now) is None
    world.scheduler.set_pressure(Rung.NORMAL)
    world.tick(steps=1)
    assert set(world.seated) == {large, agent}
    assert "memory-critical" in kinds(world, large)


def test_a_waiting_requests_kv_is_its_own() -> None:
    world = cached_world(lanes=1, sequences=3)
    victim = world.ask(AGENT, most=50, prompt=ONE)
    world.tick(steps=3)
    fed = world.record(victim).fed
    chat = world.ask(CHAT, most=3, prompt=[*ONE, *[REPLY] * 10])
    plan = world.tick()
    assert plan.kv == (Copy(0, 1, fed),), "others may copy it"
    assert world.scheduler.request(chat) is None
    plan = world.tick(steps=1)
    assert plan.admit[0].request == victim
    assert plan.admit[0].cached >= fed
    assert "resumed" in kinds(world, victim)


def test_a_waiting_requests_kv_is_not_taken_over_where_there_is_no_room_for_a_copy() -> None:
    world = cached_world(lanes=1, sequences=1)
    victim = world.ask(AGENT, most=50, prompt=ONE)
    world.tick(steps=3)
    world.ask(CHAT, most=3, prompt=[*ONE, 5])
    plan = world.tick()
    assert plan.kv == (Free(0),), "it went: no room for two, and no host memory"
    assert plan.admit[0].cached == 0
    assert world.record(victim).fed == 0


def test_a_preempted_lane_goes_to_host_memory_and_comes_back_from_there() -> None:
    world = cached_world(lanes=1, sequences=1, host_bytes=10_000, enabled=False)
    victim = world.ask(AGENT, most=50, prompt=ONE)
    world.tick(steps=3)
    fed = world.record(victim).fed
    world.ask(CHAT, most=3, prompt=OTHER)
    assert world.tick().kv == (Export(0, 1), Free(0))
    plan = world.tick(steps=1)
    assert plan.kv == (Free(0), Import(1, 0, fed), Discard(1))
    assert plan.admit[0].cached == fed
    assert world.scheduler.statistics().kv.hits == 0, "what it had was its own"


def test_a_request_resumes_from_what_another_has_got_further_with() -> None:
    world = cached_world(lanes=1, sequences=4, cells=4000)
    prompt = range(10_000, 10_600)
    victim = world.ask(AGENT, most=50, prompt=prompt)
    world.tick(steps=1)
    assert world.record(victim).fed == 512
    serve(world, [*prompt, 5], qos=CHAT)
    plan = world.tick(steps=1)
    assert (plan.admit[0].request, plan.admit[0].cached) == (victim, 599)
    assert not any(entry.owner for entry in world.scheduler.kept()), "its own is of no more use"


def test_what_begins_like_something_longer_is_not_kept_beside_it() -> None:
    world = cached_world(lanes=2, sequences=4)
    first = world.ask(AGENT, most=20, prompt=ONE)
    world.tick(steps=1)
    world.ask(AGENT, most=50, prompt=[*ONE, *[REPLY] * 30])
    while world.scheduler.request(first) is not None:
        world.tick()
    assert held(world) == [79]
    while not world.scheduler.idle:
        world.tick()
    settle(world)
    assert held(world) == [60 + 30 + 49]


def test_a_waiting_request_that_is_cancelled_leaves_its_kv_to_all() -> None:
    world = cached_world(lanes=1)
    victim = world.ask(AGENT, most=50, prompt=ONE)
    world.tick(steps=3)
    chat = world.ask(CHAT, most=60, prompt=OTHER)
    world.tick(steps=1)
    bystander = world.ask(AGENT, prompt=[1, 2, 3])
    world.scheduler.finish(bystander, FinishReason.ABORT)
    assert [entry.owner and entry.owner.id for entry in world.scheduler.kept()] == [victim]
    world.scheduler.finish(victim, FinishReason.ABORT)
    assert [entry.owner for entry in world.scheduler.kept()] == [None]
    world.scheduler.finish(chat, FinishReason.ABORT)
    settle(world)
    assert serve(world, [*ONE, 5])[0] == len(ONE)


# -- what goes wrong ----------------------------------------------------------------------------------------------


def fail_next(world: World, kind: type) -> None:
    """The engine cannot do any operation of this kind."""
    engine = world.engine
    engine.faulty = True
    engine.fails = lambda op: isinstance(op, kind)  # type: ignore[method-assign]


def well_again(world: World) -> None:
    del world.engine.fails  # back to the class's
    world.engine.faulty = False


def saved(world: World) -> None:
    serve(world, ONE)
    serve(world, OTHER)
    assert world.scheduler.statistics().kv.host_entries == 1


@pytest.mark.parametrize("kind", [Import, Copy])
def test_a_lane_that_could_not_be_seeded_is_fed_its_prompt(kind: type) -> None:
    world = cached_world(sequences=1 if kind is Import else 4, host_bytes=10_000)
    saved(world) if kind is Import else serve(world, ONE)
    fail_next(world, kind)
    cached, plan = serve(world, [*ONE[:40], 5, 6])
    assert plan.admit[0].cached == 40, "it was promised"
    assert cached == 0, "but did not get it, and the books know"
    assert world.scheduler.statistics().kv.cached_tokens == 0
    well_again(world)
    again, _ = serve(world, [*ONE[:40], 8, 9])
    assert again == 40, "from the lane that was fed it, or from the original"


def test_what_could_not_be_read_once_is_not_tried_again() -> None:
    world = cached_world(sequences=1, host_bytes=10_000)
    saved(world)
    fail_next(world, Import)
    serve(world, [*ONE[:40], 5, 6])
    well_again(world)
    settle(world)
    assert [e.blob for e in world.scheduler.kept() if e.tokens == pack([*ONE, REPLY, REPLY])] == []
    assert 1 not in world.engine.blobs


def test_what_a_lane_that_could_not_be_seeded_leaves_is_not_kept() -> None:
    world = cached_world(sequences=1, host_bytes=10_000)
    saved(world)
    fail_next(world, Import)
    request = world.ask(AGENT, prompt=[*ONE, REPLY, REPLY, REPLY, 5])
    plan = world.plan()
    assert plan.admit[0].cached == 62
    world.scheduler.finish(request, FinishReason.ABORT)
    assert held(world) == [62], "so the books think"
    world.run(plan)
    settle(world)
    well_again(world)
    assert not held(world)


def test_what_could_not_be_saved_is_gone() -> None:
    world = cached_world(sequences=1, host_bytes=10_000)
    serve(world, ONE)
    fail_next(world, Export)
    serve(world, OTHER)
    well_again(world)
    assert world.scheduler.statistics().kv.host_bytes == 0
    assert serve(world, [*ONE, 5])[0] == 0


def test_news_of_what_has_been_forgotten_meanwhile_is_nobodys() -> None:
    world = cached_world(sequences=1, host_bytes=10_000)
    serve(world, ONE)
    world.ask(AGENT, most=3, prompt=OTHER)
    plan = world.plan()
    assert Export(0, 1) in plan.kv
    world.scheduler._kv.drop_host()
    world.run(plan)
    settle(world)
    assert not world.engine.blobs
    world.scheduler._kv.unreadable(99)
    world.scheduler._kv.emptied(99)


def test_a_resumed_lane_whose_kv_could_not_be_brought_back_is_fed_again() -> None:
    world = cached_world(sequences=1, host_bytes=10_000)
    victim = world.ask(AGENT, most=50, prompt=ONE)
    world.tick(steps=3)
    world.ask(CHAT, most=3, prompt=OTHER)
    world.tick()
    fail_next(world, Import)
    plan = world.tick(steps=1)
    assert plan.admit[0].request == victim
    assert plan.admit[0].cached > 0
    assert world.scheduler.statistics().kv.cached_tokens == 0, "it had begun from nothing, and that still is so"
    well_again(world)
    while world.scheduler.request(victim) is not None:
        world.tick()
    world.scheduler.check_integrity()


def refuse(world: World, plan: Plan) -> None:
    world.engine.prefilled = world.engine.decoded = {}
    world.engine.emptied, world.engine.exported = [], []
    report = world.engine.report(plan, "replan")
    world.scheduler.apply(msgspec.structs.replace(report, reason="the pool cannot hold it"), world.now)


def test_a_refused_plan_is_tried_again_without_what_is_kept_and_then_with_fewer() -> None:
    world = cached_world(lanes=4, sequences=6)
    serve(world, ONE)
    world.scheduler.pin(1, math.inf, 0.0)
    asked = [world.ask(AGENT, most=50, prompt=range(1000 * n, 1000 * n + 20)) for n in range(3, 6)]
    plan = world.plan()
    assert len(plan.admit) == 3
    refuse(world, plan)
    assert [record.id for record in world.scheduler.queued()] == asked, "back at the queue's head, in order"
    plan = world.plan()
    assert Free(0) in plan.kv, "what is kept went first, pinned or not"
    assert len(plan.admit) == 3
    refuse(world, plan)
    plan = world.plan()
    assert [seat.request for seat in plan.admit] == asked[:1]
    world.run(plan)
    world.tick()
    assert world.seated == asked


def test_a_lost_engine_takes_everything_with_it() -> None:
    world = cached_world(sequences=1, host_bytes=10_000)
    saved(world)
    assert len(world.scheduler.kept()) == 2
    world.scheduler.engine_lost(world.now)
    assert not world.scheduler.kept()
    world.engine = FakeEngine(world.scheduler.limits, ends=False)
    assert serve(world, [*ONE, 5])[0] == 0

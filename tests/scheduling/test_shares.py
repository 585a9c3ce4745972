"""Host memory and disk space that several schedulers use: the limit holds, nobody is shut out, nothing lies idle."""

from __future__ import annotations

from superfluidd.scheduling.plan import Discard, Forget
from superfluidd.scheduling.shares import Budget
from tests.scheduling.fake_engine import CELL_BYTES
from tests.scheduling.test_kv import cached_world, serve, settle
from tests.scheduling.world import World

ENTRY = 62 * CELL_BYTES
"""Bytes of what one request of these tests leaves."""


def talk(world: World, *firsts: int) -> None:
    """Conversations that share nothing, one after the other."""
    for first in firsts:
        serve(world, range(1000 * first, 1000 * first + 60))


def saved(world: World) -> int:
    return world.scheduler.statistics().kv.host_entries


def test_what_nobody_holds_may_be_held_by_one() -> None:
    budget = Budget(4 * ENTRY)
    one, _ = (cached_world(sequences=1, host_bytes=budget.limit, host=budget.join(lambda: None)) for _ in range(2))
    talk(one, 1, 2, 3, 4, 5)
    assert saved(one) == 4


def test_who_has_less_than_an_equal_part_gets_it_from_who_has_more() -> None:
    budget = Budget(4 * ENTRY)
    nudged: list[str] = []
    one, other = (
        cached_world(sequences=1, host_bytes=budget.limit, host=budget.join(lambda name=name: nudged.append(name)))
        for name in ("one", "other")
    )
    talk(one, 1, 2, 3, 4, 5)
    talk(other, 1, 2)
    assert (saved(one), saved(other)) == (4, 0), "the limit holds, whoever asks"
    assert nudged == ["one"]
    plan = one.tick()
    assert [type(op) for op in plan.kv] == [Discard]
    assert saved(one) == 3
    talk(other, 3)
    assert (saved(one), saved(other)) == (3, 1)
    for first in range(4, 12):
        talk(other, first)
        settle(one)
        assert saved(one) + saved(other) <= 4
    assert (saved(one), saved(other)) == (2, 2), "an equal part, and no more, is taken from anybody"
    for world in (one, other):
        world.scheduler.check_integrity()


def test_who_leaves_leaves_everything() -> None:
    budget = Budget(4 * ENTRY)
    shares = [budget.join(lambda: None) for _ in range(2)]
    one, other = (cached_world(sequences=1, host_bytes=budget.limit, host=share) for share in shares)
    talk(one, 1, 2, 3, 4, 5)
    shares[0].leave()
    shares[0].leave()
    talk(other, 1, 2, 3, 4, 5)
    assert saved(other) == 4
    assert budget.part == 4 * ENTRY


def test_disk_space_is_shared_in_the_same_way() -> None:
    budget = Budget(4 * ENTRY)
    one, other = (
        cached_world(park_bytes=budget.limit, park_least=4, sequences=2, disk=budget.join(lambda: None))
        for _ in range(2)
    )
    for first in (1, 2, 3, 4, 5):
        talk(one, first)
        settle(one)
    assert len(one.engine.disk) == 4
    talk(other, 1)
    settle(other)
    assert not other.engine.disk
    plan = one.tick()
    assert [type(op) for op in plan.kv] == [Forget]
    settle(other)
    assert len(other.engine.disk) == 1
    for first in (6, 7, 8):
        talk(other, first)
        settle(other)
        settle(one)
    assert (len(one.engine.disk), len(other.engine.disk)) == (2, 2)


def test_two_that_are_both_over_their_part_share_the_burden_of_a_third() -> None:
    budget = Budget(6 * ENTRY)
    one, other = (cached_world(sequences=1, host_bytes=budget.limit, host=budget.join(lambda: None)) for _ in range(2))
    talk(one, 1, 2, 3, 4)
    talk(other, 1, 2, 3, 4)
    assert (saved(one), saved(other)) == (3, 3)
    third = cached_world(sequences=1, host_bytes=budget.limit, host=budget.join(lambda: None))
    talk(third, 1, 2)
    for _ in range(4):
        settle(one)
        settle(other)
        talk(third, 3, 4, 5, 6)
    assert (saved(one), saved(other), saved(third)) == (2, 2, 2)

"""The thread policy on synthetic costs: how soon it moves, where it settles, what looking around costs. All exact."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from superfluidd.engine.threads import LATE, SOON, FixedThreads, MeasuredThreads

Cost = Callable[[int, int], float]
"""Seconds of a round, from threads and lanes."""


class Machine:
    """Runs rounds of a cost that a test may change. It is its own runtime: it has only to obey."""

    def __init__(self, most: int, cost: Cost, noise: float = 0.0) -> None:
        self.cost = cost
        self.foreign = 0.0
        self.policy = MeasuredThreads(most, lambda: self.foreign)
        self.threads = 0
        self.history: list[int] = []
        self.changes = 0
        self._noise = noise
        self._random = random.Random(5)

    def set_threads(self, decode: int, prefill: int) -> None:
        assert decode == prefill
        assert decode >= 1
        self.threads = decode
        self.changes += 1

    def run(self, rounds: int, lanes: int = 4) -> float:
        """Run them; the time they took."""
        total = 0.0
        runtime: Any = self
        for _ in range(rounds):
            self.policy.before_round(runtime, lanes)
            seconds = self.cost(self.threads, lanes) * (1 + self._random.uniform(-self._noise, self._noise))
            self.history.append(self.threads)
            self.policy.after_round(lanes, seconds)
            total += seconds
        return total

    def settle_time(self, count: int, most: int, lanes: int = 4) -> int:
        """Rounds until it has settled on that count, at most ``most``."""
        for rounds in range(most):
            if self.policy.current == count:
                return rounds
            self.run(1, lanes)
        raise AssertionError(f"still at {self.policy.current} after {most} rounds")


def table(**seconds: float) -> Cost:
    """Costs by thread count, in milliseconds: ``table(t1=15, t2=10)``; twice the lanes, half as much again."""
    costs = {int(name[1:]): value / 1000 for name, value in seconds.items()}
    return lambda threads, lanes: costs[threads] * (1 + lanes / 8)


QUIET = table(t1=15, t2=10)
CONTENDED = table(t1=14, t2=30)
CLIFF = table(t1=15, t2=200)


def free_cores(free: int, cliff: float = 8.0) -> Cost:
    """A machine where ``free`` cores are idle: more threads than that wait for each other."""
    return lambda threads, lanes: (2 + 40 / threads) / 1000 * (1 if threads <= free else cliff)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
class TestTwoCores:
    def test_a_quiet_machine_loses_next_to_nothing(self, noise: float) -> None:
        machine = Machine(2, QUIET, noise)
        machine.run(1000)
        ideal = Machine(2, lambda threads, lanes: QUIET(2, lanes), noise)
        ideal.run(1000)
        assert machine.run(20_000) / ideal.run(20_000) < 1.005
        assert machine.history[-5000:].count(2) > 4970

    def test_nor_does_it_in_its_first_minute(self, noise: float) -> None:
        machine = Machine(2, QUIET, noise)
        assert machine.run(2000) / (2000 * QUIET(2, 4)) < 1.015

    @pytest.mark.parametrize("contended", [CONTENDED, CLIFF])
    def test_contention_is_answered_within_a_few_rounds(self, noise: float, contended: Cost) -> None:
        machine = Machine(2, QUIET, noise)
        for quiet in (0, 7, 300, 1500):
            machine.run(quiet + 50)
            assert machine.policy.current == 2
            machine.cost = contended
            assert machine.settle_time(1, 60) <= 12
            machine.run(3000)
            assert machine.policy.current == 1
            machine.cost = QUIET
            machine.settle_time(2, LATE + 10)

    def test_lasting_contention_loses_next_to_nothing_to_looking(self, noise: float) -> None:
        machine = Machine(2, CONTENDED, noise)
        machine.run(2000)
        assert machine.policy.current == 1
        assert machine.run(20_000) / (20_000 * CONTENDED(1, 4)) < 1.015

    def test_it_comes_back_when_the_machine_is_quiet_again(self, noise: float) -> None:
        machine = Machine(2, CONTENDED, noise)
        machine.run(5000)
        assert machine.policy.current == 1
        machine.cost = QUIET
        machine.settle_time(2, LATE + 10)
        machine.run(3000)
        assert machine.policy.current == 2

    def test_lanes_that_come_and_go_change_neither(self, noise: float) -> None:
        """Rounds of another width cost something else: no reason to move. Contention is noticed all the same."""
        machine = Machine(2, QUIET, noise)
        widths = random.Random(3)
        for _ in range(300):
            machine.run(widths.randint(1, 30), lanes=widths.randint(1, 8))
            assert machine.policy.current == 2
        machine.cost = CONTENDED
        rounds = 0
        while machine.policy.current == 2:
            rounds += 20
            assert rounds <= LATE + 100
            machine.run(20, lanes=widths.randint(1, 8))


class TestNeighbours:
    def test_a_busy_neighbour_is_left_a_core_at_once_and_it_is_taken_back_at_once(self) -> None:
        machine = Machine(2, QUIET)
        machine.run(100)
        machine.foreign = 1.0
        machine.cost = CLIFF
        machine.run(2000)
        assert set(machine.history[100:]) == {1}, "not one round on the cliff, and no trial there either"
        machine.foreign = 0.1
        machine.cost = QUIET
        machine.run(10)
        assert machine.history[2100:] == [2] * 10

    @pytest.mark.parametrize(
        ("most", "foreign", "count"),
        [
            (2, 0.3, 2),
            (2, 0.8, 2),
            (2, 0.95, 1),
            (2, 5.0, 1),
            (1, 1.0, 1),
            (4, 1.0, 3),
            (4, 1.5, 3),
            (4, 1.9, 2),
            (8, 3.0, 5),
            (16, 15.0, 1),
        ],
    )
    def test_whole_cores_are_left_to_others_and_one_is_always_used(self, most: int, foreign: float, count: int) -> None:
        machine = Machine(most, free_cores(most))
        machine.foreign = foreign
        machine.run(1)
        assert machine.history == [count]

    def test_prefill_leaves_room_too(self) -> None:
        machine = Machine(4, free_cores(4))
        runtime: Any = machine
        machine.policy.before_prefill(runtime)
        assert machine.threads == 4
        machine.foreign = 2.0
        machine.policy.before_prefill(runtime)
        assert machine.threads == 2

    def test_prefill_never_runs_on_a_trial(self) -> None:
        machine = Machine(2, QUIET)
        runtime: Any = machine
        for _ in range(500):
            machine.run(1)
            machine.policy.before_prefill(runtime)
            assert machine.threads == 2


@pytest.mark.parametrize("most", [4, 8, 16])
class TestManyCores:
    def test_a_quiet_machine_loses_next_to_nothing(self, most: int) -> None:
        machine = Machine(most, free_cores(most), 0.1)
        machine.run(1000)
        spent = machine.run(10_000)
        assert machine.policy.current == most
        assert spent / (10_000 * free_cores(most)(most, 4)) < 1.015

    def test_half_the_cores_lost_is_answered_at_once(self, most: int) -> None:
        """As inside a container, where the neighbours cannot be seen."""
        machine = Machine(most, free_cores(most), 0.1)
        machine.run(500)
        machine.cost = free_cores(most // 2)
        machine.settle_time(most // 2, 12)
        machine.run(3000)
        assert machine.run(3000) / (3000 * machine.cost(most // 2, 4)) < 1.02
        machine.cost = free_cores(most)
        machine.run(2 * LATE + 10 + 4 * (SOON + 10))  # up and down take turns
        assert machine.run(1000) / (1000 * machine.cost(most, 4)) < 1.07

    @pytest.mark.parametrize("taken", [1, 2])
    def test_it_finds_what_is_free_on_a_machine_it_cannot_see(self, most: int, taken: int) -> None:
        free = most - taken
        machine = Machine(most, free_cores(most), 0.05)
        machine.run(500)
        machine.cost = free_cores(free)
        machine.run(12)
        assert machine.policy.current <= free, "off the cliff at once"
        machine.run(12 * (SOON + 10))
        assert machine.run(3000) / (3000 * machine.cost(free, 4)) < 1.15

    def test_threads_that_only_get_in_each_others_way_are_given_up(self, most: int) -> None:
        """Beyond some count every thread costs more than it brings, with no cliff to show it."""

        def cost(threads: int, lanes: int) -> float:
            return (2 + 28 / threads + 1.0 * threads) / 1000

        machine = Machine(most, cost)
        machine.run(3000)
        best = min(cost(threads, 4) for threads in range(1, most + 1))
        assert cost(machine.policy.current, 4) / best < 1.1


def test_one_core_is_never_asked_to_be_another_number() -> None:
    machine = Machine(1, table(t1=10))
    machine.run(5000)
    assert set(machine.history) == {1}
    assert machine.changes == 1


def test_a_hiccup_is_no_contention() -> None:
    machine = Machine(2, QUIET)
    machine.run(2000)
    before = len(machine.history)
    for _ in range(100):
        machine.cost = CLIFF
        machine.run(1)
        machine.cost = QUIET
        machine.run(9)
    assert machine.history[before:].count(1) <= 20
    assert machine.policy.current == 2


def test_counts_that_cost_the_same_are_not_swapped_to_and_fro() -> None:
    machine = Machine(2, table(t1=10, t2=10), 0.03)
    machine.run(20_000)
    moves = sum(one != two for one, two in zip(machine.history, machine.history[1:], strict=False))
    assert moves < 200


def test_fixed_threads_touch_nothing() -> None:
    policy = FixedThreads()
    nothing: Any = None
    policy.before_round(nothing, 1)
    policy.after_round(1, 1.0)
    policy.before_prefill(nothing)
    assert policy.current == 0

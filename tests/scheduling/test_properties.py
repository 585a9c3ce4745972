"""Random lives of the scheduler against a fake engine: nothing is lost, doubled or promised twice."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, currently_in_test_context, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from superfluidd.scheduling.plan import Finished, Plan
from superfluidd.scheduling.scheduler import Limits, Observed, Scheduler
from superfluidd.types import FinishReason, QosClass
from tests.scheduling.fake_engine import FakeEngine, alone, submit

GOLDEN = Path(__file__).parents[1] / "golden" / "plans.jsonl"

LIMITS = st.sampled_from(
    [
        Limits(lanes=1, shared=False, cells=40, sequences=1, window=40, max_step=8),
        Limits(lanes=3, shared=False, cells=120, sequences=3, window=40, max_step=16),
        Limits(lanes=3, shared=True, cells=70, sequences=3, window=40, max_step=8),
        Limits(lanes=4, shared=True, cells=40, sequences=4, window=64, max_step=16),
    ]
)


def note(what: str) -> None:
    """Count an event of a Hypothesis run; outside of one there is nothing to count."""
    if currently_in_test_context():
        event(what)


class Lives(RuleBasedStateMachine):
    @initialize(limits=LIMITS)
    def begin(self, limits: Limits) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.engine = FakeEngine(limits)
        self.asked: dict[int, tuple[list[int], int]] = {}
        self.delivered: dict[int, list[int]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.plans: list[Plan] = []
        self.now = 0.0

    # -- what may happen ------------------------------------------------------------------------------------------

    @rule(
        qos=st.sampled_from(QosClass),
        prompt=st.lists(st.integers(10, 99), min_size=1, max_size=40),
        most=st.integers(1, 30),
    )
    def arrive(self, qos: QosClass, prompt: list[int], most: int) -> None:
        request = submit(self.scheduler, prompt, most, qos, self.now)
        self.asked[request] = (prompt, most)
        self.delivered[request] = []

    @precondition(lambda self: len(self.ended) < len(self.asked))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([r for r in self.asked if r not in self.ended]))
        self._take(self.scheduler.finish(request, FinishReason.ABORT))
        assert self.ended[request] is FinishReason.ABORT

    @rule()
    def tick(self) -> None:
        self._tick(stop_after=None)

    @rule(steps=st.integers(1, 4))
    def tick_that_is_stopped(self, steps: int) -> None:
        self._tick(stop_after=steps)

    @rule(steps=st.integers(0, 4), data=st.data())
    def tick_with_a_cancel_and_an_arrival_in_it(self, steps: int, data: st.DataObject) -> None:
        def meanwhile() -> None:
            self.arrive(QosClass.INTERACTIVE, [11, 12, 13], 4)
            running = [record.id for record in self.scheduler.seated()]
            if running:
                self._take(self.scheduler.finish(data.draw(st.sampled_from(running)), FinishReason.ABORT))
                assert self.scheduler.should_interrupt
                note("cancelled in mid-tick")

        self._tick(stop_after=steps + 1, meanwhile=meanwhile, at=steps)

    @rule(steps=st.integers(0, 5))
    def death_in_mid_tick(self, steps: int) -> None:
        self._tick(stop_after=None, die_after=steps)

    @rule(rounds=st.integers(2, 6))
    def run_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self._tick(stop_after=None)

    # -- how it happens -------------------------------------------------------------------------------------------

    def _tick(
        self,
        stop_after: int | None,
        meanwhile: object = None,
        at: int = -1,
        die_after: int | None = None,
    ) -> None:
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return
        self.plans.append(plan)
        assert len(self.scheduler.seated()) <= self.limits.lanes
        if self.engine.seat(plan):
            raise AssertionError("the books promised what the engine does not have")
        if any(seat.prompt < len(seat.tokens) for seat in plan.admit):
            note("resumed after a death")
        steps = 0
        outcome = "done"
        for item in self.engine.run(plan):
            if item is None:
                if steps == at and callable(meanwhile):
                    meanwhile()
                steps += 1
                if die_after is not None and steps > die_after:
                    break
                if stop_after is not None and steps >= stop_after:
                    outcome = "stopped"
                    break
                continue
            request, position, token, end = item
            seen = self.scheduler.observe(request, position, token, end=end, now=self.now)
            if seen is not Observed.IGNORED:
                assert request not in self.ended, "delivered after it had ended"
                self.delivered[request].append(token)
            if seen is Observed.FINISHED:
                self.ended[request] = FinishReason.STOP if end else FinishReason.LENGTH
        if die_after is not None:
            note("died")
            self.engine = FakeEngine(self.limits)
            self._take(self.scheduler.engine_lost(self.now))
        else:
            self._take(self.scheduler.apply(self.engine.report(plan, outcome), self.now))

    def _take(self, effects: list[object]) -> None:
        for effect in effects:
            if isinstance(effect, Finished):
                assert effect.request not in self.ended, "ended twice"
                self.ended[effect.request] = effect.reason

    # -- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            known = {r.id for r in self.scheduler.seated()} | {r.id for r in self.scheduler.queued()}
            assert known == self.asked.keys() - self.ended.keys()

    @invariant()
    def tokens_are_what_the_request_gets_alone(self) -> None:
        if hasattr(self, "scheduler"):
            for request, (prompt, most) in self.asked.items():
                whole = alone(prompt, most, self.scheduler.window)
                got = self.delivered[request]
                assert got == whole[: len(got)]
                if self.ended.get(request) in (FinishReason.STOP, FinishReason.LENGTH):
                    assert got == whole

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            for _ in range(40 * len(self.asked) + 2):
                self._tick(stop_after=None)
            assert self.scheduler.idle, "it does not drain"
            assert set(self.ended) == set(self.asked)
            self.tokens_are_what_the_request_gets_alone()
            self.scheduler.check_integrity()


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=250,
    stateful_step_count=30,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)


def play() -> bytes:
    """A fixed scenario's plans."""
    machine = Lives()
    machine.begin(Limits(lanes=3, shared=True, cells=70, sequences=3, window=40, max_step=8))
    for number in range(8):
        machine.arrive(QosClass(number % 4), [10 + number] * (5 + 4 * number), 6)
        machine._tick(stop_after=2 if number % 2 else None, die_after=1 if number == 5 else None)
    machine.teardown()
    return b"\n".join(msgspec.json.encode(plan) for plan in machine.plans)


def test_the_same_calls_give_the_same_plans_byte_for_byte() -> None:
    first = play()
    assert first == play()


def test_the_plans_are_the_golden_ones() -> None:
    """A change of policy shows here. If it is meant: UPDATE_GOLDEN=1 pytest tests/scheduling, and read the diff."""
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_bytes(play() + b"\n")
    assert play().splitlines() == GOLDEN.read_bytes().splitlines()

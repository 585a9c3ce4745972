"""Random lives of the scheduler against a fake engine: nothing is lost, doubled or promised twice, and every rule that
can be told from a plan holds for every plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, currently_in_test_context, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from superfluidd.scheduling.books import Limits
from superfluidd.scheduling.entries import Cache, pack
from superfluidd.scheduling.plan import (
    Copy,
    Cut,
    Export,
    Finished,
    Forget,
    Import,
    Park,
    Paused,
    Plan,
    Recall,
    Urgency,
)
from superfluidd.scheduling.policy import Policy
from superfluidd.scheduling.pressure import Rung
from superfluidd.scheduling.request import Phase
from superfluidd.scheduling.scheduler import Observed, Scheduler
from superfluidd.types import FinishReason, QosClass
from tests.scheduling.fake_engine import CELL_BYTES, FakeEngine, alone, submit

GOLDEN = Path(__file__).parents[1] / "golden" / "plans.jsonl"

CACHE = Cache(enabled=True, host_bytes=60 * CELL_BYTES, cell_bytes=CELL_BYTES, least=3, wait_seconds=0.01)
WHOLE_ONLY = Cache(
    enabled=True, cut="head", host_bytes=1000 * CELL_BYTES, cell_bytes=CELL_BYTES, least=3, high=0.5, low=0.25
)

PARKING = msgspec.structs.replace(CACHE, park_bytes=150 * CELL_BYTES, park_least=4)

LIMITS = st.sampled_from(
    [
        Limits(lanes=3, shared=False, cells=200, sequences=5, window=40, max_step=16, abandons=True, cache=CACHE),
        Limits(lanes=2, shared=False, cells=80, sequences=2, window=40, max_step=16, cache=CACHE),
        Limits(lanes=2, shared=False, cells=120, sequences=3, window=40, max_step=16, abandons=True, cache=PARKING),
        Limits(lanes=3, shared=True, cells=90, sequences=6, window=64, max_step=8, cache=PARKING),
        Limits(lanes=3, shared=True, cells=90, sequences=6, window=64, max_step=8, abandons=True, cache=CACHE),
        Limits(lanes=3, shared=False, cells=160, sequences=4, window=40, max_step=16, cache=WHOLE_ONLY),
        Limits(lanes=1, shared=False, cells=40, sequences=1, window=40, max_step=8),
        Limits(lanes=3, shared=False, cells=200, sequences=5, window=40, max_step=16, abandons=True),
        Limits(lanes=2, shared=False, cells=120, sequences=3, window=40, max_step=100, abandons=True),
        Limits(lanes=3, shared=True, cells=70, sequences=5, window=40, max_step=8),
        Limits(lanes=4, shared=True, cells=40, sequences=4, window=64, max_step=16, abandons=True),
    ]
)
POLICIES = st.sampled_from(
    [
        Policy(starvation_ticks=2),
        Policy(starvation_ticks=3, prefill_budget=64, decode_budget=5),
        Policy(starvation_ticks=8, prefill_budget=0, agent_preempts_background=True),
    ]
)


def note(what: str) -> None:
    """Count an event of a Hypothesis run; outside of one there is nothing to count."""
    if currently_in_test_context():
        event(what)


class Lives(RuleBasedStateMachine):
    @initialize(limits=LIMITS, policy=POLICIES)
    def begin(self, limits: Limits, policy: Policy) -> None:
        self.limits = limits
        self.policy = policy
        self.scheduler = Scheduler(limits, policy)
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
        kind=st.sampled_from(["plain", "plain", "plain", "alone", "media"]),
    )
    def arrive(self, qos: QosClass, prompt: list[int], most: int, kind: str = "plain") -> None:
        request = submit(self.scheduler, prompt, most, qos, self.now, alone=kind == "alone", media=kind == "media")
        self.asked[request] = (prompt, most)
        self.delivered[request] = []

    @precondition(lambda self: len(self.ended) < len(self.asked))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([r for r in self.asked if r not in self.ended]))
        self._take(self.scheduler.finish(request, FinishReason.ABORT))
        assert self.ended[request] is FinishReason.ABORT

    @precondition(lambda self: len(self.ended) < len(self.asked))
    @rule(data=st.data(), qos=st.sampled_from(QosClass))
    def reclass(self, data: st.DataObject, qos: QosClass) -> None:
        request = data.draw(st.sampled_from([r for r in self.asked if r not in self.ended]))
        assert self.scheduler.set_qos(request, qos, self.now)
        record = self.scheduler.request(request)
        assert record is not None
        assert record.qos is qos

    @rule(qos=st.sampled_from(QosClass), lanes=st.sampled_from([1, 2, None]))
    def cap(self, qos: QosClass, lanes: int | None) -> None:
        self.scheduler.set_caps({qos: None if lanes is None else min(lanes, self.limits.lanes)})

    @rule(qos=st.sampled_from(QosClass), paused=st.booleans())
    def pause_a_class(self, qos: QosClass, paused: bool) -> None:
        self.scheduler.set_paused(qos, paused)

    @rule(rung=st.sampled_from(Rung))
    def memory(self, rung: Rung) -> None:
        self.scheduler.set_pressure(rung)
        if rung >= Rung.CRITICAL:
            seated = self.scheduler.seated()
            lose = {r.id for r in seated if r.qos is QosClass.BACKGROUND and r.decoding and r.preemptible}
            self._tick()
            assert not lose & {record.id for record in self.scheduler.seated()}

    @rule()
    def tick(self) -> None:
        self._tick()

    @rule(steps=st.integers(1, 4))
    def tick_that_is_stopped(self, steps: int) -> None:
        self._tick(stop_after=steps)

    @rule(steps=st.integers(0, 4), data=st.data())
    def tick_with_a_cancel_and_an_arrival_in_it(self, steps: int, data: st.DataObject) -> None:
        def meanwhile() -> None:
            self.arrive(QosClass.INTERACTIVE, [11, 12, 13], 4)
            assert self.scheduler.urgency >= Urgency.STOP
            running = [record.id for record in self.scheduler.seated()]
            if running:
                self._take(self.scheduler.finish(data.draw(st.sampled_from(running)), FinishReason.ABORT))
                assert self.scheduler.urgency >= Urgency.STOP
                note("cancelled in mid-tick")

        self._tick(stop_after=steps + 1, meanwhile=meanwhile, at=steps)

    @rule(steps=st.integers(0, 5))
    def death_in_mid_tick(self, steps: int) -> None:
        self._tick(die_after=steps)

    @rule(rounds=st.integers(2, 6))
    def run_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self._tick()

    @rule(chats=st.integers(1, 3), ticks=st.integers(0, 3), most=st.integers(3, 8))
    def a_full_house_meets_chats(self, chats: int, ticks: int, most: int) -> None:
        """Preempts and resumes, which single random steps almost never do."""
        for number in range(self.limits.lanes):
            self.arrive(QosClass.BACKGROUND, [20 + number] * 9, 12)
        for _ in range(ticks):
            self._tick(stop_after=2)
        for number in range(chats):
            self.arrive(QosClass.INTERACTIVE, [50 + number] * 3, most)
        self.run_on(6)

    @rule(steps=st.integers(0, 2))
    def a_step_is_given_up(self, steps: int) -> None:
        def meanwhile() -> None:
            self.arrive(QosClass.INTERACTIVE, [11, 12, 13], 4)
            self.engine.give_up = self.scheduler.urgency is Urgency.ABANDON

        self.arrive(QosClass.AGENT, [30] * 30, 3)
        self._tick(meanwhile=meanwhile, at=steps)
        self.engine.give_up = False

    @rule()
    def the_engine_refuses_a_plan(self) -> None:
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return
        if not plan.admit:
            self._run(plan)
            return
        note("replanned")
        report = msgspec.structs.replace(
            self.engine.report(plan, "replan"), prefilled=(), decoded=(), abandoned=(), reason="full"
        )
        self.scheduler.take_effects()
        self._take(self.scheduler.apply(report, self.now))

    @rule(
        family=st.integers(0, 2),
        keep=st.integers(10, 36),
        tail=st.lists(st.integers(10, 99), max_size=6),
        qos=st.sampled_from(QosClass),
        most=st.integers(1, 8),
    )
    def arrive_with_a_known_beginning(self, family: int, keep: int, tail: list[int], qos: QosClass, most: int) -> None:
        prompt = [60 + family + number // 7 for number in range(keep)] + tail
        self.arrive(qos, prompt[: self.scheduler.window], most)

    @rule(data=st.data(), qos=st.sampled_from(QosClass), tail=st.lists(st.integers(10, 99), min_size=1, max_size=4))
    def somebody_returns(self, data: st.DataObject, qos: QosClass, tail: list[int]) -> None:
        """A next turn: all that was said before, and something new."""
        ended = [r for r in self.ended if self.delivered[r]]
        if ended:
            request = data.draw(st.sampled_from(ended))
            prompt = self.asked[request][0] + self.delivered[request] + tail
            if len(prompt) <= self.scheduler.window:
                self.arrive(qos, prompt, 3)

    @rule()
    def the_disk_is_done(self) -> None:
        for key, size in self.engine.sealed:
            self.scheduler.sealed(key, size)
        self.engine.sealed.clear()

    @rule(faulty=st.booleans())
    def moves_fail(self, faulty: bool) -> None:
        self.engine.faulty = self.engine.faulty or faulty

    # -- how it happens -------------------------------------------------------------------------------------------

    def _tick(
        self,
        *,
        stop_after: int | None = None,
        meanwhile: Callable[[], None] | None = None,
        at: int = -1,
        die_after: int | None = None,
    ) -> None:
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self._run(plan, stop_after=stop_after, meanwhile=meanwhile, at=at, die_after=die_after)

    def _run(
        self,
        plan: Plan,
        *,
        stop_after: int | None = None,
        meanwhile: Callable[[], None] | None = None,
        at: int = -1,
        die_after: int | None = None,
    ) -> None:
        self.plans.append(plan)
        self._check(plan)
        if self.engine.seat(plan):
            raise AssertionError("the books promised what the engine does not have")
        for op in plan.kv:
            if isinstance(op, Copy | Cut | Export | Import | Park | Recall | Forget):
                note(type(op).__name__)
        if self.engine.emptied:
            note("a move failed")
        if any(record.awaits_tick is not None for record in self.scheduler.queued()):
            note("awaits a prefix")
        if any(seat.prompt < len(seat.tokens) for seat in plan.admit):
            note("resumed with its KV" if any(seat.cached for seat in plan.admit) else "resumed without its KV")
        steps = 0
        outcome = "done"
        for item in self.engine.run(plan):
            if item is None:
                if steps == at and meanwhile is not None:
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
            dead, self.engine = self.engine, FakeEngine(self.limits)
            self.engine.faulty, self.engine.disk = dead.faulty, dead.disk
            self._take(self.scheduler.engine_lost(self.now))
            self.scheduler.adopt_parked(self.engine.parked())
        else:
            if self.engine.abandoned:
                note("abandoned")
                outcome = "stopped"
            self._take(self.scheduler.apply(self.engine.report(plan, outcome), self.now))

    def _check(self, plan: Plan) -> None:
        """What every plan keeps to."""
        seated = {record.id: record for record in self.scheduler.seated()}
        stats = self.scheduler.statistics()
        assert len(seated) <= self.limits.lanes
        named = {chunk.request for chunk in plan.prefill} | {grant.request for grant in plan.decode}
        waiting = {record.id for record in self.scheduler.queued()}
        assert named <= seated.keys(), "scheduled without a lane"
        assert not named & waiting, "scheduled and parked in one plan"
        fed = sum(chunk.tokens for chunk in plan.prefill)
        assert fed <= max(stats.prefill_budget, min(64, self.limits.max_step))
        if self.policy.decode_budget:
            assert sum(grant.rounds for grant in plan.decode) <= max(self.policy.decode_budget, 0)
        for seat in plan.admit:
            qos = seated[seat.request].qos
            if qos in stats.caps:
                held = sum(record.qos is qos for record in seated.values())
                assert held <= stats.caps[qos], "admitted over its cap"
            assert qos not in stats.paused, "admitted though its class is paused"
        alone_in_it = [request for request in named if seated[request].batch_invariant]
        assert plan.exact == bool(alone_in_it)
        if alone_in_it:
            note("ticked alone")
            assert len(named) == 1, "a batch-invariant lane had company"
        finishing = [
            seated[chunk.request].qos
            for chunk in plan.prefill
            if seated[chunk.request].unfed == chunk.tokens and seated[chunk.request].qos <= QosClass.COMPLETION
        ]
        if finishing:
            assert all(seated[chunk.request].qos <= min(finishing) for chunk in plan.prefill), "fed beside a chat"
        for effect in self.scheduler.take_effects():
            assert isinstance(effect, Paused)
            note("preempted")
            record = self.scheduler.request(effect.request)
            assert record is not None
            assert record.preemptible
            assert effect.request in plan.retire

    def _take(self, effects: Iterable[object]) -> None:
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
            assert all(record.phase is Phase.RUNNING for record in self.scheduler.seated())

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
            self.scheduler.set_pressure(Rung.NORMAL)
            for qos in QosClass:
                self.scheduler.set_paused(qos, False)
            for _ in range(80 * len(self.asked) + 2):
                self._tick()
            left = [(r.id, r.qos.label, r.phase.value, self.scheduler.why_waiting(r)) for r in self.scheduler.queued()]
            assert self.scheduler.idle, f"it does not drain: {self.scheduler.seated()} run, {left} wait"
            assert set(self.ended) == set(self.asked)
            self.tokens_are_what_the_request_gets_alone()
            self.scheduler.check_integrity()
            assert self.engine.cells_used == self.scheduler.statistics().cells_kept
            assert self.limits.cache.enabled or self.engine.cells_used == 0
            held = {number: tokens for number, tokens in self.engine.sequences.items() if tokens}
            entries = self.scheduler.kept()
            assert {e.sequence: e.tokens for e in entries if e.sequence is not None} == {
                number: pack(tokens) for number, tokens in held.items()
            }
            assert {e.blob: e.tokens for e in entries if e.blob is not None} == {
                blob: pack(tokens) for blob, tokens in self.engine.blobs.items()
            }
            assert sum(e.bytes for e in entries) <= self.limits.cache.host_bytes


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
    machine.begin(
        Limits(lanes=3, shared=True, cells=70, sequences=5, window=40, max_step=8), Policy(starvation_ticks=3)
    )
    for number in range(8):
        kind = "alone" if number == 6 else "plain"
        machine.arrive(QosClass(3 - number % 4), [10 + number] * (5 + 4 * number), 6, kind)
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

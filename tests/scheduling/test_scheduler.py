"""The scheduler's rules, one by one: the books, the phases, mid-tick events, replans, deaths."""

from __future__ import annotations

import msgspec
import pytest

from superfluidd.errors import ContextLengthExceeded, InvalidValue
from superfluidd.scheduling import budget
from superfluidd.scheduling.books import Limits
from superfluidd.scheduling.plan import (
    Decode,
    Finished,
    LaneFault,
    OutOfOrder,
    Paused,
    Plan,
    Prefill,
    TickReport,
    Timing,
    Urgency,
)
from superfluidd.scheduling.pool import KvPool
from superfluidd.scheduling.qos import ALIASES, parse_class
from superfluidd.scheduling.queues import ClassQueues
from superfluidd.scheduling.request import MOVES, IllegalMove, Phase, Request
from superfluidd.scheduling.scheduler import Observed, Scheduler
from superfluidd.types import FinishReason, QosClass, SamplingParams
from tests.scheduling.fake_engine import submit

PER_SEQUENCE = Limits(lanes=2, shared=False, cells=128, sequences=2, window=64, max_step=32)
SHARED = Limits(lanes=3, shared=True, cells=60, sequences=3, window=64, max_step=32)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(PER_SEQUENCE)


def done(
    plan: Plan | None,
    decoded: dict[int, int] | None = None,
    prefilled: dict[int, int] | None = None,
    outcome: str = "done",
    faults: tuple[LaneFault, ...] = (),
    cells: int = 0,
) -> TickReport:
    assert plan is not None
    if prefilled is None:
        prefilled = {chunk.request: chunk.tokens for chunk in plan.prefill}
    counts = tuple((decoded or {}).items())
    return TickReport(plan.tick, outcome, tuple(prefilled.items()), counts, faults, cells, Timing())  # type: ignore[arg-type]


def start(scheduler: Scheduler, *requests: int) -> None:
    """Run a tick in which these finish their prefill with token 500."""
    plan = scheduler.plan(0.0)
    for request in requests:
        record = scheduler.request(request)
        assert record is not None
        assert scheduler.observe(request, len(record.tokens), 500, end=False, now=0.1) is Observed.ACCEPTED
    scheduler.apply(done(plan, dict.fromkeys(requests, 1)), 0.1)


# -- classes, phases, queues, pool --------------------------------------------------------------------------------


def test_every_alias_in_any_spelling() -> None:
    for text, qos in ALIASES.items():
        assert parse_class(f"  {text.upper().replace('-', '_')} ") is qos
    assert [qos.value for qos in QosClass] == [0, 1, 2, 3]
    with pytest.raises(InvalidValue, match="interactive, completion, agent, background") as caught:
        parse_class("urgent", param="x-superfluid-qos")
    assert caught.value.param == "x-superfluid-qos"


@pytest.mark.parametrize("origin", list(Phase))
@pytest.mark.parametrize("target", list(Phase))
def test_only_the_tables_moves_are_legal_and_others_change_nothing(origin: Phase, target: Phase) -> None:
    record = Request(1, QosClass.AGENT, [1], 1, 1, SamplingParams(), 0.0, phase=origin)
    if target in MOVES[origin]:
        record.move(target)
        assert record.phase is target
    else:
        with pytest.raises(IllegalMove, match=target.value):
            record.move(target)
        assert record.phase is origin


def test_queues_serve_classes_in_order_and_each_first_come_first_served() -> None:
    queues = ClassQueues()
    records = [
        Request(number, qos, [1], 1, 1, SamplingParams(), 0.0)
        for number, qos in enumerate((QosClass.BACKGROUND, QosClass.AGENT, QosClass.AGENT, QosClass.INTERACTIVE))
    ]
    for record in records:
        queues.append(record)
    assert [record.id for record in queues] == [3, 1, 2, 0]
    queues.remove(records[3])
    again = Request(9, QosClass.AGENT, [1], 1, 1, SamplingParams(), 0.0)
    queues.prepend(again)
    assert queues.head(QosClass.AGENT) is again
    assert queues.position(records[2]) == 3
    assert [head.id for head in queues.heads(tick=0, period=8)] == [9, 0]
    with pytest.raises(KeyError):
        queues.position(records[3])
    assert [record.id for record in queues] == [9, 1, 2, 0]
    assert queues.depths()[QosClass.AGENT] == 3
    assert len(queues) == 4
    assert ClassQueues().heads(0, 8) == []


def test_a_shared_pool_promises_each_cell_once() -> None:
    pool = KvPool(shared=True, cells=100, sequences=3, window=80)
    assert pool.limit == 80
    assert not pool.fits(81)
    assert pool.promise(60) == 0
    assert not pool.fits(41)
    assert pool.promise(40) == 1
    with pytest.raises(ValueError, match="100 of 100"):
        pool.promise(1)
    pool.release(0)
    assert pool.promised == 40
    assert pool.promise(10) == 0, "the lowest free sequence"


def test_what_is_kept_is_in_nobodys_way_but_has_to_go_before_it_is_promised() -> None:
    pool = KvPool(shared=True, cells=100, sequences=3, window=80)
    for cells in (30, 30, 40):
        pool.promise(cells)
    pool.keep(0, 20)
    pool.keep(1, 25)
    assert (pool.promised, pool.kept) == (40, 45)
    assert pool.fits(60)
    assert not pool.fits(61)
    assert not pool.short(35, own=0), "20 cells go on as 35, and 25 stay"
    assert pool.short(36, own=0)
    assert pool.promise(30, own=0) == 0
    assert pool.short(1), "no sequence is free"
    with pytest.raises(ValueError, match="25 kept"):
        pool.promise(30)
    pool.drop(1)
    assert not pool.short(30)
    assert pool.promise(30) == 1
    assert pool.kept == 0


def test_a_window_per_sequence_needs_only_a_free_sequence() -> None:
    pool = KvPool(shared=False, cells=128, sequences=2, window=64)
    assert [pool.promise(64), pool.promise(64)] == [0, 1]
    assert not pool.fits(1)
    pool.keep(0, 9)
    assert pool.fits(64)
    assert pool.short(64)
    pool.drop(0)
    assert pool.promise(64) == 0
    assert KvPool(shared=True, cells=40, sequences=2, window=64).limit == 40


# -- budgets and plans --------------------------------------------------------------------------------------------


def test_rounds_aim_at_the_tick_target() -> None:
    rates = budget.Rates(rounds=(0.005,))
    assert budget.decode_rounds(rates, 0.05) == 10
    assert budget.decode_rounds(rates, 0.25) == 50
    assert budget.decode_rounds(budget.Rates(rounds=(0.1,)), 0.05) == budget.ROUNDS_FLOOR
    assert budget.decode_rounds(budget.Rates(rounds=(1e-6,)), 0.25) == budget.ROUNDS_CEILING
    assert budget.decode_rounds(budget.Rates(), 0.05) == budget.ROUNDS_FLOOR


def test_a_short_prompt_goes_before_a_long_one_and_a_better_class_before_both(scheduler: Scheduler) -> None:
    scheduler = Scheduler(Limits(lanes=4, shared=False, cells=256, sequences=4, window=64))
    long, short = submit(scheduler, [1] * 40), submit(scheduler, [1] * 10)
    chat = submit(scheduler, [1] * 50, qos=QosClass.INTERACTIVE)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert [chunk.request for chunk in plan.prefill] == [chat], "it finishes: nothing of a lower class beside it"
    scheduler.observe(chat, 50, 500, end=False, now=0.1)
    scheduler.apply(done(plan, {chat: 1}), 0.1)
    plan = scheduler.plan(0.2)
    assert plan is not None
    assert [chunk.request for chunk in plan.prefill] == [short, long]


def test_steps_are_small_beside_decoding_lanes_and_bring_a_round_each() -> None:
    scheduler = Scheduler(Limits(lanes=2, shared=False, cells=4096, sequences=2, window=2048, max_step=512))
    first = submit(scheduler, [1, 2], most=500)
    start(scheduler, first)
    second = submit(scheduler, [1] * 1000, most=5)
    plan = scheduler.plan(1.0)
    assert plan is not None
    assert plan.step_tokens == budget.STEP_UNKNOWN == 128
    assert plan.prefill == (Prefill(second, 512),), "a chunk, before a rate is known"
    assert plan.decode == (Decode(first, 4),), "512 tokens are 4 micro-batches of 128"


def test_one_tick_feeds_no_more_than_the_budget() -> None:
    scheduler = Scheduler(Limits(lanes=3, shared=False, cells=9000, sequences=3, window=3000))
    for _ in range(3):
        submit(scheduler, [1] * 2000, qos=QosClass.INTERACTIVE)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert [chunk.tokens for chunk in plan.prefill] == [2000, 2000, 96], "nobody could be seated at its end"
    assert [grant.request for grant in plan.decode] == [1, 2], "who does not finish its prefill cannot decode"


def test_while_someone_waits_the_tick_ends_with_its_first_lane(scheduler: Scheduler) -> None:
    a, b = submit(scheduler, [1], most=3), submit(scheduler, [1], most=40)
    start(scheduler, a, b)
    submit(scheduler, [1], most=3)
    plan = scheduler.plan(1.0)
    assert plan is not None
    assert plan.decode == (Decode(a, 2), Decode(b, 2))


# -- admission ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length, most, room", [(63, None, 2), (64, None, 1), (10, 9, 9), (60, 900, 5)])
def test_what_fits_the_window_is_taken_whole(scheduler: Scheduler, length: int, most: int | None, room: int) -> None:
    record = scheduler.request(submit(scheduler, [1] * length, most))
    assert record is not None
    assert record.max_new == room
    assert record.cells <= scheduler.window


def test_a_prompt_larger_than_the_window_is_refused_with_both_numbers(scheduler: Scheduler) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        submit(scheduler, [1] * 65)
    assert (caught.value.prompt_tokens, caught.value.limit, caught.value.param) == (65, 64, "messages")
    assert scheduler.idle
    assert scheduler.plan(0.0) is None


def test_the_head_is_not_overtaken_by_a_smaller_request() -> None:
    scheduler = Scheduler(SHARED)
    running = submit(scheduler, [1] * 30, most=1)
    start_plan = scheduler.plan(0.0)
    big, small = submit(scheduler, [1] * 40, most=1), submit(scheduler, [1] * 5, most=1)
    scheduler.apply(done(start_plan, prefilled={running: 10}), 0.0)
    plan = scheduler.plan(1.0)
    assert plan is not None
    assert plan.admit == ()
    record = scheduler.request(big)
    assert record is not None
    assert scheduler.why_waiting(record) == "KV cells: needs 40, 30 of 60 are free"
    assert [record.id for record in scheduler.queued()] == [big, small]


def test_why_waiting_in_words(scheduler: Scheduler) -> None:
    def why(request: int) -> str:
        record = scheduler.request(request)
        assert record is not None
        return scheduler.why_waiting(record)

    assert why(submit(scheduler, [1])) == "the tick in flight"
    assert why(submit(scheduler, [1])) == "its turn"
    scheduler.plan(0.0)
    third = submit(scheduler, [1])
    assert why(third) == "a lane: all 2 are busy"
    scheduler.set_caps({QosClass.AGENT: 2})
    assert why(third) == "its class: agent=2 is the cap"
    scheduler.set_paused(QosClass.AGENT, True)
    assert why(third) == "an operator: agent is paused"


# -- tokens -------------------------------------------------------------------------------------------------------


def test_a_token_counts_once_in_order_and_only_for_running_requests(scheduler: Scheduler) -> None:
    request, waiting = submit(scheduler, [1, 2]), submit(scheduler, [1, 2])
    third = submit(scheduler, [3])
    scheduler.plan(0.0)
    assert scheduler.observe(request, 2, 500, end=False, now=0.5) is Observed.ACCEPTED
    assert scheduler.observe(request, 2, 500, end=False, now=0.5) is Observed.IGNORED
    with pytest.raises(OutOfOrder, match="token 4"):
        scheduler.observe(request, 4, 500, end=False, now=0.5)
    with pytest.raises(OutOfOrder):
        scheduler.observe(third, 1, 500, end=False, now=0.5)
    assert scheduler.observe(77, 1, 500, end=False, now=0.5) is Observed.IGNORED
    record = scheduler.request(request)
    assert record is not None
    assert (record.generated, record.first_token, record.fed, record.unfed) == (1, 0.5, 2, 1)
    assert scheduler.request(waiting) is not None


@pytest.mark.parametrize("end, reason", [(True, FinishReason.STOP), (False, FinishReason.LENGTH)])
def test_the_last_token_ends_the_request(scheduler: Scheduler, end: bool, reason: FinishReason) -> None:
    request = submit(scheduler, [1, 2], most=1)
    plan = scheduler.plan(0.0)
    assert scheduler.observe(request, 2, 500, end=end, now=0.5) is Observed.FINISHED
    assert scheduler.urgency is Urgency.NONE, "the engine knows it is over"
    scheduler.apply(done(plan, {request: 1}), 0.5)
    assert scheduler.statistics().finished[reason] == 1
    following = scheduler.plan(1.0)
    assert following is not None
    assert (following.retire, following.freed) == ((request,), (0,))
    scheduler.apply(done(following), 1.0)
    assert scheduler.plan(2.0) is None


def test_nothing_is_delivered_after_finish_returned(scheduler: Scheduler) -> None:
    request = submit(scheduler, [1, 2], most=50)
    plan = scheduler.plan(0.0)
    assert scheduler.finish(request, FinishReason.ABORT) == [Finished(request, FinishReason.ABORT)]
    assert scheduler.urgency is Urgency.STOP
    assert scheduler.observe(request, 2, 500, end=False, now=0.0) is Observed.IGNORED
    assert scheduler.finish(request, FinishReason.ABORT) == []
    scheduler.apply(done(plan, {request: 1}), 0.0)
    following = scheduler.plan(0.0)
    assert following is not None
    assert following.freed == (0,)


def test_cancel_in_the_queue_reaches_no_plan(scheduler: Scheduler) -> None:
    request = submit(scheduler, [1])
    scheduler.finish(request, FinishReason.ABORT)
    assert scheduler.plan(0.0) is None
    assert scheduler.urgency is Urgency.NONE


@pytest.mark.parametrize("qos", list(QosClass))
def test_an_interactive_or_completion_arrival_ends_the_tick_and_others_only_if_a_lane_is_free(
    scheduler: Scheduler, qos: QosClass
) -> None:
    first = submit(scheduler, [1], most=50)
    second = submit(scheduler, [1], most=50)
    scheduler.plan(0.0)
    assert scheduler.urgency is Urgency.NONE
    newcomer = submit(scheduler, [1], qos=qos)
    assert scheduler.urgency is (Urgency.STOP if qos <= QosClass.COMPLETION else Urgency.NONE)
    scheduler.finish(newcomer, FinishReason.ABORT)
    assert scheduler.urgency is Urgency.NONE, "it has gone again"
    scheduler.apply(done(scheduler._in_flight, prefilled={first: 1, second: 1}), 0.0)
    scheduler.finish(second, FinishReason.ABORT)
    scheduler.plan(1.0)
    submit(scheduler, [1], qos=qos)
    assert scheduler.urgency is Urgency.STOP, "there is a lane for it"
    scheduler.finish(first, FinishReason.STOP)
    assert scheduler.urgency is Urgency.STOP


def test_a_native_engine_finishes_its_tick() -> None:
    scheduler = Scheduler(msgspec.structs.replace(PER_SEQUENCE, granular=False))
    first = submit(scheduler, [1], most=50)
    scheduler.plan(0.0)
    submit(scheduler, [1], qos=QosClass.INTERACTIVE)
    scheduler.finish(first, FinishReason.ABORT)
    assert scheduler.urgency is Urgency.NONE


# -- reports ------------------------------------------------------------------------------------------------------


def test_reports_must_fit_the_plan_and_what_was_seen(scheduler: Scheduler) -> None:
    request = submit(scheduler, [1, 2], most=50)
    with pytest.raises(OutOfOrder, match="not in flight"):
        scheduler.apply(TickReport(1, "done"), 0.0)
    plan = scheduler.plan(0.0)
    with pytest.raises(OutOfOrder, match="in flight"):
        scheduler.plan(0.0)
    with pytest.raises(OutOfOrder):
        scheduler.apply(TickReport(9, "done"), 0.0)
    with pytest.raises(OutOfOrder, match="3 tokens reported"):
        scheduler.apply(done(plan, {request: 3}), 0.0)


def test_a_fault_ends_its_lane_with_the_engines_words(scheduler: Scheduler) -> None:
    bad, good = submit(scheduler, [1, 2], most=50), submit(scheduler, [1, 2], most=50)
    plan = scheduler.plan(0.0)
    effects = scheduler.apply(done(plan, faults=(LaneFault(bad, "broken"),), prefilled={}), 0.0)
    assert Finished(bad, FinishReason.ERROR, "broken") in effects
    following = scheduler.plan(0.0)
    assert following is not None
    assert following.retire == (bad,)
    assert [chunk.request for chunk in following.prefill] == [good]


def test_prefill_that_was_not_reached_is_planned_again(scheduler: Scheduler) -> None:
    request = submit(scheduler, [1] * 50)
    plan = scheduler.plan(0.0)
    scheduler.apply(done(plan, prefilled={request: 32}, outcome="stopped"), 0.0)
    following = scheduler.plan(0.0)
    assert following is not None
    assert following.prefill == (Prefill(request, 18),)


def test_a_refused_plan_returns_its_admissions_and_admits_fewer(scheduler: Scheduler) -> None:
    scheduler = Scheduler(Limits(lanes=4, shared=True, cells=200, sequences=4, window=64))
    gone = submit(scheduler, [1], most=1)
    first = scheduler.plan(0.0)
    scheduler.observe(gone, 1, 5, end=False, now=0.0)
    scheduler.apply(done(first, {gone: 1}), 0.0)
    waiting = [submit(scheduler, [1] * 10, most=5) for _ in range(4)]
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert len(plan.admit) == 4
    assert plan.retire == (gone,)
    cancelled = waiting.pop(1)
    scheduler.finish(cancelled, FinishReason.ABORT)
    assert scheduler.apply(done(plan, outcome="replan"), 0.0) == []
    assert [record.id for record in scheduler.queued()] == waiting
    assert all(record.queued == 0.0 for record in scheduler.queued()), "their wait goes on"
    again = scheduler.plan(0.0)
    assert again is not None
    assert [seat.request for seat in again.admit] == waiting[:2]
    assert again.retire == (gone,), "nothing ran, so it is still to be retired; the cancelled one was never seated"
    assert scheduler.statistics().replans == 1


def test_a_request_the_empty_engine_refuses_ends_with_its_words() -> None:
    scheduler = Scheduler(SHARED)
    request = submit(scheduler, [1] * 10)
    plan = scheduler.plan(0.0)
    assert plan is not None
    report = TickReport(plan.tick, "replan", reason="no room")
    [effect] = scheduler.apply(report, 0.0)
    assert effect == Finished(request, FinishReason.ERROR, "the engine cannot hold this request: no room")
    assert scheduler.plan(0.0) is None


def test_a_refused_plan_that_admitted_nobody_is_the_engines_fault(scheduler: Scheduler) -> None:
    request = submit(scheduler, [1], most=50)
    start(scheduler, request)
    plan = scheduler.plan(0.0)
    with pytest.raises(OutOfOrder, match="admitted nobody"):
        scheduler.apply(done(plan, outcome="replan"), 0.0)


# -- death --------------------------------------------------------------------------------------------------------


def test_a_lost_engine_sends_lanes_to_their_queue_heads_with_their_tokens(scheduler: Scheduler) -> None:
    a, b = submit(scheduler, [1, 2], most=50), submit(scheduler, [3, 4], most=50)
    start(scheduler, a, b)
    newcomer = submit(scheduler, [5])
    scheduler.plan(1.0)
    scheduler.observe(a, 3, 501, end=False, now=1.0)
    effects = scheduler.engine_lost(2.0)
    assert [effect.request for effect in effects if isinstance(effect, Paused)] == [a, b]
    assert [record.id for record in scheduler.queued()] == [a, b, newcomer]
    plan = scheduler.plan(3.0)
    assert plan is not None
    assert (plan.retire, plan.freed) == ((), ())
    assert [(seat.request, seat.tokens, seat.prompt) for seat in plan.admit] == [
        (a, (1, 2, 500, 501), 2),
        (b, (3, 4, 500), 2),
    ]
    assert plan.prefill == (Prefill(b, 3), Prefill(a, 4))
    record = scheduler.request(a)
    assert record is not None
    assert (record.pauses, record.queued, record.remaining_new) == (1, 2.0, 48)
    scheduler.check_integrity()


def test_finish_all_ends_everything_oldest_first(scheduler: Scheduler) -> None:
    requests = [submit(scheduler, [1]) for _ in range(4)]
    scheduler.plan(0.0)
    effects = scheduler.finish_all(FinishReason.ERROR, "gone")
    assert effects == [Finished(request, FinishReason.ERROR, "gone") for request in requests]
    assert scheduler.idle


def test_the_books_notice_tampering(scheduler: Scheduler) -> None:
    request = submit(scheduler, [1], most=50)
    scheduler.check_integrity()
    start(scheduler, request)
    scheduler._pool.release(0)
    with pytest.raises(OutOfOrder, match="promised"):
        scheduler.check_integrity()
    scheduler = Scheduler(PER_SEQUENCE)
    submit(scheduler, [1])
    scheduler._pool._kept[3] = 7
    with pytest.raises(OutOfOrder, match="7 cells kept, 0 of them by somebody"):
        scheduler.check_integrity()
    scheduler = Scheduler(PER_SEQUENCE)
    submit(scheduler, [1])
    scheduler._requests.clear()
    with pytest.raises(OutOfOrder, match="waiting"):
        scheduler.check_integrity()
    scheduler = Scheduler(PER_SEQUENCE)
    scheduler._cells_used = 5
    with pytest.raises(OutOfOrder, match="holds 5"):
        scheduler.check_integrity()

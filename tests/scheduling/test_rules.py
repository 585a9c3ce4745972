"""The specification, sentence by sentence, on the pure scheduler: aging, caps, preemption, batch-invariant lanes,
budgets. Each test quotes nothing and checks one rule."""

from __future__ import annotations

import msgspec
import pytest

from superfluidd.errors import InvalidValue
from superfluidd.scheduling import budget
from superfluidd.scheduling.books import Limits
from superfluidd.scheduling.plan import Decode, Finished, Plan, Prefill, TickReport, Timing, Urgency
from superfluidd.scheduling.policy import Policy
from superfluidd.scheduling.pressure import Rung
from superfluidd.scheduling.qos import format_caps, may_preempt, parse_caps
from superfluidd.scheduling.queues import effective_class
from superfluidd.scheduling.request import Request
from superfluidd.scheduling.scheduler import Scheduler
from superfluidd.types import FinishReason, QosClass, SamplingParams
from tests.scheduling.world import TWO, World, kinds

CHAT, COMPLETION, AGENT, BACKGROUND = QosClass


# -- lanes and admission ------------------------------------------------------------------------------------------


def test_a_job_rises_one_class_for_each_period_waited() -> None:
    record = Request(1, BACKGROUND, [1], 1, 1, SamplingParams(), 0.0, queued_tick=100)
    at = [effective_class(record, tick, 8) for tick in (100, 107, 108, 115, 116, 124, 999)]
    assert at == [3, 3, 2, 2, 1, 0, 0]


def test_the_next_job_is_the_head_of_the_best_class_and_aging_changes_which_that_is() -> None:
    limits = msgspec.structs.replace(TWO, lanes=1)
    world = World(limits, Policy(starvation_ticks=4))
    running = world.ask(CHAT, most=400)
    world.tick()
    old = world.ask(BACKGROUND)
    for _ in range(4):
        world.tick(steps=1)
    young = world.ask(AGENT)
    assert [head.id for head in world.scheduler._queues.heads(9, 4)] == [old, young], "risen to agent, and waits longer"
    world.scheduler.finish(running, FinishReason.ABORT)
    world.tick()
    assert world.seated == [old]
    assert world.record(old).risen
    assert world.scheduler.statistics().starvation_grants[BACKGROUND] == 1
    assert "starved-up" in kinds(world, old)
    assert kinds(world, young)[-1] == "overtaken" or "overtaken" not in kinds(world, young)


def test_the_lowest_class_waits_a_bounded_time_under_constant_interactive_load() -> None:
    """Every tick another chat comes, more than there is room for; the background job is served all the same."""
    world = World(Limits(lanes=2, shared=False, cells=8192, sequences=3, window=2048), Policy(starvation_ticks=4))
    background = world.ask(BACKGROUND, most=40)
    waited = 0
    while world.scheduler.request(background) is not None and waited < 400:
        world.ask(CHAT, most=5)
        world.ask(CHAT, most=5)
        world.tick()
        waited += 1
        if world.record(background).first_token if world.scheduler.request(background) else True:
            break
    # Three classes to rise at 4 ticks each, then those that were there before it.
    assert waited <= 3 * 4 + 30
    seated = world.scheduler.statistics().starvation_grants[BACKGROUND]
    assert seated >= 1
    assert world.scheduler.statistics().preemptions[BACKGROUND] == 0, "who has risen keeps its lane for a period"


def test_a_class_holds_no_more_lanes_than_its_cap_and_the_next_class_gets_them() -> None:
    world = World(msgspec.structs.replace(TWO, lanes=3, sequences=5))
    world.scheduler.set_caps({AGENT: 1})
    agents = [world.ask(AGENT) for _ in range(3)]
    background = world.ask(BACKGROUND)
    world.tick()
    assert world.seated == [agents[0], background]
    assert "capped" in kinds(world, agents[1])
    world.scheduler.set_caps({AGENT: None})
    world.tick()
    assert world.seated == [agents[0], background, agents[1]]


def test_a_cap_lowered_below_use_takes_no_lane_away() -> None:
    world = World()
    agents = [world.ask(AGENT, most=30) for _ in range(3)]
    world.tick()
    assert world.seated == agents[:2]
    world.scheduler.set_caps({AGENT: 1})
    world.tick()
    assert world.seated == agents[:2]
    world.scheduler.finish(agents[0], FinishReason.STOP)
    world.tick()
    assert world.seated == [agents[1]], "one is what the cap allows"
    world.scheduler.finish(agents[1], FinishReason.STOP)
    world.tick()
    assert world.seated == [agents[2]]


def test_caps_are_checked_before_any_is_set() -> None:
    scheduler = Scheduler(TWO, caps={BACKGROUND: 1})
    with pytest.raises(ValueError, match="1 to 2"):
        scheduler.set_caps({AGENT: 1, CHAT: 3})
    assert scheduler.statistics().caps == {BACKGROUND: 1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["background"], "not CLASS=LANES"),
        (["background=0"], "from 1 to 8"),
        (["background=9"], "from 1 to 8"),
        (["background=x"], "from 1 to 8"),
        (["background=-1"], "from 1 to 8"),
        (["background="], "from 1 to 8"),
        (["agent=1", "foreground=2"], "agent is capped twice"),
        (["urgent=1"], "legal: interactive, completion, agent, background"),
        ([""], "not CLASS=LANES"),
    ],
)
def test_wrong_caps_are_refused_with_what_is_legal(words: list[str], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        parse_caps(words, 8, "class-lanes")


def test_caps_are_read_in_any_spelling() -> None:
    caps = parse_caps([" Background_Agent =2", "agent=6", "0=off"], 8)
    assert caps == {BACKGROUND: 2, AGENT: 6, CHAT: None}
    assert format_caps({BACKGROUND: 2, AGENT: 6}) == "agent=6,background=2"


def test_a_paused_class_gets_no_lane_until_it_is_resumed() -> None:
    world = World()
    running = world.ask(AGENT)
    world.tick()
    world.scheduler.set_paused(AGENT, True)
    waiting, chat = world.ask(AGENT), world.ask(CHAT)
    world.tick()
    assert world.seated == [running, chat]
    assert "class-paused" in kinds(world, waiting)
    world.scheduler.finish(chat, FinishReason.STOP)
    world.tick()
    assert world.seated == [running]
    world.scheduler.set_paused(AGENT, False)
    world.tick()
    assert world.seated == [running, waiting]


# -- preemption ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newcomer", list(QosClass))
@pytest.mark.parametrize("running", list(QosClass))
@pytest.mark.parametrize("agents", [False, True])
def test_who_may_preempt_whom(newcomer: QosClass, running: QosClass, agents: bool) -> None:
    legal = {(CHAT, COMPLETION), (CHAT, AGENT), (CHAT, BACKGROUND), (COMPLETION, AGENT), (COMPLETION, BACKGROUND)}
    if agents:
        legal.add((AGENT, BACKGROUND))
    assert may_preempt(newcomer, running, agents=agents) == ((newcomer, running) in legal)


@pytest.mark.parametrize("qos", [CHAT, COMPLETION])
def test_a_full_house_gives_up_its_lowest_class_lane_in_the_very_next_plan(qos: QosClass) -> None:
    world = World()
    agent, background = world.ask(AGENT), world.ask(BACKGROUND)
    world.tick()
    before = list(world.record(background).tokens)
    chat = world.ask(qos, most=3)
    plan = world.plan()
    assert world.paused == [background]
    assert plan.retire == (background,)
    assert plan.freed == (), "its KV is kept: there is a sequence to spare"
    assert [(seat.request, seat.cached) for seat in plan.admit] == [(chat, 0)]
    assert world.seated == [agent, chat]
    world.run(plan)
    stats = world.scheduler.statistics()
    assert (stats.preemptions[BACKGROUND], stats.cells_kept) == (1, len(before) - 1)
    while world.scheduler.request(chat):
        world.tick()
    resumed = world.tick()
    again = [seat for seat in resumed.admit if seat.request == background] or [
        seat for seat in world.plan().admit if seat.request == background
    ]
    assert not again or again[0].cached == len(before) - 1


def test_a_preempted_lane_goes_on_with_its_kv_before_newcomers_of_its_class() -> None:
    world = World()
    agent, background = world.ask(AGENT), world.ask(BACKGROUND)
    world.tick()
    newcomer = world.ask(BACKGROUND)
    chat = world.ask(CHAT, most=2)
    world.tick()
    held = world.kept(background)
    assert held == len(world.record(background).tokens) - 1 > 0
    world.scheduler.finish(chat, FinishReason.STOP)
    plan = world.tick()
    [seat] = plan.admit
    assert (seat.request, seat.cached, len(seat.tokens)) == (background, held, held + 1)
    assert Prefill(background, 1) in plan.prefill
    assert world.record(newcomer).lane is None
    assert world.seated == [agent, background]
    assert kinds(world, background)[-3:] == ["first-token", "preempted", "resumed"]


def test_a_prefilling_victim_keeps_the_prefill_it_has_done() -> None:
    world = World()
    first, second = world.ask(AGENT, tokens=2000), world.ask(AGENT, tokens=3000)
    world.tick()
    fed = world.record(first).fed
    assert (fed, world.record(second).fed) == (512, 0), "the shortest prompt first"
    chats = [world.ask(CHAT, most=2), world.ask(CHAT, most=2)]
    plan = world.plan()
    assert world.paused == [second, first], "the youngest goes first"
    world.run(plan)
    for chat in chats:
        world.scheduler.finish(chat, FinishReason.STOP)
    plan = world.tick()
    assert [(seat.request, seat.cached) for seat in plan.admit] == [(first, 512), (second, 0)]
    assert plan.prefill[0].request == first


def test_a_decoding_lane_is_chosen_before_a_prefilling_one_and_a_worse_class_before_both() -> None:
    world = World(msgspec.structs.replace(TWO, lanes=3, sequences=4))
    long = world.ask(BACKGROUND, tokens=3000)
    decoding = world.ask(BACKGROUND)
    agent = world.ask(AGENT)
    world.tick()
    assert world.record(decoding).decoding
    assert not world.record(long).decoding
    world.ask(CHAT)
    world.tick()
    assert world.paused == [decoding]
    world.ask(CHAT)
    world.tick()
    assert world.paused == [long], "a prefilling background lane before an agent's that decodes"
    world.ask(COMPLETION)
    world.tick()
    assert world.paused == [agent]


def test_batch_invariant_and_media_lanes_are_never_chosen() -> None:
    world = World()
    media, alone = world.ask(BACKGROUND, media=True), world.ask(BACKGROUND, alone=True)
    for _ in range(3):
        world.tick()
    assert sorted(world.seated) == [media, alone]
    chat = world.ask(CHAT)
    world.tick()
    assert world.paused == []
    assert world.record(chat).lane is None


def test_a_lane_preempted_three_times_is_passed_over_while_there_is_another_victim() -> None:
    world = World()
    tired, other = world.ask(BACKGROUND), world.ask(AGENT)
    world.tick()
    for _ in range(3):
        chat = world.ask(CHAT, most=50)
        world.tick()
        assert world.paused == [tired]
        world.scheduler.finish(chat, FinishReason.STOP)
        world.tick()
    assert world.record(tired).pauses == 3
    chat = world.ask(CHAT, most=50)
    world.tick()
    assert world.paused == [other], "the agent, though background is the lower class"
    world.ask(CHAT, most=50)
    world.tick()
    assert world.paused == [tired], "nobody else is left"


def test_an_agent_preempts_background_only_where_that_is_set() -> None:
    for allowed in (False, True):
        world = World(policy=Policy(agent_preempts_background=allowed))
        background = [world.ask(BACKGROUND), world.ask(BACKGROUND)]
        world.tick()
        world.ask(AGENT)
        world.tick()
        assert world.paused == ([background[1]] if allowed else [])


def test_nobody_is_preempted_while_a_lane_is_free_or_where_it_would_not_help() -> None:
    world = World()
    world.ask(BACKGROUND)
    world.tick()
    chat = world.ask(CHAT)
    world.tick()
    assert world.paused == []
    assert world.record(chat).lane == 1
    pool = World(Limits(lanes=4, shared=True, cells=100, sequences=6, window=100))
    pool.ask(CHAT, tokens=30, most=31)
    pool.ask(BACKGROUND, tokens=10, most=11)
    pool.tick()
    pool.ask(CHAT, tokens=30, most=31)
    pool.tick()
    assert pool.paused == [], "20 cells more would not do for 60"


def test_a_short_pool_gives_up_just_what_the_newcomer_needs() -> None:
    pool = World(Limits(lanes=4, shared=True, cells=100, sequences=6, window=100))
    small, big = pool.ask(BACKGROUND, tokens=5, most=16), pool.ask(BACKGROUND, tokens=20, most=41)
    newest = pool.ask(BACKGROUND, tokens=5, most=6)
    pool.tick(steps=1)
    chat = pool.ask(CHAT, tokens=30, most=31)
    plan = pool.plan()
    assert pool.paused == [big], "60 of 100 cells were wanted: the big one alone is enough"
    assert {small, newest, chat} == set(pool.seated)
    pool.run(plan)
    pool.scheduler.check_integrity()


def test_critical_memory_preempts_every_decoding_background_lane_and_seats_none() -> None:
    world = World(msgspec.structs.replace(TWO, lanes=4, sequences=6))
    decoding = [world.ask(BACKGROUND), world.ask(BACKGROUND)]
    agent, long = world.ask(AGENT), world.ask(BACKGROUND, tokens=4000)
    world.tick()
    world.plan()
    world.scheduler.set_pressure(Rung.CRITICAL)
    assert world.scheduler.urgency is Urgency.STOP
    plan = world.scheduler._in_flight
    assert plan is not None
    world.run(plan, steps=1)
    world.tick()
    assert world.paused == decoding[::-1]
    assert world.seated == [agent, long]
    world.tick()
    assert set(world.seated) == {agent, long}
    world.scheduler.set_pressure(Rung.NORMAL)
    world.tick()
    assert set(world.seated) == {agent, long, *decoding}


def test_the_kv_of_preempted_lanes_goes_when_the_room_is_needed_worst_first() -> None:
    limits = Limits(lanes=2, shared=False, cells=3 * 64, sequences=3, window=64)
    world = World(limits)
    background, agent = world.ask(BACKGROUND, most=40), world.ask(AGENT, most=40)
    world.tick()
    world.ask(CHAT, most=40)
    world.tick()
    assert world.kept(background)
    world.ask(CHAT, most=40)
    plan = world.tick()
    assert world.paused == [agent]
    assert len(plan.freed) == 1
    assert not world.kept(background)
    assert world.kept(agent)


def test_a_caller_may_hand_ids_out_and_the_scheduler_counts_on_from_them() -> None:
    scheduler = Scheduler(TWO)
    given = scheduler.submit([1], sampling=SamplingParams(), max_tokens=1, qos=AGENT, now=0.0, request=7)
    own = scheduler.submit([1], sampling=SamplingParams(), max_tokens=1, qos=AGENT, now=0.0)
    assert (given.id, own.id) == (7, 8)


def test_a_lost_engine_takes_the_kv_of_preempted_lanes_with_it() -> None:
    world = World()
    world.ask(BACKGROUND)
    world.ask(BACKGROUND)
    world.tick()
    world.ask(CHAT)
    world.plan()
    victim = world.paused[0]
    assert world.kept(victim), "kept while there is room"
    world.scheduler.engine_lost(world.now)
    assert world.scheduler.statistics().cells_kept == 0
    assert not world.kept(victim)
    again = world.plan()
    assert (again.retire, again.kv) == ((), ()), "an engine that starts anew has nothing to empty"
    assert [seat.cached for seat in again.admit] == [0, 0]
    world.scheduler.check_integrity()


def test_a_preempted_request_that_is_cancelled_gives_its_kv_back() -> None:
    world = World()
    background = world.ask(BACKGROUND)
    world.ask(AGENT)
    world.tick()
    world.ask(CHAT)
    world.tick()
    [entry] = world.scheduler.kept()
    world.scheduler.finish(background, FinishReason.ABORT)
    assert world.tick().freed == (entry.sequence,)
    assert world.scheduler.statistics().cells_kept == 0


# -- mid-tick -----------------------------------------------------------------------------------------------------


def test_an_urgent_arrival_that_can_be_seated_gives_the_step_up_once() -> None:
    world = World()
    world.ask(AGENT, tokens=3000)
    plan = world.plan()
    chat = world.ask(CHAT, most=2)
    assert world.scheduler.urgency is Urgency.ABANDON
    world.engine.give_up = True
    world.run(plan)
    world.engine.give_up = False
    assert world.scheduler.statistics().abandoned_tokens == 512
    while world.scheduler.request(chat):
        world.tick()
    plan = world.plan()
    chat = world.ask(CHAT, most=2)
    assert world.scheduler.urgency is Urgency.STOP, "it has not got on since it was given up"
    world.run(plan)
    while world.scheduler.request(chat):
        world.tick()
    world.plan()
    world.ask(CHAT)
    assert world.scheduler.urgency is Urgency.ABANDON, "now it has"


def test_an_urgent_arrival_that_cannot_be_seated_only_stops() -> None:
    world = World()
    world.ask(CHAT)
    world.ask(CHAT, tokens=3000)
    world.plan()
    world.ask(CHAT)
    assert world.scheduler.urgency is Urgency.STOP
    other = World()
    other.scheduler.set_paused(CHAT, True)
    other.ask(AGENT, tokens=3000)
    other.plan()
    other.ask(CHAT)
    assert other.scheduler.urgency is Urgency.STOP


def test_a_cancelled_lane_gives_its_own_step_up_and_only_ends_others() -> None:
    world = World()
    long, other = world.ask(AGENT, tokens=3000), world.ask(AGENT, most=60)
    world.tick()
    world.plan()
    world.scheduler.finish(other, FinishReason.ABORT)
    assert world.scheduler.urgency is Urgency.STOP
    world.scheduler.finish(long, FinishReason.ABORT)
    assert world.scheduler.urgency is Urgency.ABANDON


def test_a_step_is_only_given_up_if_it_is_long_enough() -> None:
    chunk = (Prefill(1, 3000),)
    fast, slow = budget.Rates(prefills=(5121.0,)), budget.Rates(prefills=(5119.0,))
    assert not budget.worth_abandoning(fast, chunk, 512)
    assert budget.worth_abandoning(slow, chunk, 512)
    assert not budget.worth_abandoning(slow, (Prefill(1, 500),), 512)
    assert budget.worth_abandoning(budget.Rates(), chunk, 512), "nobody knows yet"
    assert not budget.worth_abandoning(budget.Rates(), (), 512), "there is no such step"
    world = World()
    world.ask(AGENT, tokens=3000)
    world.run(world.plan(), timing=Timing(0, 0, 0.0, 1000, 0.1))
    world.plan()
    world.ask(CHAT)
    assert world.scheduler.urgency is Urgency.STOP, "at 10,000 tokens/s a step is over in 51 ms"


def test_a_step_given_up_for_a_request_that_is_gone_is_nobodys_loss() -> None:
    world = World()
    agent = world.ask(AGENT, tokens=3000)
    plan = world.plan()
    world.scheduler.finish(agent, FinishReason.ABORT)
    world.engine.give_up = True
    assert world.run(plan).abandoned == ((agent, 512),)
    assert world.scheduler.statistics().abandoned_tokens == 512
    assert world.scheduler.request(agent) is None
    world.scheduler.check_integrity()


def test_a_decode_only_tick_is_stopped_not_abandoned() -> None:
    world = World()
    world.ask(AGENT)
    world.tick()
    world.plan()
    world.ask(CHAT)
    assert world.scheduler.urgency is Urgency.STOP


# -- re-classing --------------------------------------------------------------------------------------------------


def test_re_classing_moves_a_waiting_request_and_counts_as_an_arrival() -> None:
    world = World()
    world.ask(AGENT)
    running = world.ask(BACKGROUND)
    world.tick()
    waiting, other = world.ask(BACKGROUND), world.ask(AGENT)
    plan = world.plan()
    assert world.scheduler.set_qos(waiting, CHAT, world.now)
    assert world.scheduler.urgency is Urgency.STOP
    world.run(plan, steps=1)
    world.tick()
    assert world.paused == [running]
    assert waiting in world.seated
    assert world.record(other).lane is None
    assert "reclassed" in kinds(world, waiting)
    assert not world.scheduler.set_qos(999, CHAT, 0.0)


def test_re_classing_a_running_request_keeps_its_lane_and_changes_who_may_take_it() -> None:
    world = World()
    first, second = world.ask(AGENT), world.ask(AGENT)
    world.tick()
    assert world.scheduler.set_qos(first, BACKGROUND, world.now)
    assert world.scheduler.set_qos(first, BACKGROUND, world.now)
    assert world.seated == [first, second]
    world.ask(CHAT)
    world.tick()
    assert world.paused == [first]


# -- batch-invariant ----------------------------------------------------------------------------------------------


def test_a_batch_invariant_lane_never_shares_a_tick_and_takes_turns() -> None:
    world = World(msgspec.structs.replace(TWO, lanes=4, sequences=6))
    together = [world.ask(AGENT), world.ask(AGENT)]
    world.tick()
    alone = [world.ask(AGENT, alone=True), world.ask(AGENT, alone=True)]
    ticked: list[tuple[list[int], bool]] = []
    for _ in range(6):
        plan = world.tick()
        named = sorted({chunk.request for chunk in plan.prefill} | {grant.request for grant in plan.decode})
        ticked.append((named, plan.exact))
    assert ticked == [([alone[0]], True), (together, False), ([alone[1]], True), (together, False)] * 1 + ticked[4:]
    assert ticked[4:] == ticked[:2]


def test_one_whose_engine_was_lost_is_served_before_others_of_its_class() -> None:
    world = World()
    first = world.ask(AGENT, alone=True)
    world.tick()
    second = world.ask(AGENT, alone=True)
    world.scheduler.engine_lost(world.now)
    assert world.scheduler.position(first) == 1
    assert [seat.request for seat in world.plan().admit] == [first, second]


def test_its_prompt_is_always_cut_at_the_same_places() -> None:
    cuts: list[list[int]] = []
    for traffic in (False, True):
        world = World(policy=Policy(prefill_budget=200))
        if traffic:
            world.ask(AGENT, tokens=1000)
            world.tick()
        alone = world.ask(AGENT, tokens=700, alone=True)
        seen: list[int] = []
        while not world.record(alone).decoding:
            plan = world.tick()
            if plan.exact:
                assert plan.step_tokens == budget.EXACT_STEP == 64
                seen += [chunk.tokens for chunk in plan.prefill]
        cuts.append(seen)
    assert cuts[0] == cuts[1] == [192, 192, 192, 124], "whole steps of 64 within the budget"


def test_while_one_waits_nothing_at_or_below_its_class_is_admitted() -> None:
    world = World()
    running = [world.ask(AGENT), world.ask(CHAT)]
    world.tick()
    agent, background = world.ask(AGENT), world.ask(BACKGROUND)
    alone = world.ask(AGENT, alone=True)
    world.scheduler.finish(running[0], FinishReason.STOP)
    world.tick()
    assert alone in world.seated, "it is next in its class as long as it waits"
    assert world.record(agent).lane is world.record(background).lane is None
    assert "overtaken" in kinds(world, agent)
    assert "held-back" in kinds(world, background)
    world.scheduler.finish(running[1], FinishReason.STOP)
    world.tick()
    assert agent in world.seated, "it does not wait any more"


def test_who_is_held_back_ends_the_tick_but_gives_no_step_up() -> None:
    world = World(msgspec.structs.replace(TWO, lanes=1))
    world.ask(CHAT, tokens=3000)
    world.plan()
    alone = world.ask(CHAT, alone=True)
    completion = world.ask(COMPLETION)
    assert world.scheduler.urgency is Urgency.STOP
    assert world.scheduler.why_waiting(world.record(completion)) == "its turn"
    assert kinds(world, completion) == ["queued"], "asking is not deciding"
    assert world.record(alone).lane is None


def test_a_better_class_is_admitted_while_one_waits_and_is_not_kept_waiting_by_one_that_runs() -> None:
    world = World()
    world.ask(CHAT)
    world.ask(CHAT, most=2)
    world.tick()
    alone = world.ask(AGENT, alone=True)
    chat = world.ask(CHAT, tokens=900)
    while world.record(chat).lane is None:
        world.tick()
    assert world.record(alone).lane is None
    other = World()
    other.ask(AGENT, tokens=600, alone=True)
    assert other.tick().exact
    newcomer = other.ask(CHAT)
    plan = other.tick()
    assert not plan.exact
    assert [chunk.request for chunk in plan.prefill] == [newcomer]


def test_in_a_shared_pool_it_has_the_engine_to_itself() -> None:
    pool = World(Limits(lanes=3, shared=True, cells=300, sequences=5, window=100))
    running = pool.ask(AGENT, most=5)
    pool.tick()
    alone, later = pool.ask(AGENT, alone=True, most=60), pool.ask(CHAT, most=5)
    while pool.scheduler.request(running) or pool.scheduler.request(later):
        pool.tick()
        assert pool.record(alone).lane is None
    pool.tick()
    assert pool.seated == [alone]
    after = pool.ask(CHAT)
    pool.tick()
    assert pool.seated in ([alone], [])
    while pool.scheduler.request(alone):
        pool.tick()
    pool.tick()
    assert pool.seated == [after]


# -- budgets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granular", "open_tick", "milliseconds", "seconds"),
    [
        (False, True, 2000, 0.25),
        (False, False, 2000, 2.0),
        (True, True, 2000, 0.05),
        (True, False, 2000, 0.25),
        (True, False, 100, 0.1),
        (True, True, 20, 0.02),
        (False, True, 100, 0.1),
        (False, False, 5000, 5.0),
    ],
)
def test_tick_targets(granular: bool, open_tick: bool, milliseconds: int, seconds: float) -> None:
    policy = Policy(tick_target=milliseconds / 1000)
    assert budget.tick_target(policy, granular=granular, open_tick=open_tick) == seconds


def test_ticks_are_long_while_every_lane_is_busy_and_short_when_one_is_free_or_finishing() -> None:
    world = World()
    cost = Timing(decode_rounds=10, decode_seconds=0.05)
    first = world.ask(AGENT, most=3000)
    for _ in range(3):
        world.tick(timing=cost)
    assert world.plan().decode == (Decode(first, 10),), "50 ms of rounds of 5 ms: a lane is free"
    world.run(world.scheduler._in_flight or Plan(0))
    second = world.ask(CHAT, most=3000)
    world.tick(timing=cost)
    assert world.plan().decode == (Decode(first, 50), Decode(second, 50)), "250 ms: nobody could be seated"
    world.run(world.scheduler._in_flight or Plan(0))
    world.scheduler.finish(second, FinishReason.STOP)
    third = world.ask(CHAT, most=40)
    world.tick(timing=cost)
    assert {grant.rounds for grant in world.plan().decode} == {10}, f"{third} is about to finish"


def test_rates_are_not_moved_by_an_outlier() -> None:
    rates = budget.Rates()
    for _ in range(5):
        rates = rates.updated(Timing(10, 10, 0.1, 100, 0.5))
    assert (rates.round_seconds, rates.prefill_tokens_per_second) == (0.01, 200.0)
    rates = rates.updated(Timing(1, 1, 9.0, 100, 90.0))
    assert (rates.round_seconds, rates.prefill_tokens_per_second) == (0.01, 200.0)
    for _ in range(4):
        rates = rates.updated(Timing(10, 10, 0.2, 100, 0.25))
    assert (rates.round_seconds, rates.prefill_tokens_per_second) == (0.02, 400.0), "a change by the fourth"


def test_the_rate_of_a_few_tokens_counts_only_until_there_is_a_better_one() -> None:
    rates = budget.Rates().updated(Timing(0, 0, 0.0, 10, 0.1))
    assert rates.prefill_tokens_per_second == 100.0
    rates = rates.updated(Timing(0, 0, 0.0, 64, 0.1))
    assert rates.prefill_tokens_per_second == 640.0
    assert rates.updated(Timing()) == rates
    assert rates.updated(Timing(3, 3, 0.0, 5, 0.0)) == rates, "a tick that took no time says nothing"


@pytest.mark.parametrize(
    ("rate", "tokens"),
    [(None, 512), (100.0, 128), (255.0, 128), (300.0, 128), (520.0, 256), (1023.0, 384), (1024.0, 512), (2100.0, 1024)],
)
def test_prefill_beside_a_possible_newcomer_is_half_a_second_in_whole_chunks(rate: float | None, tokens: int) -> None:
    rates = budget.Rates(prefills=(rate,) if rate else ())
    assert budget.prefill_budget(Policy(), 0, rates, open_tick=True) == tokens


def test_where_the_tick_ends_for_a_newcomer_and_nobody_hurries_it_is_two_seconds() -> None:
    rates = budget.Rates(prefills=(600.0,))
    assert budget.prefill_budget(Policy(), 0, rates, open_tick=True, yielding=True) == 1024
    world = World(msgspec.structs.replace(TWO, lanes=4, cells=6 * 4096, sequences=6))
    world.ask(AGENT, tokens=4000)
    for _ in range(2):
        world.tick(timing=Timing(prefill_tokens=512, prefill_seconds=0.8))
    assert world.scheduler.statistics().prefill_budget == 1024
    world.ask(CHAT, tokens=4000)
    world.ask(CHAT)
    world.tick()
    assert world.scheduler.statistics().prefill_budget == 256, "half a second at 640 tokens a second"
    native = World(msgspec.structs.replace(TWO, granular=False))
    native.ask(AGENT, tokens=4000)
    for _ in range(2):
        native.tick(timing=Timing(prefill_tokens=512, prefill_seconds=0.8))
    assert native.scheduler.statistics().prefill_budget == 256


@pytest.mark.parametrize(
    ("policy", "rate", "tokens"),
    [
        (Policy(), None, 4096),
        (Policy(), 1000.0, 4096),
        (Policy(), 100.0, 800),
        (Policy(), 10.0, 512),
        (Policy(prefill_budget=64), 1000.0, 64),
        (Policy(prefill_budget=0), 1000.0, 777),
    ],
)
def test_prefill_is_otherwise_eight_seconds_of_work_within_the_budget(
    policy: Policy, rate: float | None, tokens: int
) -> None:
    rates = budget.Rates(prefills=(rate,) if rate else ())
    assert budget.prefill_budget(policy, 777, rates, open_tick=False) == tokens


@pytest.mark.parametrize(
    ("present", "rate", "prefilling", "decoding", "tokens"),
    [
        (1024, None, 3, 1, 1024),
        (1024, 2000.0, 0, 4, 1024),
        (1024, 8000.0, 4, 0, 2000),
        (1024, 8000.0, 3, 1, 1500),
        (1024, 1e6, 1, 0, 2048),
        (1024, 100.0, 1, 0, 512),
        (300, 100.0, 1, 0, 256),
        (4000, 1e6, 1, 0, 4096),
    ],
)
def test_the_adaptive_budget_heads_for_the_tick_target(
    present: int, rate: float | None, prefilling: int, decoding: int, tokens: int
) -> None:
    rates = budget.Rates(prefills=(rate,) if rate else ())
    assert budget.adapt(present, rates, 0.25, prefilling=prefilling, decoding=decoding) == tokens


def test_the_adaptive_budget_is_used_where_it_is_asked_for() -> None:
    world = World(policy=Policy(prefill_budget=0))
    world.ask(CHAT, tokens=4000)
    world.ask(CHAT, tokens=4000)
    world.tick(timing=Timing(prefill_tokens=512, prefill_seconds=0.128))
    world.tick(timing=Timing(prefill_tokens=512, prefill_seconds=0.128))
    assert world.scheduler.statistics().prefill_budget == 1000, "4,000 tokens a second for a quarter of one"


@pytest.mark.parametrize(
    ("latency", "rate", "most", "tokens"),
    [
        (False, 100.0, 512, 512),
        (True, None, 512, 128),
        (True, 700.0, 512, 128),
        (True, 1000.0, 512, 192),
        (True, 100.0, 512, 64),
        (True, 9000.0, 512, 512),
        (True, 100.0, 32, 32),
    ],
)
def test_a_step_takes_a_fifth_of_a_second_where_somebody_would_notice(
    latency: bool, rate: float | None, most: int, tokens: int
) -> None:
    rates = budget.Rates(prefills=(rate,) if rate else ())
    assert budget.step_tokens(rates, latency=latency, max_step=most) == tokens


def test_short_steps_outlast_the_latest_chat_by_five_minutes_where_steps_cannot_be_given_up() -> None:
    world = World(msgspec.structs.replace(TWO, abandons=False))
    world.ask(CHAT, most=1)
    world.tick()
    world.ask(AGENT, tokens=3900)
    world.now = 298.5
    assert world.tick().step_tokens == 128
    world.now = 300.0
    assert world.tick().step_tokens == 512


def test_where_they_can_they_are_short_only_while_chats_come_often() -> None:
    world = World()
    world.ask(CHAT, most=1)
    world.ask(AGENT, tokens=3900)
    assert world.tick().prefill[0].tokens == 4, "the chat's own"
    assert world.tick().step_tokens == 512, "one chat is not often"
    world.now = 3.0
    world.ask(CHAT, most=1)
    world.tick()
    assert world.tick().step_tokens == 128, "two within three and a half seconds are"
    world.now = 6.5
    assert world.tick().step_tokens == 512, "the latest is three and a half seconds ago"


def test_long_steps_beside_background_work_and_short_ones_beside_streams_that_may_be_read() -> None:
    for qos in QosClass:
        world = World()
        decoding = world.ask(qos)
        world.now += 1000.0
        world.tick()
        long = world.ask(BACKGROUND, tokens=3000)
        world.now += 1000.0
        plan = world.plan()
        assert plan.step_tokens == (512 if qos is BACKGROUND else 128)
        rounds = {grant.request: grant.rounds for grant in plan.decode}
        fed = sum(chunk.tokens for chunk in plan.prefill)
        if qos is BACKGROUND:
            assert rounds[decoding] == -(-fed // plan.step_tokens), f"one between the steps of {long}"
        else:
            assert rounds[decoding] >= -(-fed // plan.step_tokens)


def test_prefill_goes_by_class_then_shortest_then_age() -> None:
    world = World(msgspec.structs.replace(TWO, lanes=5, sequences=5))
    long, short = world.ask(AGENT, tokens=300), world.ask(AGENT, tokens=40)
    same = world.ask(AGENT, tokens=40)
    background, completion = world.ask(BACKGROUND, tokens=5), world.ask(COMPLETION, tokens=900)
    quick = Timing(prefill_tokens=512, prefill_seconds=0.1)
    assert [chunk.request for chunk in world.tick(timing=quick).prefill] == [completion], "512 tokens; it is first"
    assert [chunk.request for chunk in world.tick(timing=quick).prefill] == [completion], "nothing beside its end"
    rest = world.plan()
    assert [chunk.request for chunk in rest.prefill] == [short, same, long, background]


def test_what_is_of_the_same_class_is_fed_beside_a_chat_that_finishes() -> None:
    world = World(msgspec.structs.replace(TWO, lanes=4, sequences=4))
    world.ask(AGENT, tokens=10)
    chats = [world.ask(CHAT, tokens=100), world.ask(CHAT, tokens=900)]
    world.ask(COMPLETION, tokens=10)
    assert [chunk.request for chunk in world.plan().prefill] == chats


def test_a_starving_prompt_goes_first_and_never_beside_a_chat_that_finishes() -> None:
    world = World(msgspec.structs.replace(TWO, lanes=3, sequences=4), Policy(starvation_ticks=3))
    long = world.ask(AGENT, tokens=2000)
    fed: list[list[int]] = []
    for _ in range(5):
        chat = world.ask(CHAT, tokens=30, most=1)
        plan = world.tick()
        fed.append([chunk.request for chunk in plan.prefill])
        if chat in fed[-1]:
            assert long not in fed[-1]
    assert [long in tick for tick in fed] == [False, False, False, True, False]
    assert all(world.record(long).starved < 3 for _ in fed)


def test_a_lane_starves_only_while_younger_ones_are_fed() -> None:
    world = World()
    first, second = world.ask(AGENT, tokens=1500), world.ask(AGENT, tokens=1500)
    for _ in range(2):
        world.tick(timing=Timing(prefill_tokens=512, prefill_seconds=4.0))
    assert (world.record(first).fed, world.record(second).fed) == (768, 0)
    assert world.record(second).starved == 0, "equal prompts are finished one after the other"


def test_the_decode_budget_is_shared_starving_first_then_class_then_age() -> None:
    world = World(msgspec.structs.replace(TWO, lanes=4, sequences=4), Policy(decode_budget=2, starvation_ticks=3))
    background, agent = world.ask(BACKGROUND), world.ask(AGENT)
    chat, other = world.ask(CHAT), world.ask(AGENT)
    for _ in range(4):
        world.tick(steps=4)
    assert all(world.record(request).decoding for request in (background, agent, chat, other))
    served: list[list[int]] = []
    for _ in range(5):
        plan = world.tick()
        assert sum(grant.rounds for grant in plan.decode) <= 2
        assert world.scheduler.statistics().decode_grant <= 2
        served.append([grant.request for grant in plan.decode])
    assert any(background in tick for tick in served)
    assert any(other in tick for tick in served)
    assert sum(chat in tick for tick in served) >= 3


def test_a_big_decode_budget_is_spread_evenly() -> None:
    world = World(policy=Policy(decode_budget=7))
    first, second = world.ask(AGENT), world.ask(AGENT)
    world.tick()
    assert world.plan().decode == (Decode(first, 3), Decode(second, 3))


# -- the record ---------------------------------------------------------------------------------------------------


def test_the_trail_of_an_ended_request_is_kept_for_a_while() -> None:
    world = World()
    request = world.ask(AGENT, most=1)
    world.tick()
    assert kinds(world, request) == ["queued", "admitted", "first-token", "finished"]
    for _ in range(300):
        world.ask(AGENT, most=1)
        world.tick()
    assert world.scheduler.trail(request) is None
    assert world.scheduler.position(request) == 0


def test_a_finished_effect_comes_once() -> None:
    world = World()
    request = world.ask(AGENT)
    world.tick()
    assert world.scheduler.finish(request, FinishReason.ABORT) == [Finished(request, FinishReason.ABORT)]
    assert world.scheduler.finish(request, FinishReason.ABORT) == []


# -- counting -----------------------------------------------------------------------------------------------------


def test_what_ticks_cost_is_added_up() -> None:
    world = World()
    world.ask(AGENT, tokens=6)
    world.ask(AGENT, tokens=5)
    assert world.scheduler.statistics().prefill_tokens == 0
    for _ in range(2):
        world.tick(timing=Timing(decode_rounds=3, decode_seconds=0.5, prefill_tokens=11, prefill_seconds=0.25))
    stats = world.scheduler.statistics()
    assert (stats.prefill_tokens, stats.prefill_seconds) == (11, 0.5)
    assert (stats.decode_rounds, stats.decode_seconds) == (6, 1.0)


def test_what_the_engine_counts_goes_on_over_its_restarts() -> None:
    world = World()
    world.ask(AGENT)
    for count in (10, 15):
        world.scheduler.apply(TickReport(world.plan().tick, "done", computed=count), world.now)
    assert world.scheduler.statistics().computed == 15
    world.scheduler.engine_lost(world.now)
    world.scheduler.apply(TickReport(world.plan().tick, "done", computed=4), world.now)
    assert world.scheduler.statistics().computed == 19


def test_a_lost_engine_counts_one_pause_for_each_lane_and_no_preemption() -> None:
    world = World()
    world.ask(AGENT)
    world.ask(AGENT)
    world.tick()
    world.scheduler.engine_lost(world.now)
    stats = world.scheduler.statistics()
    assert stats.pauses == 2
    assert set(stats.preemptions.values()) == {0}


def test_a_refusal_is_in_the_trail() -> None:
    world = World()
    request = world.ask(AGENT)
    world.ask(AGENT)
    plan = world.plan()
    world.scheduler.apply(TickReport(plan.tick, "replan", reason="it is full"), world.now)
    assert kinds(world, request)[-1] == "refused-by-engine"
    trail = world.scheduler.trail(request)
    assert trail is not None
    assert [*trail][-1].why == "it is full"


def test_a_newcomer_that_fits_to_the_last_cell_takes_no_more_lanes_than_that() -> None:
    limits = Limits(lanes=3, shared=True, cells=100, sequences=3, window=100)
    world = World(limits)
    small, big = world.ask(BACKGROUND, most=17), world.ask(BACKGROUND, most=77)
    world.tick()
    assert [world.record(small).cells, world.record(big).cells] == [20, 80]
    world.ask(CHAT, tokens=10, most=71)
    world.plan()
    assert world.paused == [big], "80 cells are needed and 80 were there"


def test_rates_forget_the_eighth_last_measurement_and_small_ticks_are_slight() -> None:
    rates = budget.Rates()
    for number in range(8):
        rates = rates.updated(Timing(1, 1, float(number + 1), 64, 1.0))
    assert rates.rounds == (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    assert len(rates.prefills) == 7
    assert rates.updated(Timing(0, 0, 0.0, 63, 1.0)).slight == (63.0,)
    assert budget.decode_rounds(budget.Rates(rounds=(1e-6,)), 0.25) == 256
    assert Policy().starvation_ticks == 8

"""What the executor refuses, before anything has happened. What it does is in the contract suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from superfluidd.engine.executor import BadPlan, Executor
from superfluidd.engine.port import Choice, Draw, Feed, OutOfCells, Runtime, StepFailed
from superfluidd.engine.runtimes.simulated import SimulatedRuntime
from superfluidd.engine.threads import FixedThreads
from superfluidd.engine.wire import LoadSpec
from superfluidd.scheduling.plan import Admit, Copy, Cut, Decode, Discard, Export, Import, Plan, Prefill
from superfluidd.types import SamplingParams
from tests.engine.contract import Local, free, seat

SPEC = LoadSpec("simulated", "", lanes=3, window=64, layout="per-sequence", cells=192)
PROMPT = (300, 301, 302, 303)


@pytest.fixture
async def driver() -> Local:
    """Request 1 decodes in sequence 0; request 2 is half way through its prompt in sequence 1."""
    driver = Local(SimulatedRuntime(SPEC))
    await driver.run(
        admit=(seat(1, 0, PROMPT), seat(2, 1, PROMPT)), prefill=(Prefill(1, 4), Prefill(2, 2)), decode=(Decode(1, 1),)
    )
    return driver


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"admit": (seat(1, 2, PROMPT),)}, "admits a request twice"),
        ({"admit": (seat(3, 2, PROMPT), seat(3, 2, PROMPT))}, "admits a request twice"),
        ({"decode": (Decode(9, 1),)}, r"requests \[9\] that have no lane"),
        ({"prefill": (Prefill(9, 1),)}, r"requests \[9\] that have no lane"),
        ({"retire": (1,), "decode": (Decode(1, 1),)}, r"requests \[1\] that have no lane"),
        ({"admit": (seat(3, 0, PROMPT),)}, "uses a sequence twice"),
        ({"admit": (seat(3, 2, PROMPT), seat(4, 2, PROMPT))}, "uses a sequence twice"),
        ({"kv": free(0)}, "uses a sequence twice"),
        ({"kv": (Cut(1, 1),)}, "uses a sequence twice"),
        ({"kv": (Copy(0, 1, 1),)}, "uses a sequence twice"),
        ({"kv": (Import(0, 1, 1),)}, "uses a sequence twice"),
        ({"kv": (Copy(7, 2, 1),)}, r"sequences \[7\] that do not exist"),
        ({"kv": (Export(7, 1),)}, r"sequences \[7\] that do not exist"),
        ({"kv": (Copy(0, 2, 0),)}, "less than one token"),
        ({"admit": (seat(3, 3, PROMPT),)}, r"sequences \[3\] that do not exist"),
        ({"kv": free(-1)}, r"sequences \[-1\] that do not exist"),
        ({"admit": (seat(3, 2, PROMPT, cached=-1),)}, "no token left to feed"),
        ({"retire": (1,), "decode": (), "admit": (seat(3, 0, PROMPT, cached=5),)}, "no token left to feed"),
        ({"admit": (seat(3, 2, ()),)}, "no token left to feed"),
        ({"prefill": (Prefill(2, 3),)}, "feeds 3 tokens of request 2, which has fewer"),
        ({"prefill": (Prefill(2, 1), Prefill(2, 2))}, "feeds 2 tokens of request 2, which has fewer"),
        ({"admit": (seat(3, 2, PROMPT),), "prefill": (Prefill(3, 5),)}, "feeds 5 tokens of request 3, which has fewer"),
        ({"prefill": (Prefill(2, 0),)}, "feeds 0 tokens"),
        ({"prefill": (Prefill(2, -1),)}, "feeds -1 tokens"),
        ({"prefill": (Prefill(2, 1),), "step_tokens": 0}, "feeds 0 tokens a step"),
    ],
)  # fmt: skip
async def test_a_plan_that_cannot_be_changes_nothing(driver: Local, fields: dict[str, Any], words: str) -> None:
    lengths = [driver.runtime.length(sequence) for sequence in range(3)]
    with pytest.raises(BadPlan, match=words):
        # Good parts around the bad one must not be carried out either.
        await driver.run(**{"decode": (Decode(1, 1),)} | fields)
    assert [driver.runtime.length(sequence) for sequence in range(3)] == lengths == [5, 2, 0]
    reference = Local(SimulatedRuntime(SPEC))
    whole = await reference.run(
        admit=(seat(1, 0, PROMPT), seat(2, 1, PROMPT)),
        prefill=(Prefill(1, 4), Prefill(2, 4)),
        decode=(Decode(1, 4), Decode(2, 2)),
    )
    rest = await driver.run(prefill=(Prefill(2, 2),), decode=(Decode(1, 3), Decode(2, 2)))
    assert rest.tokens(1) == whole.tokens(1)[2:]
    assert rest.tokens(2) == whole.tokens(2)


async def test_to_retire_or_free_what_is_gone_is_no_fault(driver: Local) -> None:
    tick = await driver.run(retire=(1, 99), kv=free(0, 2))
    assert tick.report.cells_used == 2


async def test_a_sequence_may_keep_its_tokens_for_the_next_request(driver: Local) -> None:
    """Retire without free: the tokens stay, and a request that begins with them is seated on top."""
    first = await driver.run(decode=(Decode(1, 1),))
    await driver.run(retire=(1,))
    reference = Local(SimulatedRuntime(SPEC))
    whole = await reference.run(admit=(seat(1, 0, PROMPT),), prefill=(Prefill(1, 4),), decode=(Decode(1, 5),))
    known = [*PROMPT, *whole.tokens(1)[:2], 300]
    assert first.tokens(1) == whole.tokens(1)[2:3]
    tick = await driver.run(admit=(seat(3, 0, known, cached=6),), prefill=(Prefill(3, 1),))
    fresh = await reference.run(admit=(seat(3, 1, known),), prefill=(Prefill(3, len(known)),))
    assert tick.tokens(3) == fresh.tokens(3)


class Recording:
    """A thread policy that writes down what it is told."""

    def __init__(self) -> None:
        self.current = 3
        self.calls: list[tuple[object, ...]] = []

    def before_round(self, runtime: Runtime, lanes: int) -> None:
        self.calls.append(("before round", lanes))

    def after_round(self, lanes: int, seconds: float) -> None:
        self.calls.append(("after round", lanes, round(seconds, 6)))

    def before_prefill(self, runtime: Runtime) -> None:
        self.calls.append(("before prefill",))

    def before_exact(self, runtime: Runtime) -> None:
        self.calls.append(("before exact",))


def run_whole(executor: Executor, plan: Plan) -> Any:
    steps = executor.run(plan, lambda: False)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_the_thread_policy_is_told_of_every_step_and_its_cost() -> None:
    policy = Recording()
    executor = Executor(SimulatedRuntime(SPEC), policy)
    report = run_whole(
        executor, Plan(1, admit=(seat(1, 0, PROMPT),), prefill=(Prefill(1, 4),), decode=(Decode(1, 2),), step_tokens=3)
    )
    assert policy.calls == [
        ("before prefill",),
        ("before prefill",),
        ("before round", 1), ("after round", 1, 0.009),
        ("before round", 1), ("after round", 1, 0.009),
    ]  # fmt: skip
    timing = report.timing
    assert (timing.decode_rounds, timing.decode_tokens, timing.prefill_tokens, timing.threads) == (2, 2, 4, 3)
    assert timing.decode_seconds == pytest.approx(0.018)
    # A micro-batch of one token costs what a round does; 3 tokens: 2 ms and 3/400 s.
    assert timing.prefill_seconds == pytest.approx(0.0185)
    assert run_whole(Executor(SimulatedRuntime(SPEC)), Plan(1)).timing.threads == FixedThreads.current == 0


def test_a_batch_invariant_tick_teaches_the_thread_policy_nothing() -> None:
    policy = Recording()
    executor = Executor(SimulatedRuntime(SPEC), policy)
    plan = Plan(1, admit=(seat(1, 0, PROMPT),), prefill=(Prefill(1, 4),), decode=(Decode(1, 2),), exact=True)
    run_whole(executor, plan)
    assert policy.calls == [("before exact",)] * 3


def test_rounds_and_micro_batches_take_turns_rounds_first() -> None:
    policy = Recording()
    executor = Executor(SimulatedRuntime(SPEC), policy)
    run_whole(executor, Plan(1, admit=(seat(1, 0, PROMPT),), prefill=(Prefill(1, 4),)))
    policy.calls.clear()
    run_whole(
        executor,
        Plan(
            2, admit=(seat(2, 1, PROMPT),), prefill=(Prefill(2, 4),), decode=(Decode(1, 3), Decode(2, 2)), step_tokens=2
        ),
    )
    assert [call[:2] for call in policy.calls if call[0] != "after round"] == [
        ("before round", 1), ("before prefill",), ("before round", 1), ("before prefill",), ("before round", 2),
        ("before round", 1),
    ]  # fmt: skip


class Listening(SimulatedRuntime):
    """Notes what each draw depends on, and fails the draws it is told to fail."""

    def __init__(self) -> None:
        super().__init__(SPEC)
        self.draws: list[tuple[int, tuple[int, ...], int]] = []
        self.fail: Exception | None = None
        self.feeds: list[list[Feed]] = []

    def step(self, feeds: Sequence[Feed], *, abandonable: bool = False) -> None:
        self.feeds.append(list(feeds))
        super().step(feeds, abandonable=abandonable)

    def choose(self, feed: int, draw: Draw) -> Choice:
        self.draws.append((draw.position, tuple(draw.history), draw.prompt))
        if self.fail is not None and draw.params.seed == 13:
            raise self.fail
        return super().choose(feed, draw)


async def test_a_draw_sees_the_whole_history_and_where_the_prompt_ends() -> None:
    runtime = Listening()
    driver = Local(runtime)
    tick = await driver.run(
        admit=(Admit(1, 0, PROMPT, 3, SamplingParams(temperature=0.0)),),
        prefill=(Prefill(1, 4),),
        decode=(Decode(1, 2),),
    )
    one, two, _ = tick.tokens(1)
    assert runtime.draws == [(4, PROMPT, 3), (5, (*PROMPT, one), 3), (6, (*PROMPT, one, two), 3)]


async def test_logits_are_asked_for_only_where_a_token_is_due() -> None:
    runtime = Listening()
    await Local(runtime).run(
        admit=(seat(1, 0, PROMPT),), prefill=(Prefill(1, 4),), decode=(Decode(1, 1),), step_tokens=3
    )
    assert [[(feed.start, len(feed.tokens), feed.sample) for feed in feeds] for feeds in runtime.feeds] == [
        [(0, 3, False)],
        [(3, 1, True)],
        [(4, 1, True)],
    ]


@pytest.mark.parametrize("error", [ValueError("no"), OverflowError("no"), IndexError("no"), ZeroDivisionError("no")])
@pytest.mark.parametrize("when", ["first", "later"])
async def test_a_draw_that_fails_is_its_lanes_fault_only(error: Exception, when: str) -> None:
    runtime = Listening()
    driver = Local(runtime)
    expected = (
        await Local(SimulatedRuntime(SPEC)).run(
            admit=(seat(1, 0, PROMPT),), prefill=(Prefill(1, 4),), decode=(Decode(1, 3),)
        )
    ).tokens(1)
    if when == "first":
        runtime.fail = error
    first = await driver.run(
        admit=(seat(1, 0, PROMPT), seat(2, 1, PROMPT, SamplingParams(temperature=0.0, seed=13))),
        prefill=(Prefill(1, 4), Prefill(2, 4)),
    )
    runtime.fail = error
    second = await driver.run(decode=(Decode(1, 3), Decode(2, 3)))
    faults = [*first.report.faults, *second.report.faults]
    assert [(fault.request, fault.message) for fault in faults] == [(2, "sampling failed: no")]
    assert first.tokens(1) + second.tokens(1) == expected
    assert len(first.tokens(2)) == (when == "later")
    assert not second.tokens(2)


async def test_a_lane_at_its_windows_end_fails_alone() -> None:
    driver = Local(SimulatedRuntime(SPEC))
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    tick = await driver.run(
        admit=(seat(1, 0, PROMPT * 15, params), seat(2, 1, PROMPT, params)),
        prefill=(Prefill(1, 60), Prefill(2, 4)),
        decode=(Decode(1, 20), Decode(2, 20)),
    )
    assert len(tick.tokens(1)) == 5
    assert len(tick.tokens(2)) == 21
    assert [fault.request for fault in tick.report.faults] == [1]


@pytest.mark.parametrize("failures", [1, 2])
async def test_a_lane_that_finds_no_room_is_tried_once_more(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimulatedRuntime(SPEC)
    real, left = runtime.step, [failures]

    def step(feeds: Sequence[Feed], *, abandonable: bool = False) -> None:
        if left[0]:
            left[0] -= 1
            raise OutOfCells("no slot")
        real(feeds, abandonable=abandonable)

    monkeypatch.setattr(runtime, "step", step)
    tick = await Local(runtime).run(admit=(seat(1, 0, PROMPT),), prefill=(Prefill(1, 4),), decode=(Decode(1, 2),))
    if failures == 1:
        assert len(tick.tokens(1)) == 3
        assert not tick.report.faults
    else:
        assert [(fault.request, fault.message) for fault in tick.report.faults] == [(1, "no slot")]


# -- KV that moves ------------------------------------------------------------------------------------------------


async def test_a_seat_whose_sequence_holds_something_else_begins_from_nothing_and_it_is_said(driver: Local) -> None:
    fresh = await Local(SimulatedRuntime(SPEC)).run(
        admit=(seat(9, 0, PROMPT),), prefill=(Prefill(9, 4),), decode=(Decode(9, 2),)
    )
    tick = await driver.run(
        retire=(1,),
        admit=(seat(3, 2, PROMPT, cached=2), seat(4, 0, PROMPT)),
        prefill=(Prefill(3, 2), Prefill(4, 4)),
        decode=(Decode(3, 9), Decode(4, 2)),
    )
    assert tick.report.emptied == (2, 0)
    assert tick.tokens(3) == [], "two of its four tokens are still to be fed"
    assert tick.tokens(4) == fresh.tokens(9)
    rest = await driver.run(prefill=(Prefill(3, 2),), decode=(Decode(3, 2),))
    assert rest.tokens(3) == fresh.tokens(9)


@pytest.mark.parametrize("fault", ["copy", "export", "restore", "cut", "missing", "too short", "MemoryError"])
async def test_kv_that_cannot_be_moved_is_computed_again(driver: Local, fault: str) -> None:
    """After each of these the lane says what it says in an engine where nothing is kept."""
    runtime: Any = driver.runtime

    def fails(*args: Any) -> bytes:
        raise MemoryError if fault == "MemoryError" else StepFailed("it is broken")

    first = await Local(SimulatedRuntime(SPEC)).run(
        admit=(seat(9, 0, [*PROMPT, 300]),), prefill=(Prefill(9, 5),), decode=(Decode(9, 3),)
    )
    long = [*PROMPT, 300]
    await driver.run(retire=(1, 2), kv=(*free(0, 1), Discard(9)))
    await driver.run(admit=(seat(5, 0, PROMPT),), prefill=(Prefill(5, 4),), decode=())
    moves: tuple[Any, ...] = (Export(0, 1), *free(0), Import(1, 2, 4))
    if fault == "copy":
        runtime.copy = fails
        moves = (Copy(0, 2, 4),)
    elif fault == "cut":
        runtime.cut = lambda *args: False
        moves = (Copy(0, 2, 4), Cut(2, 3))
    elif fault == "missing":
        moves = (Export(0, 1), Discard(1), *free(0), Import(1, 2, 4))
    elif fault == "too short":
        moves = (Export(0, 1), *free(0), Import(1, 2, 5))
    elif fault == "restore":
        runtime.restore = fails
    else:
        runtime.export = fails
    cached = 3 if fault == "cut" else 4
    tick = await driver.run(
        retire=(5,), kv=moves, admit=(seat(6, 2, long, cached=cached),), prefill=(Prefill(6, 5 - cached),)
    )
    assert tick.report.emptied == (2,)
    assert tick.tokens(6) == []
    assert tick.report.exported == {
        "copy": (), "cut": (), "missing": ((1, 32),), "too short": ((1, 32),), "restore": ((1, 32),),
    }.get(fault, ((1, 0),))  # fmt: skip
    rest = await driver.run(prefill=(Prefill(6, cached),), decode=(Decode(6, 3),))
    assert rest.tokens(6) == first.tokens(9)


async def test_a_sequence_that_is_emptied_or_filled_on_purpose_afterwards_is_not_reported(driver: Local) -> None:
    await driver.run(retire=(1, 2), kv=(*free(0, 1), Discard(9)))
    await driver.run(admit=(seat(5, 0, PROMPT),), prefill=(Prefill(5, 4),), decode=())
    moves = (Cut(1, 3), *free(1), Cut(2, 3), *free(2), Copy(0, 2, 3))
    tick = await driver.run(retire=(5,), kv=moves, admit=(seat(6, 2, PROMPT, cached=3),), prefill=(Prefill(6, 1),))
    assert tick.report.emptied == ()
    assert len(tick.tokens(6)) == 1

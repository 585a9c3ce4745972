"""The in-process engine keeps what a worker promises, on virtual time."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from superfluidd.engine.client import EngineLost
from superfluidd.engine.inprocess import InProcessEngine, inprocess_starter
from superfluidd.engine.runtimes.simulated import SimulatedRuntime
from superfluidd.engine.wire import LoadSpec, StepDone
from superfluidd.scheduling.plan import Decode, Plan, Prefill, TickReport
from superfluidd.types import SamplingParams
from tests.engine.contract import seat

SPEC = LoadSpec("simulated", "", lanes=2, window=512, layout="per-sequence", cells=0)
PLAN = Plan(
    1,
    admit=(seat(1, 0, range(300, 340), SamplingParams(temperature=0.0, ignore_eos=True)),),
    prefill=(Prefill(1, 40),),
    decode=(Decode(1, 10),),
)


@pytest.fixture
def lost() -> list[str]:
    return []


@pytest.fixture
def engine(lost: list[str]) -> InProcessEngine:
    return InProcessEngine(SimulatedRuntime(SPEC), lambda: lost.append("lost"))


async def test_steps_come_at_the_moment_they_end(autojump_clock: MockClock, engine: InProcessEngine) -> None:
    moments: list[float] = []
    sent: list[float] = []
    start = trio.current_time()
    report = await engine.tick(
        PLAN, lambda step: moments.append(trio.current_time() - start), lambda: sent.append(trio.current_time() - start)
    )
    # 40 prompt tokens: 2 ms and 100 ms; then rounds of 9 ms.
    assert moments == pytest.approx([0.102 + 0.009 * index for index in range(11)])
    assert sent == [0.0]
    assert isinstance(report, TickReport)
    assert report.decoded == ((1, 11),)
    assert trio.current_time() - start == pytest.approx(moments[-1])


async def test_an_interrupt_ends_the_tick_at_the_next_step(autojump_clock: MockClock, engine: InProcessEngine) -> None:
    steps: list[StepDone] = []

    def on_step(step: StepDone) -> None:
        steps.append(step)
        if len(steps) == 3:
            engine.interrupt(1)

    report = await engine.tick(PLAN, on_step)
    assert isinstance(report, TickReport)
    assert (report.outcome, len(steps)) == ("stopped", 3)
    again = await engine.tick(Plan(2, decode=(Decode(1, 2),)), on_step)
    assert isinstance(again, TickReport)
    assert again.decoded == ((1, 2),)


async def test_death_in_mid_tick_is_a_value_and_final(
    autojump_clock: MockClock, engine: InProcessEngine, lost: list[str]
) -> None:
    steps: list[StepDone] = []
    async with trio.open_nursery() as nursery:

        async def die() -> None:
            await trio.sleep(0.115)
            engine.die("it was killed")

        nursery.start_soon(die)
        start = trio.current_time()
        outcome = await engine.tick(PLAN, steps.append)
        assert trio.current_time() - start == pytest.approx(0.115)
    assert outcome == engine.lost == EngineLost("it was killed")
    assert len(steps) == 2, "what a step would have said after its death is not said"
    assert lost == ["lost"]
    assert await engine.tick(Plan(2), steps.append) == engine.lost
    assert await engine.tokenize("x", add_bos=False, parse_special=False) is None


async def test_the_starter_takes_its_time(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    start = trio.current_time()
    engine = await inprocess_starter(lambda: SimulatedRuntime(SPEC), 3.0)(nursery, lambda: None, lambda share: None)
    assert isinstance(engine, InProcessEngine)
    assert trio.current_time() - start == pytest.approx(3.0)
    assert engine.pid == 0
    assert len(engine.vocabulary) == engine.info.vocabulary
    await engine.close(1.0)
    await engine.close(1.0)

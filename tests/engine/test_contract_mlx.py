"""The contract on MLX: a tiny seeded model always, the bundled model converted where OpenBLAS is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from superfluidd.engine.client import LoadRefused, WorkerEngine, worker_starter
from superfluidd.engine.port import Runtime
from superfluidd.engine.runtimes.mlx import MlxRuntime
from superfluidd.engine.wire import LoadSpec
from superfluidd.scheduling.plan import Decode, Prefill
from superfluidd.types import SamplingParams
from tests.engine import contract, tiny_mlx
from tests.engine.contract import GREEDY, SURE_REPLY, Driver, Local, seat

pytestmark = pytest.mark.engine_mlx


def spec(directory: Path) -> LoadSpec:
    return LoadSpec("mlx", str(directory), lanes=4, window=256, layout="per-sequence", cells=1024)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mlx.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> Iterator[Runtime]:
    runtime = MlxRuntime(spec(tiny), lambda share: None)
    yield runtime
    runtime.close()
    runtime.close()


@pytest.fixture(scope="module")
def loaded_bundled(bundled_mlx: Path) -> Iterator[Runtime]:
    runtime = MlxRuntime(replace(spec(bundled_mlx), dense=True), lambda share: None)
    yield runtime
    runtime.close()


def emptied(runtime: Runtime) -> Runtime:
    for sequence in range(runtime.info.sequences):
        runtime.free(sequence)
    assert runtime.cells_used() == 0
    return runtime


@pytest.fixture
def runtime(loaded: Runtime) -> Runtime:
    return emptied(loaded)


@pytest.fixture
def bundled(loaded_bundled: Runtime) -> Runtime:
    return emptied(loaded_bundled)


class TestInProcess(contract.Contract):
    exact = False

    @pytest.fixture
    async def driver(self, runtime: Runtime) -> Driver:
        return Local(runtime)


class TestFaults(contract.FaultContract):
    exact = False

    @pytest.fixture
    async def broken(self, runtime: Runtime) -> Driver:
        return Local(contract.Faulty(runtime, 1))


@pytest.mark.process
class TestWorker:
    """Some of it through a process, which takes a second and a half to start."""

    slow = exact = False
    prompt, others, alone = contract.Contract.prompt, contract.Contract.others, contract.Contract.alone
    test_lanes_join_and_leave = contract.Contract.test_lanes_join_and_leave_in_any_order_and_leave_the_others_alone
    test_a_stopped_tick_goes_on = contract.Contract.test_a_stopped_tick_goes_on_in_the_next_plan
    test_a_lane_seeded_from_another = contract.Contract.test_a_lane_seeded_from_another_says_what_it_says_alone

    @pytest.fixture
    async def driver(self, tiny: Path, nursery: trio.Nursery) -> AsyncIterator[Driver]:
        shares: list[float] = []
        engine = await worker_starter(spec(tiny))(nursery, lambda: None, shares.append)
        assert isinstance(engine, WorkerEngine), engine
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        yield contract.Remote(engine)
        await engine.close(5.0)


class TestBundled(contract.Contract):
    exact = False

    @pytest.fixture
    async def driver(self, bundled: Runtime) -> Driver:
        return Local(bundled)

    async def test_it_knows_the_capital_of_france(self, driver: Driver, prompt: list[int]) -> None:
        tokens = await self.alone(driver, prompt, 20)
        assert driver.decode(tokens) == SURE_REPLY
        assert tokens[-1] in driver.info.end_tokens


class TestBundledFaults(contract.FaultContract):
    exact = False

    @pytest.fixture
    async def broken(self, bundled: Runtime) -> Driver:
        return Local(contract.Faulty(bundled, 1))


async def test_seeds_and_penalties_hold_up_nobody_and_need_nothing_of_a_neighbour(runtime: Runtime) -> None:
    """Requests that mlx-lm's own server will not batch: seeded, penalized, biased, and greedy, in the same calls."""
    driver = Local(runtime)
    kinds = (
        SamplingParams(temperature=1.0, seed=7, ignore_eos=True),
        SamplingParams(temperature=0.0, repeat_penalty=1.5, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(temperature=0.0, logit_bias=((72, 100.0),), ignore_eos=True),
        GREEDY,
    )
    prompt = await driver.tokenize("One prompt for all")
    run = contract.Contract()
    run.exact = False
    together = await driver.run(
        admit=tuple(seat(number + 1, number, prompt, params) for number, params in enumerate(kinds)),
        prefill=tuple(Prefill(number + 1, len(prompt)) for number in range(4)),
        decode=tuple(Decode(number + 1, 15) for number in range(4)),
        step_tokens=7,
    )
    assert not together.report.faults
    rounds = [{out.request for out in step.tokens} for step in together.steps if not step.prefilled]
    assert {1, 2, 3, 4} in rounds, "one call for all of them"
    said = [together.tokens(number + 1) for number in range(4)]
    assert len(set(map(tuple, said))) == 4
    assert set(said[2]) == {72}
    await driver.run(retire=(1, 2, 3, 4), kv=contract.free(0, 1, 2, 3))
    for number, params in enumerate(kinds):
        one = await driver.run(
            admit=(seat(10 + number, 0, prompt, params),),
            prefill=(Prefill(10 + number, len(prompt)),),
            decode=(Decode(10 + number, 15),),
        )
        assert one.tokens(10 + number) == said[number]
        await driver.run(retire=(10 + number,), kv=contract.free(0))


@pytest.mark.process
async def test_a_directory_that_is_no_model_is_refused_with_the_reason(tmp_path: Path, nursery: trio.Nursery) -> None:
    answer = await worker_starter(spec(tmp_path), log_level="critical")(nursery, lambda: None, lambda share: None)
    assert isinstance(answer, LoadRefused), answer
    assert "MLX cannot load" in answer.message

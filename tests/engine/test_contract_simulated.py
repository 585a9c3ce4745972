"""The contract on the simulated runtime: in process, and behind a real worker process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
from msgspec.structs import replace

from superfluidd.engine.client import WorkerEngine, worker_starter
from superfluidd.engine.inprocess import InProcessEngine
from superfluidd.engine.runtimes.simulated import SimulatedRuntime
from superfluidd.engine.wire import LoadSpec
from tests.engine import contract

SPEC = LoadSpec("simulated", "", lanes=4, window=256, layout="per-sequence", cells=1024)
SHARED = LoadSpec("simulated", "", lanes=4, window=128, layout="shared", cells=128)


class TestInProcess(contract.Contract):
    @pytest.fixture
    async def driver(self) -> contract.Driver:
        return contract.Local(SimulatedRuntime(SPEC))


class TestSharedInProcess(contract.SharedContract):
    @pytest.fixture
    async def driver(self) -> contract.Driver:
        return contract.Local(SimulatedRuntime(SHARED))


class TestFaults(contract.FaultContract):
    @pytest.fixture
    async def broken(self) -> contract.Driver:
        return contract.Local(contract.Faulty(SimulatedRuntime(SPEC), 1))


class TestInDaemon(contract.Contract):
    """Behind :class:`InProcessEngine`, whose costs pass on Trio's clock: here next to nothing."""

    @pytest.fixture
    async def driver(self) -> contract.Driver:
        return contract.Remote(InProcessEngine(SimulatedRuntime(replace(SPEC, simulated_speed=1e6)), lambda: None))


@pytest.mark.process
class TestWorker(contract.Contract):
    """Behind a worker process; costs pass in real time, a little faster than nominal."""

    @pytest.fixture
    async def driver(self, nursery: trio.Nursery) -> AsyncIterator[contract.Driver]:
        engine = await worker_starter(replace(SPEC, simulated_speed=4.0))(nursery, lambda: None, lambda share: None)
        assert isinstance(engine, WorkerEngine), engine
        yield contract.Remote(engine)
        await engine.close(5.0)


@pytest.mark.process
class TestSharedWorker(contract.SharedContract):
    @pytest.fixture
    async def driver(self, nursery: trio.Nursery) -> AsyncIterator[contract.Driver]:
        engine = await worker_starter(replace(SHARED, simulated_speed=100.0))(nursery, lambda: None, lambda share: None)
        assert isinstance(engine, WorkerEngine), engine
        yield contract.Remote(engine)
        await engine.close(5.0)

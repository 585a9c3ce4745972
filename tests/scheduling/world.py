"""A scheduler beside an engine that does what it is told, one tick at a time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from superfluidd.scheduling.books import Limits
from superfluidd.scheduling.plan import Paused, Plan, TickReport, Timing
from superfluidd.scheduling.policy import Policy
from superfluidd.scheduling.request import Request
from superfluidd.scheduling.scheduler import Scheduler
from superfluidd.scheduling.shares import Share
from superfluidd.types import QosClass
from tests.scheduling.fake_engine import FakeEngine, submit

TWO = Limits(lanes=2, shared=False, cells=4 * 4096, sequences=4, window=4096, max_step=512, abandons=True)


class World:
    """A scheduler and an engine that does what it is told."""

    def __init__(
        self, limits: Limits = TWO, policy: Policy | None = None, host: Share | None = None, disk: Share | None = None
    ) -> None:
        self.scheduler = Scheduler(limits, policy, host=host, disk=disk)
        self.engine = FakeEngine(limits, ends=False)
        self.now = 0.0
        self.paused: list[int] = []

    def ask(
        self,
        qos: QosClass,
        tokens: int = 4,
        most: int = 400,
        *,
        alone: bool = False,
        media: bool = False,
        prompt: Sequence[int] | None = None,
    ) -> int:
        known = prompt or [self.scheduler.statistics().submitted + 10] * tokens
        return submit(self.scheduler, known, most, qos, self.now, alone=alone, media=media)

    def plan(self) -> Plan:
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        assert plan is not None
        self.paused = [effect.request for effect in self.scheduler.take_effects() if isinstance(effect, Paused)]
        return plan

    def run(self, plan: Plan, steps: int | None = None, timing: Timing | None = None) -> TickReport:
        assert not self.engine.seat(plan)
        outcome, done = "done" if steps != 0 else "stopped", 0
        self.engine.prefilled, self.engine.decoded, self.engine.abandoned = {}, {}, {}
        for item in self.engine.run(plan) if steps != 0 else ():
            if item is None:
                done += 1
                if done == steps:
                    outcome = "stopped"
                    break
            else:
                request, position, token, end = item
                self.scheduler.observe(request, position, token, end=end, now=self.now)
        report = self.engine.report(plan, "stopped" if self.engine.abandoned else outcome)
        report = msgspec.structs.replace(report, timing=timing or Timing(1, 1, 0.01, 64, 0.1))
        self.scheduler.apply(report, self.now)
        self.tell()
        return report

    def tell(self) -> None:
        """The writer of the disk is done."""
        for key, size in self.engine.sealed:
            self.scheduler.sealed(key, size)
        self.engine.sealed.clear()

    def restart(self) -> None:
        """The engine dies, and another one finds what was parked."""
        engine, self.engine = self.engine, FakeEngine(self.scheduler.limits, ends=False)
        self.scheduler.engine_lost(self.now)
        self.engine.disk = engine.disk
        self.scheduler.adopt_parked(self.engine.parked())

    def tick(self, steps: int | None = None, timing: Timing | None = None) -> Plan:
        plan = self.plan()
        self.run(plan, steps, timing)
        return plan

    def record(self, request: int) -> Request:
        record = self.scheduler.request(request)
        assert record is not None
        return record

    def kept(self, request: int) -> int:
        """Cells that are kept of a preempted request."""
        return sum(e.length for e in self.scheduler.kept() if e.owner is not None and e.owner.id == request)

    @property
    def seated(self) -> list[int]:
        return [record.id for record in self.scheduler.seated()]


def kinds(world: World, request: int) -> list[str]:
    trail = world.scheduler.trail(request)
    assert trail is not None
    return [entry.kind for entry in trail]

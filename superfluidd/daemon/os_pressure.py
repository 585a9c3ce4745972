"""The watcher of the operating system's memory: one over all models.

With a trigger armed it sleeps until that fires; then, and where there is no trigger, it asks for figures each second
until the ladder is back at its foot. What is done is the scheduler's: it is only told the rung.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Literal

import trio

from superfluidd.control.protocol import PressureResult
from superfluidd.daemon.sensors import Armed, SourceLost
from superfluidd.scheduling.pressure import Gauge, Ladder, Level, Reading, Rung

log = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks at the figures."""

Mode = Literal["on", "off", "dry-run"]

DOES: dict[Rung, str] = {
    Rung.NORMAL: "nothing",
    Rung.WARNING: "KV saved in host memory dropped, cached prefixes evicted once, nothing saved",
    Rung.CRITICAL: "as for a warning; background requests get no lanes, decoding ones lose theirs",
    Rung.NO_AGENTS: "as before; agents get no lanes",
    Rung.NO_COMPLETIONS: "as before; completions get no lanes",
    Rung.TINY_CHATS: "as before; only chats of at most 1,024 tokens get lanes",
}
"""What each rung does, in words."""


class Watcher:
    """Memory pressure, from sensors to the models.

    Args:
        mode: ``dry-run`` logs what it would do.
        arm: finds what to listen to, and again when that is lost; None from it means that nothing is to be watched.
        ladder: for its hold times.
    """

    def __init__(
        self,
        mode: Mode,
        arm: Callable[[], Armed | None],
        ladder: Ladder | None = None,
    ) -> None:
        self.mode = mode
        self.events = 0
        """Pressure that a trigger told of, ever; ``false_alarms`` of what was not confirmed."""
        self.false_alarms = 0
        self.apply: Callable[[Rung], None] = lambda rung: None
        """Told every change of the rung."""
        self._arm = arm
        self._ladder = ladder or Ladder()
        self._gauge = Gauge()
        self._armed: Armed | None = None
        self._source = "nothing: --os-pressure is off" if mode == "off" else "nothing yet"
        self._woken = trio.Event()
        self._latest: Reading | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled. Started once a source is armed; returns if nothing is to be watched.

        Resource handling: the trigger is disarmed on return.
        Error handling: a trigger that is lost is replaced by the next best source.
        """
        if self.mode == "off":
            task_status.started()
            return
        while True:
            armed = self._arm()
            if armed is None:
                self._source = "nothing: $MEMORY_PRESSURE_WATCH is /dev/null"
                log.info("memory pressure is not watched: $MEMORY_PRESSURE_WATCH is /dev/null")
                task_status.started()
                return
            self._armed, self._source = armed, armed.name
            for line in armed.refused:
                log.info("memory pressure: cannot use %s", line)
            log.info("memory pressure: %s is armed (%s)", armed.name, self.mode)
            task_status.started()
            task_status = trio.TASK_STATUS_IGNORED
            try:
                await self._watch(armed)
            except* SourceLost as group:
                log.warning("memory pressure: %s; looking for another source", group.exceptions[0])
            finally:
                if armed.trigger is not None:
                    armed.trigger.close()
            await trio.sleep(INTERVAL)

    async def _watch(self, armed: Armed) -> None:
        async with trio.open_nursery() as nursery:
            if armed.trigger is not None:
                nursery.start_soon(self._listen, armed)
            while True:
                self._woken = trio.Event()
                self._look(armed)
                with trio.move_on_after(
                    INTERVAL if armed.trigger is None or self._ladder.rung is not Rung.NORMAL else math.inf
                ):
                    await self._woken.wait()

    async def _listen(self, armed: Armed) -> None:
        assert armed.trigger is not None
        while True:
            if await armed.trigger.wait():
                self.events += 1
                self._gauge.take(Reading(trio.current_time(), event=True))
                self._woken.set()
            else:
                self.false_alarms += 1
                log.debug("memory pressure: an event was not confirmed by growth of the total")
            # As often as figures are asked for, and no more: whoever writes to a FIFO without pause is one event a
            # second, and does not keep the processor busy.
            await trio.sleep(INTERVAL)

    def _look(self, armed: Armed) -> None:
        """Take figures, move on the ladder, tell the models."""
        now = trio.current_time()
        self._latest = armed.figures(now)
        self._gauge.take(self._latest)
        level, before = self._gauge.level(now), self._ladder.rung
        rung = self._ladder.feed(level, now)
        if rung is before:
            return
        log.log(
            logging.WARNING if rung > before else logging.INFO,
            "memory pressure: %s -> %s (%s)%s: %s",
            word(before),
            word(rung),
            _figures(self._latest),
            "; dry run, this would be done" if self.mode == "dry-run" else "",
            DOES[rung],
        )
        if self.mode == "on":
            self.apply(rung)

    @property
    def rung(self) -> Rung:
        """The rung that holds."""
        return self._ladder.rung

    def level(self, now: float) -> Level:
        """What the sensors say at this moment. A trigger that is silent says that all is well."""
        if self._armed is None or (self._armed.trigger is not None and self._ladder.rung is Rung.NORMAL):
            return Level.UNKNOWN if self._armed is None else Level.NORMAL
        return self._gauge.level(now)

    def view(self) -> PressureResult:
        """Everything about it in one record."""
        now = trio.current_time()
        latest = self._armed.figures(now) if self._armed is not None else Reading(now)
        return PressureResult(
            mode=self.mode,
            source=self._source,
            refused=self._armed.refused if self._armed is not None else (),
            level=self.level(now).name.lower(),
            rung=word(self.rung),
            does=DOES[self.rung],
            since=now - self._ladder.since if self.rung is not Rung.NORMAL else None,
            some=latest.some,
            full=latest.full,
            available=latest.available,
            kernel=latest.kernel,
            events=self.events,
            false_alarms=self.false_alarms,
        )


def word(rung: Rung) -> str:
    """A rung in words: ``no-agents``."""
    return rung.name.lower().replace("_", "-")


def _figures(reading: Reading) -> str:
    parts: Iterable[str] = (
        "" if reading.some is None else f"some avg10 {reading.some:.1f} %",
        "" if reading.full is None else f"full avg10 {reading.full:.1f} %",
        "" if reading.available is None else f"{reading.available:.0%} available",
        "" if reading.kernel is None else f"kernel level {reading.kernel}",
    )
    return ", ".join(filter(None, parts)) or "no figures"

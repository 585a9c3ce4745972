"""The watcher on virtual time: what is seen, when the rung moves, what is told."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from superfluidd.daemon.os_pressure import Mode, Watcher
from superfluidd.daemon.sensors import Armed, SourceLost
from superfluidd.daemon.service import Service
from superfluidd.scheduling.pressure import Level, Reading, Rung
from superfluidd.types import QosClass
from tests.daemon.test_steering import ask, prompt, read

NORMAL, WARNING, CRITICAL, NO_AGENTS, NO_COMPLETIONS, TINY = Rung


class Bell:
    """A trigger that a test fires: True, a false alarm, or lost."""

    name = "bell"

    def __init__(self) -> None:
        self.send, self._receive = trio.open_memory_channel[bool | str](100)
        self.closed = False

    async def wait(self) -> bool:
        said = await self._receive.receive()
        if isinstance(said, str):
            raise SourceLost(said)
        return said

    def close(self) -> None:
        self.closed = True


class Watched:
    """A watcher whose rungs are written down with the time they came."""

    def __init__(
        self, nursery: trio.Nursery, figures: Callable[[float], Reading], *bells: Bell, mode: Mode = "on"
    ) -> None:
        self.told: list[tuple[float, Rung]] = []
        self._nursery = nursery
        sources = [Armed(bell, figures, bell.name) for bell in bells]
        polled = Armed(None, figures, "polled", ("bell: lost",) if bells else ())
        self.watcher = Watcher(mode, lambda: sources.pop(0) if sources else polled)
        self.watcher.apply = lambda rung: self.told.append((trio.current_time() - self.start, rung))

    async def begin(self) -> None:
        self.start = trio.current_time()
        await self._nursery.start(self.watcher.run)


def psi(some: float, full: float = 0.0) -> Callable[[float], Reading]:
    return lambda now: Reading(now, some=some, full=full)


async def test_a_level_is_told_at_once_and_falls_after_the_hold(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    start = trio.current_time()
    watched = Watched(
        nursery,
        lambda now: Reading(now, some=20.0 if 10 <= now - start < 20 else 0.0),
    )
    await watched.begin()
    await trio.sleep(100)
    assert watched.told == [(10.0, WARNING), (50.0, NORMAL)]


async def test_critical_pressure_climbs_class_by_class_and_goes_back_in_one_step(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    start = trio.current_time()
    watched = Watched(nursery, lambda now: Reading(now, full=6.0 if now - start < 50 else 0.0))
    await watched.begin()
    await trio.sleep(100)
    assert watched.told == [(0.0, CRITICAL), (15.0, NO_AGENTS), (30.0, NO_COMPLETIONS), (45.0, TINY), (80.0, NORMAL)]


async def test_a_square_wave_moves_the_rung_once(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    start = trio.current_time()
    watched = Watched(nursery, lambda now: Reading(now, some=20.0 if (now - start) % 5 < 2.5 else 0.0))
    await watched.begin()
    await trio.sleep(300)
    assert watched.told == [(0.0, WARNING)]


async def test_a_sensor_that_freezes_at_critical_is_unknown_and_not_for_ever(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    start = trio.current_time()
    watched = Watched(nursery, lambda now: Reading(min(now, start + 10), full=50.0))
    await watched.begin()
    await trio.sleep(14)
    assert watched.watcher.level(trio.current_time()) is Level.CRITICAL
    await trio.sleep(10)
    assert watched.watcher.level(trio.current_time()) is Level.UNKNOWN
    await trio.sleep(300)
    assert watched.told == [(0.0, CRITICAL), (15.0, NO_AGENTS), (46.0, WARNING)]


async def test_a_sensor_of_unknown_value_does_nothing(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    watched = Watched(nursery, lambda now: Reading(now, kernel=3))
    await watched.begin()
    await trio.sleep(100)
    assert watched.told == []
    assert watched.watcher.view().level == "unknown"


async def test_an_event_is_a_warning_three_are_critical_and_silence_ends_it(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    bell = Bell()
    watched = Watched(nursery, psi(0.0), bell)
    await watched.begin()
    await trio.sleep(100)
    assert watched.told == []
    for _ in range(3):
        bell.send.send_nowait(True)
        await trio.sleep(2)
    # Events are news for ten seconds: the last is of second 104. Then the hold.
    await trio.sleep(100)
    assert watched.told == [(100.0, WARNING), (104.0, CRITICAL), (141.0, WARNING), (172.0, NORMAL)]
    assert watched.watcher.events == 3


async def test_a_false_first_event_does_nothing(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    bell = Bell()
    watched = Watched(nursery, psi(0.0), bell)
    await watched.begin()
    bell.send.send_nowait(False)
    await trio.sleep(60)
    assert watched.told == []
    assert (watched.watcher.events, watched.watcher.false_alarms) == (0, 1)


async def test_a_storm_of_events_is_one_a_second(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    bell = Bell()
    watched = Watched(nursery, psi(0.0), bell)
    await watched.begin()
    for _ in range(100):
        bell.send.send_nowait(True)
    await trio.sleep(9.5)
    assert watched.watcher.events == 10


async def test_a_lost_trigger_is_replaced(
    autojump_clock: MockClock, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bells = [Bell(), Bell()]
    watched = Watched(nursery, psi(20.0), *bells)
    await watched.begin()
    assert watched.watcher.view().source == "bell"
    for bell in bells:
        bell.send.send_nowait("the bell has cracked")
        await trio.sleep(2)
        assert bell.closed
    view = watched.watcher.view()
    assert (view.source, view.refused) == ("polled", ("bell: lost",))
    assert caplog.messages.count("memory pressure: the bell has cracked; looking for another source") == 2
    assert watched.told == [(0.0, WARNING)], "what it had come to holds"


async def test_a_dry_run_only_says_so(
    autojump_clock: MockClock, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(nursery, psi(20.0), mode="dry-run")
    await watched.begin()
    await trio.sleep(10)
    assert watched.told == []
    assert watched.watcher.rung is WARNING
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == (
        "memory pressure: normal -> warning (some avg10 20.0 %, full avg10 0.0 %); dry run, this would be done: "
        "KV saved in host memory dropped, cached prefixes evicted once, nothing saved"
    )


async def test_off_and_dev_null_watch_nothing(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    off = Watched(nursery, psi(90.0, 90.0), mode="off")
    await off.begin()
    assert off.watcher.view().source == "nothing: --os-pressure is off"
    unwanted = Watcher("on", lambda: None)
    await nursery.start(unwanted.run)
    await trio.sleep(60)
    assert off.told == []
    assert unwanted.view().source == "nothing: $MEMORY_PRESSURE_WATCH is /dev/null"
    assert (unwanted.view().level, unwanted.view().rung) == ("unknown", "normal")


async def test_what_is_seen_is_shown(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    watched = Watched(nursery, psi(12.0, 7.0))
    await watched.begin()
    await trio.sleep(3)
    view = watched.watcher.view()
    assert (view.mode, view.source, view.level, view.rung) == ("on", "polled", "critical", "critical")
    assert (view.some, view.full, view.available, view.kernel) == (12.0, 7.0, None, None)
    assert view.since == 3.0


async def test_every_model_is_told(autojump_clock: MockClock, service: Service) -> None:
    """At critical a background stream pauses, a chat is answered, and the stream goes on with nothing repeated."""
    model = service.resolve(None)
    alone, _, _ = await read(ask(model, prompt(1, 20), 200, QosClass.BACKGROUND))
    background = ask(model, prompt(1, 20), 200, QosClass.BACKGROUND)
    await trio.sleep(0.5)
    service.watcher.apply(CRITICAL)
    await trio.sleep(1.0)
    assert model.lanes() == []
    assert model.queue()[0].why.startswith("memory")
    chat, done, _ = await read(ask(model, prompt(2, 20), 20, QosClass.INTERACTIVE))
    assert len(chat) > 0
    assert done.reason == "length"
    await trio.sleep(30)
    assert model.lanes() == []
    service.watcher.apply(NORMAL)
    text, done, events = await read(background)
    assert text == alone
    assert done.reason == "length"
    assert [getattr(event, "why", "resumed") for event in events][:1] == ["the machine is short of memory"]

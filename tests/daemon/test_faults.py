"""Everything that can go wrong with KV, the engine, the disk and the memory's sensor, one at a time, over a whole model
on virtual time: what runs meanwhile loses nothing it should have, and the next ten requests equal a clean run's.

The simulated engine says something else whenever it was fed something else, so equal text means equal KV.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from superfluidd.daemon.model import Model
from superfluidd.daemon.os_pressure import Watcher
from superfluidd.daemon.sensors import Armed
from superfluidd.engine.client import Engine
from superfluidd.engine.inprocess import InProcessEngine, inprocess_starter
from superfluidd.engine.port import Feed, OutOfCells, StepFailed
from superfluidd.engine.runtimes.simulated import CELL_BYTES, SimulatedRuntime
from superfluidd.scheduling.entries import Cache
from superfluidd.scheduling.pressure import Reading
from superfluidd.types import FinishReason, QosClass
from tests.conftest import simulated_spec
from tests.daemon.test_model import ask, prompt, read
from tests.daemon.test_os_pressure import Bell

CHAT, COMPLETION, AGENT, BACKGROUND = QosClass

SPEC = msgspec.structs.replace(simulated_spec(lanes=2, window=1024), layout="shared", cells=1024, spare=1)
"""A pool in which two of the conversations below have room, and what they leave has not."""

CACHE = Cache(
    enabled=True,
    host_bytes=900 * CELL_BYTES,
    park_bytes=2000 * CELL_BYTES,
    cell_bytes=CELL_BYTES,
    park_least=16,
)


class Faulty(SimulatedRuntime):
    """Fails when told to. The switches outlive the engine: a new one has the same faults."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(SPEC)
        self._faults = faults

    def export(self, sequence: int) -> bytes:
        self._faults.raise_if("export")
        state = super().export(sequence)
        return state[: len(state) // 2] if self._faults.hits("half an export") else state

    def restore(self, sequence: int, state: bytes, length: int) -> None:
        self._faults.raise_if("import")
        super().restore(sequence, state, length)

    def copy(self, source: int, sequence: int, length: int) -> None:
        self._faults.raise_if("copy")
        super().copy(source, sequence, length)

    def step(self, feeds: list[Feed], *, abandonable: bool = False) -> None:  # type: ignore[override]
        self._faults.raise_if("decode says 1", OutOfCells)
        self._faults.raise_if("decode says -1")
        super().step(feeds, abandonable=abandonable)

    def step_seconds(self, tokens: int, lanes: int) -> float:
        return 1e9 if self._faults.hits("decode says nothing") else super().step_seconds(tokens, lanes)


class Faults:
    """What fails, and how often that has happened: every ``every``-th time while it is switched on."""

    def __init__(self) -> None:
        self.on: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.met: dict[str, int] = {}

    def hits(self, name: str) -> bool:
        if name not in self.on:
            return False
        self.seen[name] = self.seen.get(name, 0) + 1
        if self.seen[name] % self.on[name]:
            return False
        self.met[name] = self.met.get(name, 0) + 1
        return True

    def raise_if(self, name: str, kind: type[Exception] = StepFailed) -> None:
        if self.hits(name):
            raise kind(f"{name}: a test wants it")


class Bench:
    """A model, its faults, and the requests that are put to it."""

    def __init__(self, model: Model, faults: Faults, engines: list[InProcessEngine], parked: Path) -> None:
        self.model = model
        self.faults = faults
        self.engines = engines
        self.parked = parked

    async def say(self, number: int, turns: int = 1, most: int = 40, qos: QosClass = AGENT) -> list[str]:
        """A conversation: each turn goes on from the whole of the last one."""
        tokens, texts = list(prompt(0, 60)) + list(prompt(number, 200)), []
        for turn in range(turns):
            text, done, _ = await read(ask(self.model, tokens, most, qos=qos))
            texts.append(text if done.reason is FinishReason.LENGTH else f"{done.reason}: {done.code}")
            tokens += [*map(ord, f"{turn} and then? "), *prompt(number + turn, 20)]
        return texts

    async def traffic(self) -> dict[int, list[str]]:
        """Conversations side by side, chats among them, so that lanes are preempted and KV moves through all tiers."""
        heard: dict[int, list[str]] = {}

        async def background(number: int) -> None:
            heard[number] = await self.say(number, turns=2, most=90, qos=BACKGROUND)

        async def chat(number: int, delay: float) -> None:
            await trio.sleep(delay)
            heard[number] = await self.say(number, turns=3, qos=CHAT)

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(background, number)
                nursery.start_soon(chat, 3 + number, 0.7 + 0.6 * number)
        return heard

    async def ten(self) -> list[str]:
        """The next ten requests."""
        return [text for number in range(5) for text in await self.say(10 + number, turns=2)]


@contextlib.asynccontextmanager
async def bench(parked: Path) -> AsyncIterator[Bench]:
    faults, engines = Faults(), list[InProcessEngine]()
    start = inprocess_starter(lambda: Faulty(faults), park=parked)

    async def starter(
        nursery: trio.Nursery, on_lost: Callable[[], None], on_progress: Callable[[float], None]
    ) -> Engine:
        engine = await start(nursery, on_lost, on_progress)
        assert isinstance(engine, InProcessEngine)
        engines.append(engine)
        return engine

    model = Model("m", "", starter, itertools.count(1), cache=CACHE)
    async with trio.open_nursery() as nursery:
        await nursery.start(model.run)
        yield Bench(model, faults, engines, parked)
        nursery.cancel_scope.cancel()


async def clean(tmp_path: Path) -> tuple[dict[int, list[str]], list[str]]:
    """What a run without faults says."""
    async with bench(tmp_path / "clean") as one:
        return await one.traffic(), await one.ten()


Disturbance = Callable[[Bench], Awaitable[None]]


def switched(name: str, every: int) -> Disturbance:
    """Traffic while every so-many-th call of that kind fails."""

    async def disturb(one: Bench) -> None:
        one.faults.on = {name: every}
        heard = await one.traffic()
        assert one.faults.met.get(name, 0) > 0, f"{name} was never asked for: the test tests nothing"
        one.faults.on = {}
        check(heard)

    return disturb


CLEAN: dict[int, list[str]] = {}


def check(heard: dict[int, list[str]], typed: str = "") -> None:
    """Every reply is the clean run's, or ended with that code."""
    for number, texts in heard.items():
        for turn, text in enumerate(texts):
            assert text == CLEAN[number][turn] or (typed and text == typed), (number, turn, text)


async def preempted_every_few_tokens(one: Bench) -> None:
    """A chat comes again and again and takes the lanes: what they had is moved away, down to the disk, and back."""
    heard: dict[int, list[str]] = {}

    async def background(number: int) -> None:
        heard[number] = await one.say(number, turns=1, most=90, qos=BACKGROUND)

    async with trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(background, number)
        while len(heard) < 2:
            await trio.sleep(0.08)
            for chat in range(2):
                nursery.start_soon(one.say, 30 + chat, 1, 3, CHAT)
            await trio.sleep(0.4)
    view = one.model.view()
    assert view.preemptions["background"] > 4
    check(heard)


async def decode_hangs(one: Bench) -> None:
    """The step never ends. An operator sees it, and ends the worker."""
    one.faults.on = {"decode says nothing": 50}
    heard: dict[int, list[str]] = {}

    async def follow() -> None:
        heard.update(await one.traffic())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        while not one.model.view().stalled:  # noqa: ASYNC110 - it is something to look at, not an event
            await trio.sleep(0.5)
        one.faults.on = {}
        one.engines[-1].die("killed: it was stalled")
    check(heard)


async def disk_is_full(one: Bench) -> None:
    real = os.fsync

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        check(await one.traffic())
    assert os.fsync is real
    assert not list(one.parked.rglob("*.kv"))


def artifacts(one: Bench) -> Iterator[Path]:
    found = sorted(one.parked.rglob("*.kv"))
    assert found, "nothing was parked: the test tests nothing"
    return iter(found)


async def parked_and_killed(one: Bench, spoil: Callable[[Path], None]) -> None:
    """Everything is on disk, something happens to it there, and a new engine finds what is left."""
    check(await one.traffic())
    await one.model.wait_parked()
    for path in artifacts(one):
        spoil(path)
    one.engines[-1].die("killed")
    check(await one.traffic())


def flipped(at: float) -> Disturbance:
    def spoil(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(at * (len(data) - 1))] ^= 0x10
        path.write_bytes(data)

    return lambda one: parked_and_killed(one, spoil)


async def artifacts_are_cut_short(one: Bench) -> None:
    await parked_and_killed(one, lambda path: os.truncate(path, path.stat().st_size // 2))


async def artifacts_are_swapped(one: Bench) -> None:
    """Each holds what another one should."""
    check(await one.traffic())
    await one.model.wait_parked()
    found = list(artifacts(one))
    contents = [path.read_bytes() for path in found]
    for path, data in zip(found, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)
    one.engines[-1].die("killed")
    check(await one.traffic())


async def artifacts_vanish(one: Bench) -> None:
    await parked_and_killed(one, lambda path: path.unlink())


def sensor(figures: Callable[[float], Reading], seconds: float) -> Disturbance:
    """Traffic while the memory's sensor says that, and then nothing worth mentioning for long."""

    async def disturb(one: Bench) -> None:
        start = trio.current_time()

        def reading(now: float) -> Reading:
            return figures(now - start) if now - start < seconds else Reading(now, some=0.0, full=0.0)

        def at(now: float) -> Reading:
            found = reading(now)
            return msgspec.structs.replace(found, at=start + found.at) if now - start < seconds else found

        watcher = Watcher("on", lambda: Armed(None, at, "a test's"))
        watcher.apply = one.model.set_pressure
        async with trio.open_nursery() as nursery:
            await nursery.start(watcher.run)
            check(await one.traffic())
            await trio.sleep(max(0.0, start + seconds + 120 - trio.current_time()))
            nursery.cancel_scope.cancel()

    return disturb


async def first_event_is_false(one: Bench) -> None:
    bell = Bell()
    watcher = Watcher("on", lambda: Armed(bell, lambda now: Reading(now, some=0.0), "bell"))
    watcher.apply = one.model.set_pressure
    async with trio.open_nursery() as nursery:
        await nursery.start(watcher.run)
        bell.send.send_nowait(False)
        check(await one.traffic())
        assert (watcher.events, watcher.false_alarms, watcher.view().rung) == (0, 1, "normal")
        nursery.cancel_scope.cancel()


DISTURBANCES: dict[str, Disturbance] = {
    "preempted every few tokens": preempted_every_few_tokens,
    "every import is refused": switched("import", 1),
    "every other import is refused": switched("import", 2),
    "every export fails": switched("export", 1),
    "every third export fails": switched("export", 3),
    "every other export stops at half": switched("half an export", 2),
    "copies fail": switched("copy", 2),
    "decode says 1 now and then": switched("decode says 1", 40),
    "decode says nothing": decode_hangs,
    "the disk is full": disk_is_full,
    "an artifact's head is damaged": flipped(0.001),
    "an artifact's tokens are damaged": flipped(0.2),
    "an artifact's state is damaged": flipped(0.9),
    "artifacts are cut short": artifacts_are_cut_short,
    "artifacts are swapped": artifacts_are_swapped,
    "artifacts vanish": artifacts_vanish,
    "the sensor is frozen at critical": sensor(lambda passed: Reading(0.0, full=50.0), 40.0),
    "the sensor is a square wave": sensor(
        lambda passed: Reading(passed, some=20.0 if passed % 5 < 2.5 else 0.0, full=6.0 if passed % 5 < 1 else 0.0),
        40.0,
    ),
    "the sensor's value is unknown": sensor(lambda passed: Reading(passed, kernel=3), 40.0),
    "the first event is false": first_event_is_false,
}


@pytest.mark.parametrize("name", DISTURBANCES)
async def test_after_a_fault_the_next_ten_requests_equal_a_clean_runs(
    autojump_clock: MockClock, tmp_path: Path, name: str
) -> None:
    traffic, ten = await clean(tmp_path)
    CLEAN.clear()
    CLEAN.update(traffic)
    async with bench(tmp_path / "parked") as one:
        await DISTURBANCES[name](one)
        assert await one.ten() == ten
        assert one.model.view().state == "ready"
        assert one.model.scheduler is not None
        one.model.scheduler.check_integrity()


async def test_a_lane_that_the_engine_fails_ends_with_its_code_and_nobody_elses_does(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    traffic, ten = await clean(tmp_path)
    CLEAN.clear()
    CLEAN.update(traffic)
    async with bench(tmp_path / "parked") as one:
        one.faults.on = {"decode says -1": 17}
        heard = await one.traffic()
        assert one.faults.met["decode says -1"] > 1
        one.faults.on = {}
        check(heard, typed=f"{FinishReason.ERROR}: engine_fault")
        assert any(text.startswith(str(FinishReason.ERROR)) for texts in heard.values() for text in texts)
        assert await one.ten() == ten


async def test_the_clean_run_uses_every_tier(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        await one.traffic()
        await one.model.wait_parked()
        await one.ten()
        view = one.model.view()
        used = (view.exports, view.imports, view.parks, view.prefix_hits, view.preemptions["background"])
        assert min(used) > 0, used

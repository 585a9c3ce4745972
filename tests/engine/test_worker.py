"""Real worker processes on the real clock, with the simulated runtime, and impostors in a worker's place.

No test leaves a process behind: ``start`` remembers every pid it started, and checks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
import pytest
import trio

from superfluidd.engine import wire
from superfluidd.engine.client import EngineLost, LoadRefused, WorkerEngine
from superfluidd.engine.framing import FrameDecoder, FrameEncoder
from superfluidd.engine.wire import LoadSpec
from superfluidd.engine.worker import Pace
from superfluidd.errors import EngineFault
from superfluidd.scheduling.plan import Decode, Plan, Prefill, TickReport
from superfluidd.types import SamplingParams
from tests.engine.contract import seat

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
WORKER = [sys.executable, "-m", "superfluidd", "worker", "--log-level", "critical"]
PROMPT = tuple(range(300, 310))
FOREVER = SamplingParams(temperature=0.0, ignore_eos=True)


def spec(speed: float = 1.0, **changed: Any) -> LoadSpec:
    fields = {"lanes": 4, "window": 4096, "layout": "per-sequence", "cells": 0, **changed}
    return LoadSpec("simulated", "", simulated_speed=speed, **fields)


def plan(tick: int = 1, rounds: int = 2) -> Plan:
    return Plan(
        tick, admit=(seat(1, 0, PROMPT, FOREVER),), prefill=(Prefill(1, 10),), decode=(Decode(1, rounds),)
    )  # fmt: skip


def alive(pid: int) -> bool:
    """It exists, and is not merely waiting to be reaped by someone else."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Start(Protocol):
    lost: list[None]

    async def __call__(
        self, spec: LoadSpec, argv: list[str] | None = None
    ) -> tuple[WorkerEngine, WorkerEngine | LoadRefused | EngineLost]: ...


@pytest.fixture
async def start(nursery: trio.Nursery) -> AsyncIterator[Start]:
    """Starts workers; afterwards none may be left, neither running nor unreaped."""
    engines: list[WorkerEngine] = []

    class Starter:
        def __init__(self) -> None:
            self.lost: list[None] = []

        async def __call__(
            self, spec: LoadSpec, argv: list[str] | None = None
        ) -> tuple[WorkerEngine, WorkerEngine | LoadRefused | EngineLost]:
            engine = WorkerEngine(argv or WORKER, lambda: self.lost.append(None), lambda share: None)
            engines.append(engine)
            return engine, await engine.start(nursery, spec)

    yield Starter()
    for engine in engines:
        if engine.pid:
            await engine.close(0.5)
            assert not psutil.pid_exists(engine.pid), "a worker, or what is left of one, outlived close()"


def impostor(code: str) -> list[str]:
    """A program in the worker's place: ``sock`` is its end of the link, ``send`` sends a message."""
    return [
        sys.executable,
        "-c",
        "import msgspec, os, socket, sys, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from superfluidd.engine import wire\n"
        "from superfluidd.engine.framing import FrameEncoder\n"
        "sock = socket.socket(fileno=int(sys.argv[-1]))\n"
        "def send(message): sock.sendall(FrameEncoder().encode(message))\n" + code,
    ]


async def wait_until(what: Callable[[], bool], seconds: float = 5.0) -> None:
    with trio.fail_after(seconds):
        await trio.lowlevel.checkpoint()
        while not what():  # noqa: ASYNC110 - other processes set no events
            await trio.sleep(0.01)


# -- a worker that works ------------------------------------------------------------------------------------------


async def test_hello_brings_the_facts_and_the_vocabulary(start: Start) -> None:
    engine, answer = await start(spec())
    assert answer is engine
    assert engine.lost is None
    assert alive(engine.pid)
    assert (engine.info.runtime, engine.info.sequences, engine.info.window) == ("simulated", 4, 4096)
    assert len(engine.vocabulary) == engine.info.vocabulary
    assert engine.vocabulary.decode([65, 66]) == "AB"
    assert psutil.Process(engine.pid).ppid() == os.getpid()
    assert os.getpgid(engine.pid) == engine.pid, "it has a process group of its own"


async def test_steps_arrive_while_the_tick_runs(start: Start) -> None:
    engine, _ = await start(spec(speed=0.2))  # a round takes 45 ms: far above what is held back
    came: list[tuple[float, wire.StepDone]] = []
    report = await engine.tick(plan(rounds=5), lambda step: came.append((time.monotonic(), step)))
    assert isinstance(report, TickReport)
    assert [len(step.tokens) for _, step in came] == [1] * 6, "every round of a slow model leaves as it ends"
    assert came[-1][0] - came[0][0] > 0.1, "they come one after the other and not all at the end"
    assert report.decoded == ((1, 6),)


async def test_decode_tokens_do_not_wait_for_the_prefill_step_after_them(start: Start) -> None:
    engine, _ = await start(spec(speed=1.0))
    await engine.tick(plan(rounds=0), lambda step: None)
    came: list[tuple[float, wire.StepDone]] = []
    beside = Plan(
        2,
        admit=(seat(2, 1, PROMPT * 10),),
        prefill=(Prefill(2, 100),),  # two steps of 50 tokens: 127 ms each, a round 9 ms
        decode=(Decode(1, 2),),
        step_tokens=50,
    )
    await engine.tick(beside, lambda step: came.append((time.monotonic(), step)))
    assert [[out.request for out in step.tokens] for _, step in came] == [[1], [], [1], [2]]
    assert came[1][0] - came[0][0] > 0.06


async def test_fast_rounds_travel_together_and_nothing_is_lost_or_reordered(start: Start) -> None:
    engine, _ = await start(spec(speed=50.0))
    steps: list[wire.StepDone] = []
    report = await engine.tick(plan(rounds=300), steps.append)
    assert isinstance(report, TickReport)
    tokens = [out for step in steps for out in step.tokens]
    assert [out.position for out in tokens] == list(range(10, 311))
    assert len(steps) < 100, "300 rounds of 0.2 ms each do not wake the daemon 300 times"
    assert dict(report.decoded) == {1: 301}


def test_the_pace_of_a_tick_says_when_it_ends() -> None:
    pace = Pace(rounds=5, now=1.0)
    assert pace.seconds_left() == 0.0
    pace.step(1.25, decode=False)
    assert pace.seconds_left() == 0.0, "a prefill step says nothing about rounds"
    pace.step(1.26, decode=True)
    assert pace.seconds_left() == pytest.approx(4 * 0.01)
    pace.step(1.28, decode=True)
    assert pace.seconds_left() == pytest.approx(3 * 0.02), "the latest round counts"
    for now in (1.29, 1.3, 1.31, 1.32):
        pace.step(now, decode=True)
    assert pace.seconds_left() == 0.0


async def test_an_interrupt_ends_the_tick_at_the_next_step(start: Start) -> None:
    engine, _ = await start(spec(speed=0.5))
    steps: list[wire.StepDone] = []

    def on_step(step: wire.StepDone) -> None:
        steps.append(step)
        if len(steps) == 3:
            engine.interrupt(1)

    report = await engine.tick(plan(rounds=1000), on_step)
    assert isinstance(report, TickReport)
    assert report.outcome == "stopped"
    # The one on its way, and the one that ended while the interrupt travelled.
    assert 3 <= len(steps) <= 5
    assert dict(report.decoded)[1] == sum(len(step.tokens) for step in steps)
    engine.interrupt(1)  # of a tick that is over: ignored
    again = await engine.tick(Plan(2, decode=(Decode(1, 3),)), lambda step: None)
    assert isinstance(again, TickReport)
    assert (again.outcome, again.decoded) == ("done", ((1, 3),))


async def test_tokenizing_never_waits_for_a_tick(start: Start) -> None:
    engine, _ = await start(spec(speed=0.002))  # a round takes 4.5 s
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.tick, plan(rounds=1000), lambda step: None)
        await trio.sleep(0.05)
        began = time.monotonic()
        answers = [await engine.tokenize(f"A{digit}", add_bos=False, parse_special=False) for digit in range(5)]
        assert time.monotonic() - began < 2
        assert answers == [[65, 48 + digit] for digit in range(5)]
        nursery.cancel_scope.cancel()


async def test_many_tokenize_calls_at_once_each_get_their_own_answer(start: Start) -> None:
    engine, _ = await start(spec())
    answers: dict[int, list[int] | None] = {}

    async def ask(number: int) -> None:
        text = str(number) * (number * 50)
        answers[number] = await engine.tokenize(text, add_bos=False, parse_special=False)

    async with trio.open_nursery() as nursery:
        for number in range(60):
            nursery.start_soon(ask, number)
    assert answers == {number: list((str(number) * (number * 50)).encode()) for number in range(60)}


async def test_a_text_larger_than_any_socket_buffer_goes_through(start: Start) -> None:
    engine, _ = await start(spec())
    tokens = await engine.tokenize("x" * 3_000_000, add_bos=True, parse_special=False)
    assert tokens is not None
    assert len(tokens) == 3_000_001


async def test_a_tokenize_call_that_is_given_up_disturbs_no_other(start: Start) -> None:
    engine, _ = await start(spec())
    with trio.move_on_after(0):
        await engine.tokenize("x" * 1_000_000, add_bos=False, parse_special=False)
    assert await engine.tokenize("ab", add_bos=False, parse_special=False) == [97, 98]


async def test_half_a_character_is_a_typed_error_and_harms_nobody(start: Start) -> None:
    engine, _ = await start(spec())
    with pytest.raises(EngineFault, match="cannot be tokenized"):
        await engine.tokenize("\ud800", add_bos=False, parse_special=False)
    assert await engine.tokenize("ab", add_bos=False, parse_special=False) == [97, 98]


async def test_close_ends_an_idle_worker_at_once_and_may_be_repeated(start: Start) -> None:
    engine, _ = await start(spec())
    began = time.monotonic()
    await engine.close(5.0)
    assert time.monotonic() - began < 2.0
    assert not psutil.pid_exists(engine.pid)
    await engine.close(5.0)
    await wait_until(lambda: engine.lost is not None)
    assert start.lost == [], "an engine that was closed is not lost"
    assert isinstance(await engine.tick(plan(), lambda step: None), EngineLost)
    assert await engine.tokenize("x", add_bos=False, parse_special=False) is None


async def test_a_worker_ignores_ctrl_c(start: Start) -> None:
    engine, _ = await start(spec())
    os.kill(engine.pid, signal.SIGINT)
    report = await engine.tick(plan(), lambda step: None)
    assert isinstance(report, TickReport)


# -- a worker that dies -------------------------------------------------------------------------------------------


async def test_a_worker_killed_in_mid_tick_is_a_value_that_names_the_signal(start: Start) -> None:
    engine, _ = await start(spec())

    def kill_once(step: wire.StepDone) -> None:
        if alive(engine.pid):
            os.kill(engine.pid, signal.SIGKILL)

    # The report of an earlier tick must not pass for this one's.
    assert isinstance(await engine.tick(plan(rounds=2), lambda step: None), TickReport)
    with trio.fail_after(5):
        outcome = await engine.tick(Plan(2, decode=(Decode(1, 1000),)), kill_once)
    assert isinstance(outcome, EngineLost)
    assert outcome.why == f"worker {engine.pid} was killed by SIGKILL"
    assert engine.lost == outcome
    assert start.lost == [None]
    assert await engine.tick(Plan(3), lambda step: None) == outcome
    assert await engine.tokenize("x", add_bos=False, parse_special=False) is None


async def test_a_tokenize_call_ends_when_the_worker_dies(start: Start) -> None:
    engine, _ = await start(spec())
    os.kill(engine.pid, signal.SIGSTOP)
    async with trio.open_nursery() as nursery:

        async def kill() -> None:
            await trio.sleep(0.05)
            os.kill(engine.pid, signal.SIGKILL)

        nursery.start_soon(kill)
        with trio.fail_after(5):
            # More than the socket takes, so that the writer waits as well.
            assert await engine.tokenize("x" * 5_000_000, add_bos=False, parse_special=False) is None
    assert start.lost == [None]


async def test_an_idle_workers_death_is_noticed(start: Start) -> None:
    engine, _ = await start(spec())
    os.kill(engine.pid, signal.SIGTERM)
    await wait_until(lambda: bool(start.lost))
    assert engine.lost == EngineLost(f"worker {engine.pid} was killed by SIGTERM")


async def test_a_plan_that_cannot_be_ends_the_worker_with_its_reason(start: Start) -> None:
    engine, _ = await start(spec())
    outcome = await engine.tick(Plan(1, decode=(Decode(9, 1),)), lambda step: None)
    assert isinstance(outcome, EngineLost)
    assert "exited with code 1: BadPlan: tick 1 names requests [9] that have no lane" in outcome.why


@pytest.mark.parametrize("busy", [False, True])
async def test_close_kills_a_frozen_worker_after_the_grace(start: Start, busy: bool) -> None:
    engine, _ = await start(spec())
    async with trio.open_nursery() as nursery:
        if busy:
            nursery.start_soon(engine.tick, plan(rounds=1000), lambda step: None)
            await trio.sleep(0.05)
        os.kill(engine.pid, signal.SIGSTOP)
        began = time.monotonic()
        await engine.close(0.3)
        assert 0.25 < time.monotonic() - began < 3
        assert not psutil.pid_exists(engine.pid)
    assert start.lost == []


async def test_close_in_mid_tick_kills_what_does_not_stop_in_time(start: Start) -> None:
    engine, _ = await start(spec(speed=0.01))
    outcomes: list[TickReport | EngineLost] = []
    async with trio.open_nursery() as nursery:

        async def tick() -> None:
            outcomes.append(await engine.tick(plan(rounds=1000), lambda step: None))

        nursery.start_soon(tick)
        await trio.sleep(0.05)
        await engine.close(0.1)
    assert isinstance(outcomes[0], EngineLost)


# -- loading ------------------------------------------------------------------------------------------------------


async def test_an_unknown_runtime_is_refused(start: Start) -> None:
    _, answer = await start(LoadSpec("abacus", "", 1, 64, "shared", 64))
    assert answer == LoadRefused("this worker knows no engine called 'abacus'")


async def test_a_program_that_is_not_there_is_a_value(start: Start, tmp_path: Path) -> None:
    _, answer = await start(spec(), [str(tmp_path / "nothing")])
    assert isinstance(answer, EngineLost)
    assert "cannot be started" in answer.why
    assert "nothing" in answer.why


async def test_a_worker_that_ends_before_its_hello_is_lost(start: Start) -> None:
    _, answer = await start(spec(), [sys.executable, "-c", "import sys; sys.exit(7)"])
    assert isinstance(answer, EngineLost)
    assert "exited with code 7" in answer.why


@pytest.mark.parametrize("cancel", ["start", "nursery"])
async def test_cancelling_a_start_leaves_no_process(cancel: str) -> None:
    lost: list[None] = []
    engine = WorkerEngine(impostor("time.sleep(60)"), lambda: lost.append(None), lambda share: None)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            if cancel == "start":
                with trio.move_on_after(0.05):
                    await engine.start(nursery, spec())
            else:
                nursery.cancel_scope.deadline = trio.current_time() + 0.05
                await engine.start(nursery, spec())
    assert engine.pid
    assert not psutil.pid_exists(engine.pid), "it is gone and reaped when the nursery has ended"
    assert lost == []


async def test_cancelling_the_nursery_ends_a_loaded_worker() -> None:
    engine = WorkerEngine(WORKER, lambda: None, lambda share: None)
    async with trio.open_nursery() as nursery:
        await engine.start(nursery, spec())
        nursery.start_soon(engine.tick, plan(rounds=1000), lambda step: None)
        await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    assert not psutil.pid_exists(engine.pid)


# -- impostors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "sock.sendall(b'HTTP/1.1 400 Bad Request'); time.sleep(60)",
            "it sent a bad frame: a frame of 1213486160 bytes",
        ),
        ("sock.sendall(b'\\0\\0\\0\\1\\xc1'); time.sleep(60)", "it sent a bad frame: undecodable frame of 1 bytes"),
        ("send(wire.Shutdown()); time.sleep(60)", "it sent a bad frame"),
        ("sock.sendall(b'\\0\\0'); sock.close(); sys.exit(3)", "exited with code 3"),
        ("send(wire.Fatal('the sky is falling')); sys.exit(1)", "exited with code 1: the sky is falling"),
        ("sock.close(); time.sleep(60)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
    ],
)
async def test_garbage_from_a_worker_is_a_lost_engine_and_a_dead_process(start: Start, code: str, words: str) -> None:
    with trio.fail_after(10):
        engine, answer = await start(spec(), impostor(code))
    assert isinstance(answer, EngineLost)
    assert words in answer.why
    assert not psutil.pid_exists(engine.pid)


HELLO = """
from superfluidd.engine.runtimes.simulated import SimulatedRuntime
from superfluidd.scheduling.plan import TickReport
info = SimulatedRuntime(wire.LoadSpec("simulated", "", 2, 64, "per-sequence", 0)).info
"""


async def test_a_worker_of_another_protocol_is_refused_with_both_numbers(start: Start) -> None:
    code = HELLO + "send(wire.Hello(99, os.getpid(), info, b'', b'')); time.sleep(60)"
    _, answer = await start(spec(), impostor(code))
    assert answer == LoadRefused(f"the worker speaks protocol 99, not {wire.PROTOCOL}")


async def test_a_vocabulary_that_contradicts_itself_is_a_lost_engine(start: Start) -> None:
    code = HELLO + "send(wire.Hello(wire.PROTOCOL, os.getpid(), info, b'abc', b'x')); time.sleep(60)"
    _, answer = await start(spec(), impostor(code))
    assert isinstance(answer, EngineLost)
    assert "its vocabulary is broken" in answer.why


async def test_answers_nobody_asked_for_are_ignored(start: Start) -> None:
    code = HELLO + (
        "send(wire.Tokenized(5, (1,)))\n"
        "send(wire.StepDone(9, ()))\n"
        "send(wire.TickDone(TickReport(9, 'done')))\n"
        "send(wire.Hello(wire.PROTOCOL, os.getpid(), info, b'', b''))\n"
        "time.sleep(60)"
    )
    engine, answer = await start(spec(), impostor(code))
    assert answer is engine
    with trio.move_on_after(0.1) as scope:
        await engine.tick(plan(), lambda step: None)
    assert scope.cancelled_caught, "an earlier report must not pass for this tick's"


# -- the worker's own side: a daemon that is not ours ----------------------------------------------------------------


class Bare:
    """A worker process and our end of its socket, without the client."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(10)
        self.process = subprocess.Popen([*WORKER, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=ROOT)
        theirs.close()
        self._decoder = FrameDecoder(msgspec.msgpack.Decoder(wire.FromWorker))

    def send(self, *messages: msgspec.Struct) -> None:
        self.socket.sendall(b"".join(map(FrameEncoder().encode, messages)))

    def receive(self) -> wire.FromWorker:
        while not (came := self._decoder.feed(self.socket.recv(1 << 20))):
            pass
        return came[-1]

    def close(self) -> None:
        self.socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


@pytest.fixture
def bare() -> Any:
    worker = Bare()
    yield worker
    worker.close()


def test_a_worker_refuses_another_protocol_with_both_numbers(bare: Bare) -> None:
    bare.send(wire.Load(99, spec()))
    assert bare.receive() == wire.Refused(f"the daemon speaks protocol 99, this worker {wire.PROTOCOL}")
    assert bare.process.wait(5) == 1


def test_a_worker_that_is_not_told_to_load_first_exits(bare: Bare) -> None:
    bare.send(wire.Tick(Plan(1)))
    assert bare.process.wait(10) == 1


def test_shutdown_exits_0(bare: Bare) -> None:
    bare.send(wire.Load(wire.PROTOCOL, spec()))
    assert isinstance(bare.receive(), wire.Hello)
    bare.send(wire.Shutdown())
    assert bare.process.wait(5) == 0


@pytest.mark.parametrize("state", ["before its load", "idle", "in a tick", "sent garbage"])
def test_a_worker_ends_at_once_when_the_daemon_is_gone(bare: Bare, state: str) -> None:
    if state != "before its load":
        bare.send(wire.Load(wire.PROTOCOL, spec(speed=0.002)))
        assert isinstance(bare.receive(), wire.Hello)
    if state == "in a tick":
        bare.send(wire.Tick(plan(rounds=1000)))
        time.sleep(0.1)
    if state == "sent garbage":
        bare.socket.sendall(b"\0\0\0\1\xc1")
    else:
        bare.socket.close()
    began = time.monotonic()
    bare.process.wait(10)
    assert time.monotonic() - began < 3, "a round of 4.5 s must not hold it up"


def test_a_frozen_worker_whose_daemon_is_gone_ends_when_it_thaws(bare: Bare) -> None:
    bare.send(wire.Load(wire.PROTOCOL, spec()))
    assert isinstance(bare.receive(), wire.Hello)
    os.kill(bare.process.pid, signal.SIGSTOP)
    time.sleep(0.1)  # all of its threads have to stop first
    bare.socket.close()
    time.sleep(0.1)
    assert alive(bare.process.pid)
    os.kill(bare.process.pid, signal.SIGCONT)
    assert bare.process.wait(5) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to be killed with its parent")
@pytest.mark.parametrize("frozen", [False, True])
def test_no_orphan_is_left_when_the_parent_is_killed_even_a_frozen_one(tmp_path: Path, frozen: bool) -> None:
    """The link is kept open by somebody else here, so that only the parent's death can end the worker."""
    code = (
        "import socket, subprocess, sys, time\n"
        "ours, theirs = socket.socketpair()\n"
        f"worker = subprocess.Popen({WORKER!r} + ['--fd', str(theirs.fileno())], pass_fds=[theirs.fileno()])\n"
        "ours.recv(0)\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from superfluidd.engine import wire\n"
        "from superfluidd.engine.framing import FrameEncoder\n"
        "spec = wire.LoadSpec('simulated', '', 1, 64, 'shared', 64)\n"
        "ours.sendall(FrameEncoder().encode(wire.Load(wire.PROTOCOL, spec)))\n"
        "ours.recv(100)\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if frozen:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
        parent.wait(5)
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    orphaned = alive(pid)
    if orphaned:
        os.kill(pid, signal.SIGKILL)
    assert not orphaned

"""The daemon's side of a worker: spawn, hello, tick, interrupt, tokenize. Death is a value, not an exception."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol

import msgspec
import trio

from superfluidd.engine import wire
from superfluidd.engine.framing import BadFrame, FrameDecoder, FrameEncoder
from superfluidd.engine.parking import Parked
from superfluidd.engine.port import EngineInfo
from superfluidd.errors import EngineFault
from superfluidd.scheduling.plan import OutOfOrder, Plan, TickReport
from superfluidd.text.vocabulary import Vocabulary

log = logging.getLogger(__name__)


class EngineLost(msgspec.Struct, frozen=True):
    """The engine is gone with everything it held; ``why`` says how."""

    why: str


class LoadRefused(msgspec.Struct, frozen=True):
    """The engine cannot load the model, and will not be able to next time."""

    message: str


def _nothing() -> None:
    """Nothing to do."""


class Engine(Protocol):
    """A loaded engine as the model's task sees it: a worker process, or one in process.

    Resource handling: :meth:`close` ends it; it may be called in any state and more than once.
    """

    info: EngineInfo
    vocabulary: Vocabulary
    pid: int
    lost: EngineLost | None
    parked: tuple[Parked, ...]
    """What was found on disk when it started."""
    on_sealed: Callable[[str, int], None]
    """To be set by whoever wants to know what became of a :class:`~superfluidd.scheduling.plan.Park`."""

    async def tick(
        self, plan: Plan, on_step: Callable[[wire.StepDone], None], on_sent: Callable[[], None] = _nothing
    ) -> TickReport | EngineLost:
        """Run a plan. ``on_step`` is called, synchronously, for every step as it ends; ``on_sent`` once the plan is on
        its way: what need not come before the engine is at work again is done there."""

    def interrupt(self, tick: int, *, abandon: bool = False) -> None:
        """End that tick at the engine's next step; ``abandon`` gives a prefill step that is running up."""

    async def tokenize(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int] | None:
        """Token ids; None if the engine is lost. Raises :class:`EngineFault` for a text it cannot take."""

    async def close(self, grace: float) -> None:
        """End the engine within ``grace`` seconds, by force if need be."""


class StartEngine(Protocol):
    """Starts an engine inside a nursery; returns once it is loaded, refused or lost."""

    async def __call__(
        self, nursery: trio.Nursery, on_lost: Callable[[], None], on_progress: Callable[[float], None]
    ) -> Engine | LoadRefused | EngineLost: ...


def worker_starter(spec: wire.LoadSpec, *, log_level: str = "info", log_format: str = "text") -> StartEngine:
    """A starter of worker processes for one model."""

    async def start(
        nursery: trio.Nursery, on_lost: Callable[[], None], on_progress: Callable[[float], None]
    ) -> Engine | LoadRefused | EngineLost:
        argv = [sys.executable, "-m", "superfluidd", "worker", "--log-level", log_level, "--log-format", log_format]
        engine = WorkerEngine(argv, on_lost, on_progress)
        return await engine.start(nursery, spec)

    return start


class WorkerEngine:
    """A worker process and the socket to it.

    Args:
        argv: the command; ``--fd N`` is added.
        on_lost: called once if the worker goes away without having been closed.
        on_progress: told the share of the model loaded.
    """

    info: EngineInfo
    vocabulary: Vocabulary

    def __init__(self, argv: list[str], on_lost: Callable[[], None], on_progress: Callable[[float], None]) -> None:
        self.pid = 0
        self.lost: EngineLost | None = None
        self.parked: tuple[Parked, ...] = ()
        self.on_sealed: Callable[[str, int], None] = lambda key, size: None
        self._argv = argv
        self._on_lost = on_lost
        self._on_progress = on_progress
        self._encoder = FrameEncoder()
        self._unsent = bytearray()
        self._writable_wanted = trio.Event()
        self._greeted = trio.Event()
        self._greeting: LoadRefused | None = None
        self._on_step: Callable[[wire.StepDone], None] | None = None
        self._report: TickReport | None = None
        self._tick_over = trio.Event()
        self._calls: dict[int, trio.Event] = {}
        self._answers: dict[int, wire.Tokenized] = {}
        self._last_call = 0
        self._closing = False
        self._fatal = ""

    async def start(self, nursery: trio.Nursery, spec: wire.LoadSpec) -> WorkerEngine | LoadRefused | EngineLost:
        """Spawn the worker and load the model."""
        ours, theirs = socket.socketpair()
        try:
            # Started from the main thread, not from one of Trio's: the worker asks Linux to be killed when the
            # thread that started it ends.
            self._process = subprocess.Popen(  # noqa: ASYNC220 - see above; it takes a few milliseconds
                [*self._argv, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            ours.close()
            return EngineLost(f"the worker cannot be started: {error}")
        finally:
            theirs.close()
        self.pid = self._process.pid
        ours.setblocking(False)
        self._socket = trio.socket.from_stdlib_socket(ours)
        self._raw = ours
        nursery.start_soon(self._read)
        nursery.start_soon(self._write)
        self._post(wire.Load(wire.PROTOCOL, spec))
        try:
            await self._greeted.wait()
        except trio.Cancelled:
            self._closing = True
            self._kill()
            raise
        return self._greeting or self.lost or self

    # -- the link -------------------------------------------------------------------------------------------------

    def _post(self, message: msgspec.Struct) -> None:
        """Send without waiting: at once if the socket takes it, else from the writer task."""
        if self.lost:
            return
        frame = self._encoder.encode(message)
        sent = 0
        if not self._unsent:
            try:
                sent = self._raw.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the reader is about to see it, too
        if sent < len(frame):
            self._unsent += frame[sent:]
            self._writable_wanted.set()

    async def _write(self) -> None:
        try:
            while not self.lost:
                await self._writable_wanted.wait()
                self._writable_wanted = trio.Event()
                while self._unsent:
                    sent = await self._socket.send(memoryview(bytes(self._unsent[: 1 << 18])))
                    del self._unsent[:sent]
        except (OSError, trio.ClosedResourceError):
            return

    async def _read(self) -> None:
        decoder = FrameDecoder(msgspec.msgpack.Decoder(wire.FromWorker))
        why = ""
        try:
            while data := await self._socket.recv(1 << 18):
                for message in decoder.feed(data):
                    self._receive(message)
        except OSError as error:
            # A process that dies with unread data resets the link: its exit code says more.
            log.debug("the link to worker %d broke: %s", self.pid, error)
        except BadFrame as error:
            why = f"it sent a bad frame: {error}"
        except OutOfOrder as error:
            why = f"it sent what cannot be: {error}"
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                self._kill()
                await self._exit_code(5.0)
            self._socket.close()
            raise
        await self._bury(why)

    def _receive(self, message: wire.FromWorker) -> None:
        match message:
            case wire.StepDone():
                if self._on_step is not None:
                    self._on_step(message)
            case wire.TickDone():
                self._report = message.report
                self._tick_over.set()
            case wire.Tokenized():
                waiting = self._calls.pop(message.call, None)
                if waiting is not None:
                    self._answers[message.call] = message
                    waiting.set()
            case wire.Loading():
                self._on_progress(message.fraction)
            case wire.Hello():
                if message.protocol != wire.PROTOCOL:
                    self._greeting = LoadRefused(f"the worker speaks protocol {message.protocol}, not {wire.PROTOCOL}")
                    self._kill()
                try:
                    self.vocabulary = Vocabulary(message.pieces, message.ends)
                except ValueError as error:
                    raise BadFrame(f"its vocabulary is broken: {error}") from error
                self.info, self.parked = message.info, message.parked
                self._greeted.set()
            case wire.Refused():
                self._greeting = LoadRefused(message.message)
                self._greeted.set()
            case wire.Sealed():
                self.on_sealed(message.key, message.size)
            case wire.Fatal():
                self._fatal = message.message
                log.error("worker %d: %s", self.pid, message.message)

    async def _bury(self, why: str) -> None:
        """The link is down: make sure the process is, and tell everyone who waits."""
        with trio.CancelScope(shield=True):
            if why:
                self._kill()
            code = await self._exit_code(2.0)
            if code is None:
                self._kill()
                code = await self._exit_code(5.0)
        why = why or self._fatal
        self.lost = EngineLost(f"worker {self.pid} {_describe(code)}" + (f": {why}" if why else ""))
        self._socket.close()
        for event in (self._greeted, self._tick_over, self._writable_wanted, *self._calls.values()):
            event.set()
        self._calls.clear()
        if not self._closing:
            self._on_lost()

    async def _exit_code(self, seconds: float) -> int | None:
        """Its exit code, once it has one; None if it has none in time. A process that ends is no event to wait for."""
        deadline = trio.current_time() + seconds
        while (code := self._process.poll()) is None and trio.current_time() < deadline:  # noqa: ASYNC110 - see above
            await trio.sleep(0.01)
        return code

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    # -- what the model's task calls ------------------------------------------------------------------------------

    async def tick(
        self, plan: Plan, on_step: Callable[[wire.StepDone], None], on_sent: Callable[[], None] = _nothing
    ) -> TickReport | EngineLost:
        """See :class:`Engine`."""
        if self.lost:
            on_sent()
            return self.lost
        self._on_step = on_step
        self._report = None
        self._tick_over = trio.Event()
        self._post(wire.Tick(plan))
        on_sent()
        await self._tick_over.wait()
        self._on_step = None
        return self._outcome()

    def _outcome(self) -> TickReport | EngineLost:
        return self._report or self.lost or EngineLost("no report came")

    def interrupt(self, tick: int, *, abandon: bool = False) -> None:
        """See :class:`Engine`."""
        self._post(wire.Interrupt(tick, abandon))

    async def tokenize(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int] | None:
        """See :class:`Engine`."""
        self._last_call += 1
        call = self._last_call
        answered = trio.Event()
        if not self.lost:
            self._calls[call] = answered
            try:
                self._post(wire.Tokenize(call, text, add_bos, parse_special))
                await answered.wait()
            except UnicodeEncodeError as error:
                raise EngineFault(f"the text cannot be tokenized: {error}") from error
            finally:
                self._calls.pop(call, None)
        answer = self._answers.pop(call, None)
        if answer is None:
            return None
        if answer.error:
            raise EngineFault(f"the text cannot be tokenized: {answer.error}")
        return list(answer.tokens)

    async def close(self, grace: float) -> None:
        """See :class:`Engine`."""
        self._closing = True
        self._post(wire.Shutdown())
        with trio.CancelScope(shield=True):
            if await self._exit_code(grace) is None:
                log.warning("worker %d did not end within %.1f s; killing it", self.pid, grace)
                self._kill()
                await self._exit_code(5.0)


def _describe(code: int | None) -> str:
    if code is None:
        return "does not end"
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"exited with code {code}"

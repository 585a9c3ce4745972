"""The worker process: one model, a plain blocking loop, no Trio.

Three threads. *Reader*: takes frames off the socket; it is what notices that the daemon is gone, and it ends the
process at once then, whatever the others are doing. *Tokenizer*: answers tokenize calls, so that they never wait for
a tick. *Main*: loads the model and runs ticks; native code runs with the interpreter lock released.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec

from superfluidd import logs
from superfluidd.engine import parking, wire
from superfluidd.engine.executor import Executor, StepStarting
from superfluidd.engine.framing import BadFrame, FrameDecoder, FrameEncoder
from superfluidd.engine.neighbours import Neighbours
from superfluidd.engine.parking import Store
from superfluidd.engine.port import EngineError, LoadFailed, Runtime
from superfluidd.engine.threads import FixedThreads, MeasuredThreads
from superfluidd.scheduling.plan import Plan
from superfluidd.text.vocabulary import Vocabulary

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1

FLUSH_SECONDS = 0.04
"""How long a token may be held back to travel with the next ones: 25 times a second looks like a steady stream."""


def command(argv: list[str]) -> int:
    """``superfluidd worker --fd N``: internal; the daemon starts it. Serves until told to stop, or until the daemon
    on the other end of that socket goes away."""
    parser = argparse.ArgumentParser(prog="superfluidd worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")
    args = parser.parse_args(argv)
    logs.configure(args.log_format, args.log_level)
    faulthandler.enable()
    # Ctrl-C reaches the whole foreground process group; only the daemon decides when a worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    return _Worker(socket.socket(fileno=args.fd)).run()


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the daemon's main thread ends, even while this process is stopped."""
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        log.debug("prctl is not available; end of file on the socket has to do")


class Pace:
    """How long the decode rounds of a tick still take, going by those that are over.

    Args:
        rounds: rounds granted.
        now: the tick's beginning, seconds on any clock.
    """

    def __init__(self, rounds: int, now: float) -> None:
        self._left = rounds
        self._last = now
        self._round = 0.0

    def step(self, now: float, *, decode: bool) -> None:
        """A step is over: a decode round, or a prefill micro-batch."""
        if decode:
            self._round = now - self._last
            self._left -= 1
        self._last = now

    def seconds_left(self) -> float:
        """Until the last round's end, at the pace of the latest."""
        return max(0, self._left) * self._round


class _Worker:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._encoder = FrameEncoder()
        self._send_lock = threading.Lock()
        self._work: queue.SimpleQueue[wire.Load | wire.Tick | wire.Shutdown] = queue.SimpleQueue()
        self._texts: queue.SimpleQueue[wire.Tokenize] = queue.SimpleQueue()
        self._runtime: Runtime | None = None
        self._tick = 0
        self._interrupted = 0
        self._ending = False
        self._vocabulary_lock = threading.Lock()

    def run(self) -> int:
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        first = self._work.get()
        if not isinstance(first, wire.Load):
            return 1
        if first.protocol != wire.PROTOCOL:
            self._send(wire.Refused(f"the daemon speaks protocol {first.protocol}, this worker {wire.PROTOCOL}"))
            return 1
        try:
            runtime = self._load(first.spec)
        except LoadFailed as error:
            self._send(wire.Refused(str(error)))
            return 1
        store = self._open_store(runtime, first.spec)
        try:
            return self._serve(runtime, store)
        except Exception as error:
            log.exception("the worker cannot go on")
            self._send(wire.Fatal(f"{type(error).__name__}: {error}"))
            return 1
        finally:
            if store is not None:
                store.close()
            with self._vocabulary_lock:  # a text may be on its way through the vocabulary
                runtime.close()

    def _load(self, spec: wire.LoadSpec) -> Runtime:
        last = -1.0

        def progress(fraction: float) -> None:
            nonlocal last
            if fraction - last >= 0.02 or fraction >= 1.0:
                last = fraction
                self._send(wire.Loading(fraction))

        if spec.runtime == "simulated":
            from superfluidd.engine.runtimes.simulated import SimulatedRuntime

            return SimulatedRuntime(spec, pace=time.sleep)
        if spec.runtime == "llamacpp":
            try:
                from superfluidd.engine.runtimes.llamacpp import LlamaCppRuntime
            except (ImportError, OSError) as error:
                raise LoadFailed(f"llama-cpp-python cannot be loaded ({error}); install it again") from error
            return LlamaCppRuntime(spec, progress)
        if spec.runtime == "mlx":
            try:
                from superfluidd.engine.runtimes.mlx import MlxRuntime
            except (ImportError, OSError) as error:
                raise LoadFailed(f"MLX cannot be loaded ({error}); pip install 'superfluidd[mlx]'") from error
            return MlxRuntime(spec, progress)
        if spec.runtime == "basert":
            from superfluidd.engine.runtimes.basert import BasertRuntime

            return BasertRuntime(spec, progress)
        raise LoadFailed(f"this worker knows no engine called {spec.runtime!r}")

    def _open_store(self, runtime: Runtime, spec: wire.LoadSpec) -> Store | None:
        """Where KV is parked. Without it the model is served all the same."""
        if not spec.park:
            return None
        try:
            known = parking.identity(Path(spec.path), runtime.info)
            return Store(Path(spec.park), known, lambda key, size: self._send(wire.Sealed(key, size)))
        except OSError as error:
            held = isinstance(error, BlockingIOError)
            why = "another process parks there" if held else error.strerror or str(error)
            log.warning("nothing is parked: %s: %s", spec.park, why)
            return None

    def _serve(self, runtime: Runtime, store: Store | None) -> int:
        pieces, ends = Vocabulary.pack(runtime.pieces())
        parked = store.scan() if store is not None else ()
        self._send(wire.Hello(wire.PROTOCOL, os.getpid(), runtime.info, pieces, ends, parked))
        self._runtime = runtime
        threading.Thread(target=self._tokenize, args=(runtime,), name="tokenizer", daemon=True).start()
        most = runtime.info.threads
        threads = MeasuredThreads(most, Neighbours().cores) if most else FixedThreads()
        executor = Executor(runtime, threads, store)
        while True:
            message = self._work.get()
            if not isinstance(message, wire.Tick):
                return 0
            self._run_tick(executor, message.plan)

    def _run_tick(self, executor: Executor, plan: Plan) -> None:
        """Run a plan and stream its steps, a few fast ones to a frame.

        Waking the daemon for every token of a fast model takes the core away that a compute thread is waiting for;
        so tokens leave at once only when someone waits for them (a first token, a last one) or a prefill step may be
        next, and otherwise once FLUSH_SECONDS have passed since tokens last left. A round of a slower model takes
        longer than that and leaves as it ends. What would leave shortly before the tick ends waits for its report: one
        awakening of the daemon, not two.
        """
        self._tick = plan.tick
        steps = executor.run(plan, lambda: self._ending or self._interrupted == plan.tick)
        granted, fed = sum(chunk.tokens for chunk in plan.prefill), 0
        held: list[wire.TokenOut] = []
        since = time.monotonic()
        pace = Pace(max((grant.rounds for grant in plan.decode), default=0), since)
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                last = [wire.StepDone(plan.tick, tuple(held), last=True)] if held else []
                self._send(*last, wire.TickDone(end.value))
                return
            if isinstance(step, StepStarting):
                continue
            held += step.tokens
            if step.prefilled:
                fed = sum(tokens for _, tokens in step.prefilled)
            urgent = step.prefilled or fed < granted or any(token.end for token in step.tokens)
            now = time.monotonic()
            pace.step(now, decode=not step.prefilled)
            if urgent or (now - since >= FLUSH_SECONDS and pace.seconds_left() > FLUSH_SECONDS / 2):
                self._send(wire.StepDone(plan.tick, tuple(held), step.prefilled))
                held.clear()
                since = now

    def _tokenize(self, runtime: Runtime) -> None:
        while True:
            call = self._texts.get()
            try:
                with self._vocabulary_lock:
                    tokens = runtime.tokenize(call.text, add_bos=call.add_bos, parse_special=call.parse_special)
                self._send(wire.Tokenized(call.call, tuple(tokens)))
            except (EngineError, ValueError, MemoryError) as error:
                self._send(wire.Tokenized(call.call, (), f"{type(error).__name__}: {error}"))

    def _read(self) -> None:
        decoder = FrameDecoder(msgspec.msgpack.Decoder(wire.ToWorker))
        try:
            while data := self._socket.recv(1 << 18):
                for message in decoder.feed(data):
                    match message:
                        case wire.Interrupt():
                            self._interrupted = message.tick
                            if message.abandon and message.tick == self._tick and self._runtime is not None:
                                self._runtime.abandon(True)
                        case wire.Shutdown():
                            self._ending = True
                            self._work.put(message)
                        case wire.Tokenize():
                            self._texts.put(message)
                        case _:
                            self._work.put(message)
        except (OSError, BadFrame) as error:
            log.debug("the link to the daemon broke: %s", error)
        # The daemon is gone. Nothing here is worth saving, and the main thread may be deep in native code.
        os._exit(0)

    def _send(self, *messages: msgspec.Struct) -> None:
        frames = b"".join(map(self._encoder.encode, messages))
        try:
            with self._send_lock:
                self._socket.sendall(frames)
        except OSError:
            os._exit(0)

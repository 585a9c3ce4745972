"""One scheduler task per model: plan, tick, apply, deliver.

This is the only place where the pure scheduler, the engine and the clients' streams meet. The task never awaits a
client: tokens are pushed into :class:`~superfluidd.daemon.streams.Generation` synchronously. An engine that dies is
replaced and its lanes are prefilled again from the tokens already observed; their streams pause and go on.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import msgspec
import trio

from superfluidd.control.protocol import LaneView, ModelView, QueueView
from superfluidd.daemon.latency import Latency
from superfluidd.daemon.residency import Residency
from superfluidd.daemon.streams import Generation, GenerationRequest, Usage
from superfluidd.daemon.views import counted, lane_views, queue_views
from superfluidd.daemon.watch import TickWatch
from superfluidd.engine.client import Engine, EngineLost, LoadRefused, StartEngine
from superfluidd.engine.port import EngineInfo
from superfluidd.engine.wire import StepDone, TokenOut
from superfluidd.errors import ModelFailed, ModelUnloaded, SuperfluidError
from superfluidd.scheduling.books import Limits
from superfluidd.scheduling.entries import Cache
from superfluidd.scheduling.plan import Effect, Finished, OutOfOrder, Paused, Urgency
from superfluidd.scheduling.policy import Policy
from superfluidd.scheduling.pressure import Rung
from superfluidd.scheduling.request import Phase, Request
from superfluidd.scheduling.scheduler import TRAILS, Observed, Scheduler
from superfluidd.scheduling.shares import Budget, Share
from superfluidd.text.assembler import Assembler
from superfluidd.text.template import ChatTemplate
from superfluidd.text.vocabulary import Vocabulary
from superfluidd.types import FinishReason, QosClass, RequestId

log = logging.getLogger(__name__)

MOST_RESPAWNS = 3
"""Workers started in a row without one good tick before the model is given up."""

CLOSE_GRACE = 3.0
"""Seconds a worker has to end when told to."""

Refit = Callable[[], Awaitable[tuple[StartEngine, Cache]]]
"""Looks at a model's file again, and fits it to the memory there is now. Raises what a start would."""


class Footprint(msgspec.Struct, frozen=True):
    """Bytes of an engine's weights and of its KV pool.

    Attributes:
        taken: of the pool, by now.
        mapped: weights are pages of their file, which the operating system counts as available.
    """

    weights: int = 0
    pool: int = 0
    taken: int = 0
    mapped: bool = True


class _Live:
    """A queued or running request and its stream."""

    __slots__ = ("generation", "origin", "record")

    def __init__(self, record: Request, generation: Generation, origin: str) -> None:
        self.record = record
        self.generation = generation
        self.origin = origin

    def usage(self) -> Usage:
        return Usage(self.record.prompt, self.record.generated, self.record.cached)


class Model(Residency):
    """A served model.

    Args:
        name: what clients call it.
        path: where it came from, for people.
        start_engine: starts its engine.
        ids: hands out request ids, unique over all models of the daemon.
        policy, caps: the scheduler's settings; ``cache``: how KV is kept.
        budgets: of host memory and of disk space, if other models use them as well.
        refit: asked before the model is loaded again; by default it is loaded as it was.
        stall_timeout: seconds a client may leave its stream unread.
        idle_timeout: seconds without a request after which it is unloaded; 0 is never.
        clock: seconds; Trio's, so that tests can use a virtual one.
    """

    def __init__(
        self,
        name: str,
        path: str,
        start_engine: StartEngine,
        ids: Iterator[RequestId],
        *,
        policy: Policy | None = None,
        caps: Mapping[QosClass, int] | None = None,
        cache: Cache | None = None,
        budgets: Sequence[Budget] = (),
        refit: Refit | None = None,
        stall_timeout: float = 60.0,
        idle_timeout: float = 0.0,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        super().__init__(name, path, idle_timeout, clock)
        self.created = int(time.time())
        self.template: ChatTemplate = ChatTemplate("", bos="", eos="")
        self.vocabulary: Vocabulary = Vocabulary(b"", b"")
        self.latency = Latency()
        self.on_ended: Callable[[Request], None] = lambda record: None
        """Told of every request that has ended."""
        self._start_engine = start_engine
        self._policy = policy or Policy()
        self._caps: dict[QosClass, int] = dict(caps or {})
        self._cache = cache or Cache()
        self._paused: set[QosClass] = set()
        self._budgets = budgets
        self._shares: tuple[Share, ...] = ()
        self._refit = refit
        self._ids = ids
        self._stall_timeout = stall_timeout
        self._info: EngineInfo | None = None
        self._engine: Engine | None = None
        self._scheduler: Scheduler | None = None
        self._live: dict[RequestId, _Live] = {}
        self._ended: OrderedDict[RequestId, str] = OrderedDict()
        """``x-request-id`` of requests that have ended, as long as their trails are kept."""
        self._wakeup = trio.Event()
        self._idle = trio.Event()
        self._idle.set()
        self._rung = Rung.NORMAL
        self._respawns = 0
        self._without_good_tick = 0
        self._watch = TickWatch()
        self._undelivered: list[tuple[TokenOut, Observed]] = []
        self._rates = (0.0, 0.0)

    # -- the task -------------------------------------------------------------------------------------------------

    async def _reside(self, begun: Callable[[], None], *, again: bool) -> None:
        if again and self._refit is not None:
            try:
                self._start_engine, self._cache = await self._refit()
            except SuperfluidError as error:
                self._fail(error.message)
                return
        goes_on = True
        while goes_on:
            await trio.sleep(0.1 * self._without_good_tick)
            async with trio.open_nursery() as nursery:
                engine = await self._start_engine(nursery, self._wake, self._note_progress)
                if isinstance(engine, LoadRefused):
                    self._fail(engine.message)
                    goes_on = False
                elif isinstance(engine, EngineLost):
                    goes_on = self._lost(engine)
                else:
                    self._adopt(engine)
                    begun()
                    try:
                        goes_on = self._lost(await self._crank(engine))
                    finally:
                        self._engine = None
                        with trio.CancelScope(shield=True):  # bounded by the grace
                            await engine.close(CLOSE_GRACE)
                nursery.cancel_scope.cancel()

    def _release(self) -> None:
        """A scheduler is as large as its engine: the next one gets a new one. What an operator has set stays."""
        if self._scheduler is not None:
            self.abort_all(self._why_gone, ModelUnloaded.code)
            stats = self._scheduler.statistics()
            self._caps, self._paused = stats.caps, set(stats.paused)
        for share in self._shares:
            share.leave()
        self._scheduler = None
        self._undelivered.clear()
        self._ended.clear()
        self._watch.end()
        self._rates = (0.0, 0.0)
        self._without_good_tick, self.progress, self.error = 0, 0.0, ""

    @property
    def _pinned(self) -> bool:
        return self._scheduler is not None and bool(self._scheduler.pins())

    def _adopt(self, engine: Engine) -> None:
        info = engine.info
        if self._scheduler is None:
            self._shares = tuple(budget.join(self.nudge) for budget in self._budgets)
            host, disk = self._shares or (None, None)
            self._scheduler = Scheduler(
                Limits(
                    lanes=info.lanes,
                    shared=info.layout == "shared",
                    cells=info.cells,
                    sequences=info.sequences,
                    window=info.window,
                    max_step=info.max_step,
                    granular=info.round_granular,
                    abandons=info.abandons,
                    cache=msgspec.structs.replace(
                        self._cache,
                        cut=info.cut,
                        cell_bytes=self._cache.cell_bytes or info.bytes_per_cell,
                        park_bytes=self._cache.park_bytes if info.saves else 0,
                    ),
                ),
                self._policy,
                # Fewer lanes than last time may not hold them all.
                {qos: min(lanes, info.lanes) for qos, lanes in sorted(self._caps.items())},
                host=host,
                disk=disk,
            )
            for qos in sorted(self._paused):
                self._scheduler.set_paused(qos, True)
            self._scheduler.set_pressure(self._rung)
            self.vocabulary = engine.vocabulary
            self.template = ChatTemplate(info.chat_template, bos=info.bos_text, eos=info.eos_text)
        self._scheduler.adopt_parked(msgspec.structs.astuple(parked) for parked in engine.parked)
        engine.on_sealed = self._note_sealed
        self._info = info
        self._engine = engine
        self._last_used = self._clock()
        self._set_state("ready")

    async def _crank(self, engine: Engine) -> EngineLost:
        """Turn the crank until the engine is lost."""
        scheduler = self._scheduler
        assert scheduler is not None
        while True:
            self._wakeup = trio.Event()
            plan = scheduler.plan(self._clock())
            if plan is None:
                self._deliver_planned()
                if engine.lost:
                    return engine.lost
                scheduler.check_integrity()
                with trio.move_on_after(max(0.0, scheduler.expire_pins(self._clock()) - self._clock())):
                    await self._wakeup.wait()
                continue
            for seat in plan.admit:
                record = self._live[seat.request].record
                self.latency.queue_wait[record.qos].add(record.seated - record.queued)
            self._watch.begin(plan.tick, self._clock())
            report = await engine.tick(plan, self._on_step, self._deliver_planned)
            now = self._clock()
            self._watch.end()
            if isinstance(report, EngineLost):
                return report
            try:
                effects = scheduler.apply(report, now)
            except OutOfOrder as error:
                return EngineLost(f"it reported what cannot be: {error}")
            if report.outcome != "replan":
                self._without_good_tick = 0
            timing = report.timing
            self._rates = (
                timing.decode_tokens / timing.decode_seconds if timing.decode_seconds else self._rates[0],
                timing.prefill_tokens / timing.prefill_seconds if timing.prefill_seconds else self._rates[1],
            )
            self._deliver(effects)
            self._drop_stalled()

    def _on_step(self, step: StepDone) -> None:
        """A step's tokens, as they arrive: record, then deliver."""
        scheduler = self._scheduler
        assert scheduler is not None
        now = self._clock()
        self._watch.step(step.prefilled, now)
        for out in step.tokens:
            record = scheduler.request(out.request)
            last = None if record is None else record.last_token
            seen = scheduler.observe(out.request, out.position, out.token, end=out.end, now=now)
            if seen is not Observed.IGNORED:
                assert record is not None
                self.latency.token(record.qos, record.arrived, last, now)
                self._undelivered.append((out, seen))
        if not step.last:
            self._deliver_tokens()
            self._interrupt_if_stale()

    def _deliver_tokens(self) -> None:
        """Push what has been observed to its streams. A tick's last tokens wait for the next plan to be sent: the
        engine stands still meanwhile."""
        undelivered, self._undelivered = self._undelivered, []
        for out, seen in undelivered:
            live = self._live.get(out.request)
            if live is None:  # cancelled since it was observed, or ended by a stop text
                continue
            try:
                stopped = live.generation.push(out.token, logprob=out.logprob, top=out.top)
            except Exception:
                # Whatever is wrong with one reply's text must end that reply, not the task that serves them all.
                log.exception("request %d: its text cannot be assembled", out.request)
                assert self._scheduler is not None
                self._scheduler.finish(out.request, FinishReason.ERROR)
                self._end(out.request, FinishReason.ERROR, "the reply's text cannot be assembled", "engine_fault")
                continue
            if seen is Observed.FINISHED:
                self._end(out.request, FinishReason.STOP if stopped or out.end else FinishReason.LENGTH)
            elif stopped:
                assert self._scheduler is not None
                self._deliver(self._scheduler.finish(out.request, FinishReason.STOP))
                self._interrupt_if_stale()

    def _deliver_planned(self) -> None:
        """What waited for the plan to be sent: the last tick's tokens, then the pauses that the plan made."""
        self._deliver_tokens()
        if self._scheduler is not None:
            self._deliver(self._scheduler.take_effects())

    def _interrupt_if_stale(self) -> None:
        """Tell the tick in flight to end, once for each degree of hurry."""
        if self._scheduler is None or self._engine is None:
            return
        urgency = self._scheduler.urgency
        if urgency > self._watch.told:
            self._watch.told = urgency
            self._engine.interrupt(self._watch.tick, abandon=urgency is Urgency.ABANDON)

    def _lost(self, loss: EngineLost) -> bool:
        """The engine is gone: its lanes pause. False if too many losses in a row have failed the model."""
        self._watch.end()
        self._deliver_tokens()
        self._without_good_tick += 1
        log.error("model %s: %s", self.name, loss.why)
        if self._scheduler is not None:
            self._deliver(self._scheduler.engine_lost(self._clock()))
        if self._without_good_tick > MOST_RESPAWNS or self._scheduler is None:
            self._fail(f"the worker was lost {self._without_good_tick} times without a good tick; last: {loss.why}")
            return False
        self._respawns += 1
        self._set_state("recovering")
        log.warning("model %s: starting worker again (%d of %d)", self.name, self._without_good_tick, MOST_RESPAWNS)
        return True

    def _fail(self, why: str) -> None:
        self.error = why
        self._set_state("failed")
        log.error("model %s has failed: %s", self.name, why)
        if self._scheduler is not None:
            self._deliver(self._scheduler.finish_all(FinishReason.ERROR, why), code=ModelFailed.code)

    # -- delivering -----------------------------------------------------------------------------------------------

    def _deliver(self, effects: list[Effect], code: str = "") -> None:
        for effect in effects:
            match effect:
                case Finished():
                    default = "cancelled" if effect.reason is FinishReason.ABORT else "engine_fault"
                    self._end(effect.request, effect.reason, effect.error, code or default)
                case Paused():
                    live = self._live.get(effect.request)
                    if live is not None:  # a stop text in its last tokens may have ended it meanwhile
                        live.generation.pause(effect.why)

    def _end(self, request: RequestId, reason: FinishReason, error: str = "", code: str = "") -> None:
        live = self._live.pop(request)
        self._last_used = self._clock()
        self._ended[request] = live.origin
        if len(self._ended) > TRAILS:
            self._ended.popitem(last=False)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            code = ""
        live.generation.finish(reason, live.usage(), error, code)
        self.on_ended(live.record)
        log.info(
            "request %d ended: origin=%s model=%s class=%s prompt=%d generated=%d reason=%s pauses=%d",
            request,
            live.origin,
            self.name,
            live.record.qos.label,
            live.record.prompt,
            live.record.generated,
            reason,
            live.record.pauses,
        )
        if not self._live:
            self._idle.set()

    def _drop_stalled(self) -> None:
        """Cancel requests whose client has stopped reading: their lanes are wanted."""
        for request, live in list(self._live.items()):
            if live.generation.unread_seconds() > self._stall_timeout:
                log.warning("request %d: its client has not read for %.0f s; dropped", request, self._stall_timeout)
                self.cancel(request)

    def _wake(self) -> None:
        self._wakeup.set()

    def _note_progress(self, fraction: float) -> None:
        self.progress = fraction

    # -- what the edges call --------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What the engine affords.

        Raises:
            ModelLoading: it is not loaded yet.
        """
        if self._info is None:
            raise self._not_ready()
        return self._info

    @property
    def window(self) -> int:
        """The longest context of a request, tokens. Raises :class:`ModelLoading` before it is loaded."""
        if self._scheduler is None:
            raise self._not_ready()
        return self._scheduler.window

    async def tokenize(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """Token ids of a text; it never waits for a tick. While the worker is being replaced it waits for the new one.

        Raises:
            ModelLoading, ModelFailed, ModelUnloaded: there is no engine to ask.
        """
        self._last_used = self._clock()
        while True:
            while self.state == "recovering":
                await self._changed.wait()
            engine = self._engine
            if engine is None:
                raise self._not_ready()
            tokens = await engine.tokenize(text, add_bos=add_bos, parse_special=parse_special)
            if tokens is not None:
                return tokens
            # The engine died under the call. Its loss has not been booked yet if the model still looks ready.
            if self._engine is engine and self.state == "ready":
                await self._changed.wait()

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request and return its stream.

        Raises:
            ContextLengthExceeded: the prompt does not fit.
            ModelLoading, ModelFailed, ModelUnloaded: there is nothing to run it on.
        """
        scheduler = self._scheduler
        if scheduler is None or self.leaving or self.state == "failed":
            raise self._not_ready()
        record = scheduler.submit(
            request.prompt,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            qos=request.qos,
            now=self._clock(),
            request=next(self._ids),
            param=request.param,
            batch_invariant=request.batch_invariant,
        )
        assembler = Assembler(self.vocabulary, request.stop, request.sampling.logprobs is not None)
        generation = Generation(record.id, record.prompt, assembler, self.cancel, self._clock)
        self._live[record.id] = _Live(record, generation, request.origin)
        self._idle = trio.Event() if self._idle.is_set() else self._idle
        self._wakeup.set()
        self._interrupt_if_stale()
        return generation

    def cancel(self, request: RequestId) -> None:
        """End a request; its lane is free at the engine's next step. Ids that have ended are ignored."""
        if self._scheduler is None:
            return
        self._deliver(self._scheduler.finish(request, FinishReason.ABORT, "the request was cancelled", self._clock()))
        self._wakeup.set()
        self._interrupt_if_stale()

    def abort_all(self, why: str, code: str) -> None:
        """End everything that is queued or running."""
        if self._scheduler is not None:
            self._deliver(self._scheduler.finish_all(FinishReason.ABORT, why), code=code)
            self._wakeup.set()
            self._interrupt_if_stale()

    def find(self, ident: str, *, ended: bool = False) -> list[RequestId]:
        """Requests of that id or ``x-request-id``, oldest first; with ``ended`` also those whose trail is kept."""
        origins = {**(self._ended if ended else {}), **{request: live.origin for request, live in self._live.items()}}
        if ident.isdecimal() and ident.isascii() and len(ident) < 19 and int(ident) in origins:
            return [int(ident)]
        return [request for request, origin in origins.items() if origin == ident]

    def set_pressure(self, rung: Rung) -> None:
        """How short of memory the operating system is."""
        self._rung = rung
        if self._scheduler is not None:
            self._scheduler.set_pressure(rung)
            self.nudge()

    @property
    def most_lanes(self) -> int:
        """The lanes there are, or were. Raises :class:`ModelLoading` before that is known."""
        return self.info.lanes

    def set_caps(self, caps: Mapping[QosClass, int | None]) -> None:
        """Cap the lanes of these classes, or (None) no longer; also if it is not loaded now."""
        if self._scheduler is not None:
            self._scheduler.set_caps(caps)
            self.nudge()
        else:
            merged = {**self._caps, **caps}
            self._caps = {qos: lanes for qos, lanes in merged.items() if lanes is not None}

    def set_paused(self, qos: QosClass, paused: bool) -> None:
        """Give a class no more lanes, or again; also if it is not loaded now."""
        if self._scheduler is not None:
            self._scheduler.set_paused(qos, paused)
            self.nudge()
        else:
            (self._paused.add if paused else self._paused.discard)(qos)

    def nudge(self) -> None:
        """Something was decided from outside: look whether there is a better plan."""
        self._wakeup.set()
        self._interrupt_if_stale()

    def _note_sealed(self, key: str, size: int) -> None:
        if self._scheduler is not None:
            self._scheduler.sealed(key, size)
            self._set_state(self.state)  # whoever waits for it looks again
            self._wakeup.set()

    async def wait_parked(self) -> None:
        """Return once everything that is to be on disk is there, or the engine is gone."""
        while self._engine is not None and self._scheduler is not None and self._scheduler.parking:
            self._wakeup.set()
            await self._changed.wait()

    async def wait_idle(self) -> None:
        """Return once nothing is queued or running."""
        while self._live:
            await self._idle.wait()

    # -- looking in -----------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Scheduler | None:
        """For reading statistics; None before the model is loaded."""
        return self._scheduler

    def lanes(self) -> list[LaneView]:
        """Running requests in lane order."""
        if self._scheduler is None:
            return []
        return lane_views(self.name, self._scheduler.seated(), self.origin, self._watch.prefilled, self._clock())

    def queue(self) -> list[QueueView]:
        """Waiting requests in the order they would be served."""
        if self._scheduler is None:
            return []
        why = self._scheduler.why_waiting if self.state == "ready" else lambda _: "the engine"
        return queue_views(self.name, self._scheduler.queued(), self.origin, why, self._clock())

    def origin(self, request: RequestId) -> str:
        """The ``x-request-id`` of a request; empty if it is not known any more."""
        live = self._live.get(request)
        return self._ended.get(request, "") if live is None else live.origin

    def whereabouts(self, request: RequestId) -> str:
        """Where a request is, in a few words for its own client; empty once it has ended."""
        live = self._live.get(request)
        if live is None or self._scheduler is None:
            return ""
        record = live.record
        if record.phase is Phase.RUNNING:
            if record.decoding:
                return f"decoding class={record.qos.label}"
            fed = record.fed + self._watch.prefilled.get(request, 0)
            return f"prefill class={record.qos.label} {fed}/{len(record.tokens)}"
        word = "paused" if record.phase is Phase.PREEMPTED else "queued"
        return f"{word} class={record.qos.label} position={self._scheduler.position(request)}"

    @property
    def footprint(self) -> Footprint:
        """What it takes by design; nothing while there is no engine."""
        info = self._info if self._engine is not None else None
        if info is None:
            return Footprint()
        cell = self._cache.cell_bytes or info.bytes_per_cell
        used = self._scheduler.statistics().cells_used if self._scheduler is not None else 0
        return Footprint(
            info.weights_bytes, info.cells * cell, (info.cells if info.reserves else used) * cell, info.reserves
        )

    def view(self) -> ModelView:
        """The model in one record."""
        now, info, engine = self._clock(), self._info, self._engine
        found = ModelView(
            name=self.name,
            path=self.path,
            state=self.standing,
            error=self.error,
            engine=f"{info.runtime} {info.version}" if info else "",
            architecture=info.architecture if info else "",
            layout=info.layout if info else "",
            tick_seconds=self._watch.running(now),
            silent_seconds=self._watch.silent(now),
            stalled=self._watch.stalled(now),
            decode_rate=self._rates[0],
            prefill_rate=self._rates[1],
            worker_pid=engine.pid if engine else 0,
            respawns=self._respawns,
            parked_limit_bytes=self._cache.park_bytes,
            host_limit_bytes=self._cache.host_bytes,
            cut=info.cut if info else "",
            device=info.device if info else "",
            granular=info.round_granular if info else True,
            abandons=info.abandons if info else False,
        )
        scheduler = self._scheduler
        return found if scheduler is None else counted(found, scheduler.statistics(), scheduler.window)

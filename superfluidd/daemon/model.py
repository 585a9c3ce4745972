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
from typing import Literal

import msgspec
import trio

from superfluidd.control.protocol import LaneView, ModelView, QueueView
from superfluidd.daemon.latency import Latency
from superfluidd.daemon.streams import Generation, GenerationRequest, Usage
from superfluidd.daemon.views import lane_views, queue_views
from superfluidd.daemon.watch import TickWatch
from superfluidd.engine.client import Engine, EngineLost, LoadRefused, StartEngine
from superfluidd.engine.port import EngineInfo
from superfluidd.engine.wire import StepDone, TokenOut
from superfluidd.errors import ModelFailed, ModelFileError, ModelLoading, ModelUnloaded, SuperfluidError
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

PARK_GRACE = 10.0
"""Seconds that writing KV to disk may go on for once every request has ended."""

State = Literal["loading", "ready", "recovering", "failed", "unloaded", "resting"]
"""``unloaded``: by an operator, until one loads it again. ``resting``: for want of work; the next request loads it."""

Refit = Callable[[], Awaitable[tuple[StartEngine, Cache]]]
"""Looks at a model's file again, and fits it to the memory there is now. Raises what a start would."""


class Footprint(msgspec.Struct, frozen=True):
    """Bytes of an engine's weights and of its KV pool."""

    weights: int = 0
    pool: int = 0


class _Live:
    """A queued or running request and its stream."""

    __slots__ = ("generation", "origin", "record")

    def __init__(self, record: Request, generation: Generation, origin: str) -> None:
        self.record = record
        self.generation = generation
        self.origin = origin

    def usage(self) -> Usage:
        return Usage(self.record.prompt, self.record.generated, self.record.cached)


class Model:
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
        self.name = name
        self.path = path
        self.created = int(time.time())
        self.state: State = "loading"
        self.error = ""
        self.progress = 0.0
        self.template: ChatTemplate = ChatTemplate("", bos="", eos="")
        self.vocabulary: Vocabulary = Vocabulary(b"", b"")
        self.latency = Latency()
        self.on_ended: Callable[[Request], None] = lambda record: None
        """Told of every request that has ended."""
        self._start_engine = start_engine
        self._policy = policy or Policy()
        self._caps: dict[QosClass, int] = dict(caps or {})
        self._cache = cache or Cache()
        self._paused: tuple[QosClass, ...] = ()
        self._budgets = budgets
        self._shares: tuple[Share, ...] = ()
        self._refit = refit
        self._ids = ids
        self._stall_timeout = stall_timeout
        self._idle_timeout = idle_timeout
        self._clock = clock
        self._info: EngineInfo | None = None
        self._engine: Engine | None = None
        self._scheduler: Scheduler | None = None
        self._live: dict[RequestId, _Live] = {}
        self._ended: OrderedDict[RequestId, str] = OrderedDict()
        """``x-request-id`` of requests that have ended, as long as their trails are kept."""
        self._wakeup = trio.Event()
        self._changed = trio.Event()
        self._idle = trio.Event()
        self._idle.set()
        self._rung = Rung.NORMAL
        self.leaving = False
        """It takes nothing new, and is unloaded once it is idle or out of patience."""
        self._rests = False
        """What unloads it, or has, is want of work."""
        self._begun = False
        """It has been loaded once, or need not be."""
        self._again = False
        """This is not the first time that it is loaded."""
        self._wanted = trio.Event()
        self._residence = trio.CancelScope()
        self._tasks: trio.Nursery | None = None
        self._last_used = clock()
        self._respawns = 0
        self._without_good_tick = 0
        self._watch = TickWatch()
        self._undelivered: list[tuple[TokenOut, Observed]] = []
        self._rates = (0.0, 0.0)

    # -- the task -------------------------------------------------------------------------------------------------

    async def run(
        self, *, must_load: bool = True, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Load the model and serve it until cancelled; unloaded or failed, wait to be told to load it again. Started
        once it is loaded.

        Args:
            must_load: a model that cannot be loaded in the first place is an error. Otherwise this is started at once.

        Resource handling: the engine lives in a nursery of its own, and is ended when this is cancelled.
        Error handling: an engine that dies is replaced; one that cannot be is a failed model.

        Raises:
            ModelFileError: the model could not be loaded in the first place.
        """
        async with trio.open_nursery() as self._tasks:
            if not must_load:
                task_status.started()
            self._begun = not must_load
            if self._idle_timeout:
                self._tasks.start_soon(self._rest_when_idle)
            while True:
                with trio.CancelScope() as self._residence:
                    await self._reside(task_status)
                if self.leaving:
                    self._gone("resting" if self._rests else "unloaded")
                elif must_load and self._info is None:
                    break
                await self._wanted.wait()
                self._wanted, self._again = trio.Event(), True
            self._tasks.cancel_scope.cancel()
        raise ModelFileError(f"{self.path}: {self.error}")

    async def _reside(self, task_status: trio.TaskStatus[None]) -> None:
        """Load it, serve it, replace its engine. Returns once it has failed."""
        if self._again and self._refit is not None:
            try:
                self._start_engine, self._cache = await self._refit()
            except SuperfluidError as error:
                self._fail(error.message)
        while self.state != "failed":
            await trio.sleep(0.1 * self._without_good_tick)
            async with trio.open_nursery() as nursery:
                engine = await self._start_engine(nursery, self._wake, self._note_progress)
                if isinstance(engine, LoadRefused):
                    self._fail(engine.message)
                elif isinstance(engine, EngineLost):
                    self._lost(engine)
                else:
                    self._adopt(engine)
                    if not self._begun:
                        self._begun = True
                        task_status.started()
                    try:
                        self._lost(await self._crank(engine))
                    finally:
                        self._engine = None
                        with trio.CancelScope(shield=True):  # bounded by the grace
                            await engine.close(CLOSE_GRACE)
                nursery.cancel_scope.cancel()

    def _gone(self, state: Literal["unloaded", "resting"]) -> None:
        """Everything it had is given back. What an operator has set stays."""
        if self._scheduler is not None:
            self._deliver(self._scheduler.finish_all(FinishReason.ABORT, self._why_gone), code=ModelUnloaded.code)
        self._forget()
        self.leaving = False
        self._set_state(state)
        log.info("model %s is unloaded%s", self.name, ": the next request loads it" if state == "resting" else "")

    def _forget(self) -> None:
        """A scheduler is as large as its engine: the next one gets a new one."""
        if self._scheduler is not None:
            stats = self._scheduler.statistics()
            self._caps, self._paused = stats.caps, stats.paused
        for share in self._shares:
            share.leave()
        self._scheduler = None
        self._undelivered.clear()
        self._ended.clear()
        self._watch.end()
        self._rates = (0.0, 0.0)
        self._without_good_tick, self.progress, self.error = 0, 0.0, ""

    @property
    def _why_gone(self) -> str:
        return f"model {self.name} was unloaded before the request was complete"

    async def _leave(self, patience: float) -> None:
        """Let what is queued and running end, as long as there is patience, then what is being parked, then go."""
        residence = self._residence
        with trio.move_on_after(patience):
            await self.wait_idle()
        self.abort_all(self._why_gone, ModelUnloaded.code)
        with trio.move_on_after(PARK_GRACE):
            await self.wait_parked()
        residence.cancel()

    async def _rest_when_idle(self) -> None:
        """Unload it when nobody has wanted anything of it for long enough, and nothing of it is pinned."""
        while True:
            await self.wait_idle()
            rest = self._last_used + self._idle_timeout - self._clock()
            pinned = self._scheduler is not None and bool(self._scheduler.pins())
            if self.state != "ready" or self.leaving:
                await self._changed.wait()
            elif rest > 0 or pinned:
                await trio.sleep(rest if rest > 0 else 1.0)
            else:
                log.info("model %s: nothing was asked of it for %g s", self.name, self._idle_timeout)
                self._begin_to_leave(0.0, rests=True)

    def _begin_to_leave(self, patience: float, *, rests: bool) -> None:
        assert self._tasks is not None
        self.leaving, self._rests = True, rests
        self._set_state(self.state)
        self._tasks.start_soon(self._leave, patience)

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
                        self._cache, cut=info.cut, cell_bytes=self._cache.cell_bytes or info.bytes_per_cell
                    ),
                ),
                self._policy,
                # Fewer lanes than last time may not hold them all.
                {qos: min(lanes, info.lanes) for qos, lanes in self._caps.items()},
                host=host,
                disk=disk,
            )
            for qos in self._paused:
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

    def _lost(self, loss: EngineLost) -> None:
        """The engine is gone: its lanes pause; too many losses in a row fail the model."""
        self._watch.end()
        self._deliver_tokens()
        self._without_good_tick += 1
        log.error("model %s: %s", self.name, loss.why)
        if self._scheduler is not None:
            self._deliver(self._scheduler.engine_lost(self._clock()))
        if self._without_good_tick > MOST_RESPAWNS or self._scheduler is None:
            self._fail(f"the worker was lost {self._without_good_tick} times without a good tick; last: {loss.why}")
        else:
            self._respawns += 1
            self._set_state("recovering")
            log.warning("model %s: starting worker again (%d of %d)", self.name, self._without_good_tick, MOST_RESPAWNS)

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

    def _set_state(self, state: State) -> None:
        self.state = state
        self._changed.set()
        self._changed = trio.Event()

    def _wake(self) -> None:
        self._wakeup.set()

    def _note_progress(self, fraction: float) -> None:
        self.progress = fraction

    # -- loading and unloading ------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Load it if it is not; return once it can serve. Cancelling the wait changes nothing.

        Raises:
            ModelFailed: it cannot be loaded; the message says why.
            ModelUnloaded: it is being unloaded.
        """
        if self.leaving:
            raise self._not_ready()
        if self.state in ("failed", "unloaded", "resting"):
            self._forget()
            self._set_state("loading")
            self._wanted.set()
        while self.state in ("loading", "recovering") and not self.leaving:
            await self._changed.wait()
        if self.state == "failed":
            raise ModelFailed(f"model {self.name} cannot be loaded: {self.error}")
        if self.state != "ready" or self.leaving:
            raise self._not_ready()

    async def wake(self) -> None:
        """Load it if it rests, and return once it can serve.

        Raises:
            ModelFailed: it cannot be loaded.
        """
        self._last_used = self._clock()
        while self._rests and (self.leaving or self.state in ("resting", "loading")):
            if self.leaving:
                await self._changed.wait()
            else:
                await self.load()

    async def unload(self, patience: float) -> None:
        """Take nothing new; unload it once everything has ended, or ``patience`` seconds have passed and what was left
        has been ended. Return then; cancelling the wait changes nothing. Calling it again can only shorten the
        patience to none.

        Raises:
            ModelLoading: it is being loaded for the first time.
        """
        self._rests = False
        if self.leaving and not patience:
            self.abort_all(self._why_gone, ModelUnloaded.code)
        if not self.leaving and self.state in ("failed", "resting"):
            self._gone("unloaded")
        elif not self.leaving and self.state != "unloaded":
            if not self._begun:
                raise ModelLoading(f"model {self.name} is being loaded; unload it when it has been", retry_after=2)
            self._begin_to_leave(patience, rests=False)
        while self.leaving:
            await self._changed.wait()

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

    def _not_ready(self) -> ModelLoading | ModelFailed | ModelUnloaded:
        if self.leaving or self.state in ("unloaded", "resting"):
            doing = "is being unloaded" if self.leaving else "is not loaded"
            return ModelUnloaded(f"model {self.name} {doing}; `sfctl load {self.name}` loads it again")
        if self.state == "failed":
            return ModelFailed(f"model {self.name} has failed; `sfctl load {self.name}` tries it again: {self.error}")
        if self.state == "recovering":
            return ModelLoading(f"model {self.name} is recovering; try again in a moment", retry_after=1)
        return ModelLoading(f"model {self.name} is being loaded ({self.progress:.0%}); try again soon", retry_after=2)

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
        return Footprint(info.weights_bytes, info.cells * (self._cache.cell_bytes or info.bytes_per_cell))

    def view(self) -> ModelView:
        """The model in one record."""
        now = self._clock()
        stats = None if self._scheduler is None else self._scheduler.statistics()
        info = self._info
        return ModelView(
            name=self.name,
            path=self.path,
            state="unloading" if self.leaving else self.state,
            error=self.error,
            engine=f"{info.runtime} {info.version}" if info else "",
            architecture=info.architecture if info else "",
            layout=info.layout if info else "",
            window=self._scheduler.window if self._scheduler else 0,
            lanes=stats.lanes if stats else 0,
            lanes_busy=stats.lanes_busy if stats else 0,
            queued=sum(stats.queued.values()) if stats else 0,
            cells=stats.cells if stats else 0,
            cells_promised=stats.cells_promised if stats else 0,
            cells_used=stats.cells_used if stats else 0,
            ticks=stats.ticks if stats else 0,
            tick_seconds=self._watch.running(now),
            silent_seconds=self._watch.silent(now),
            stalled=self._watch.stalled(now),
            decode_rate=self._rates[0],
            prefill_rate=self._rates[1],
            threads=stats.threads if stats else 0,
            worker_pid=self._engine.pid if self._engine else 0,
            respawns=self._respawns,
            submitted=stats.submitted if stats else 0,
            finished={reason.value: count for reason, count in stats.finished.items()} if stats else {},
            pauses=stats.pauses if stats else 0,
            prefill_tokens=stats.prefill_tokens if stats else 0,
            decode_tokens=stats.decode_tokens if stats else 0,
            decode_rounds=stats.decode_rounds if stats else 0,
            prefill_seconds=stats.prefill_seconds if stats else 0.0,
            decode_seconds=stats.decode_seconds if stats else 0.0,
            preemptions={qos.label: count for qos, count in stats.preemptions.items()} if stats else {},
            starvation_grants={qos.label: count for qos, count in stats.starvation_grants.items()} if stats else {},
            abandoned_prefill_tokens=stats.abandoned_tokens if stats else 0,
            engine_tokens=stats.computed if stats else 0,
            prefill_budget=stats.prefill_budget if stats else 0,
            decode_grant=stats.decode_grant if stats else 0,
            cells_kept=stats.cells_kept if stats else 0,
            cached_tokens=stats.kv.cached_tokens if stats else 0,
            prefix_hits=stats.kv.hits if stats else 0,
            evictions=stats.kv.evictions if stats else 0,
            exports=stats.kv.exports if stats else 0,
            imports=stats.kv.imports if stats else 0,
            parks=stats.kv.parks if stats else 0,
            recalls=stats.kv.recalls if stats else 0,
            parked=stats.kv.parked_entries if stats else 0,
            parked_bytes=stats.kv.parked_bytes if stats else 0,
            parked_limit_bytes=self._cache.park_bytes,
            prefixes=stats.kv.entries if stats else 0,
            host_prefixes=stats.kv.host_entries if stats else 0,
            host_bytes=stats.kv.host_bytes if stats else 0,
            host_limit_bytes=self._cache.host_bytes,
            cut=info.cut if info else "",
            pins=stats.kv.pins if stats else 0,
            pinned_tokens=stats.kv.pinned_tokens if stats else 0,
            pins_yielded=stats.kv.pins_yielded if stats else 0,
            pins_expired=stats.kv.pins_expired if stats else 0,
        )

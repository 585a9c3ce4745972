"""The scheduler: the one mutable object. Every method is synchronous and returns what the shell must do.

See the package docstring for how it is driven and which rules it keeps.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

from superfluidd.errors import ContextLengthExceeded, InvalidValue
from superfluidd.scheduling import budget, planner
from superfluidd.scheduling.books import Books
from superfluidd.scheduling.pins import Pinned
from superfluidd.scheduling.plan import (
    Decode,
    Effect,
    Finished,
    Import,
    OutOfOrder,
    Paused,
    Plan,
    Prefill,
    Recall,
    TickReport,
)
from superfluidd.scheduling.pressure import Rung
from superfluidd.scheduling.qos import URGENT
from superfluidd.scheduling.request import Phase, Request
from superfluidd.scheduling.trail import Entry, Kind
from superfluidd.types import FinishReason, QosClass, RequestId, SamplingParams

TRAILS = 256
"""Finished requests whose trails are kept."""


class Observed(enum.Enum):
    """What :meth:`Scheduler.observe` made of a token."""

    ACCEPTED = "accepted"
    """Recorded: deliver it."""
    FINISHED = "finished"
    """Recorded, and it is the request's last: deliver it, then the end."""
    IGNORED = "ignored"
    """Of a request that has ended or been cancelled, or a token recorded before: deliver nothing."""


class Scheduler(Books):
    """Queues, lanes and the KV pool's books for one model. Arguments as for :class:`Books`."""

    # -- requests come and go -------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingParams,
        max_tokens: int | None,
        qos: QosClass,
        now: float,
        request: RequestId | None = None,
        param: str | None = None,
        batch_invariant: bool = False,
        media: bool = False,
    ) -> Request:
        """Queue a request and return its record.

        Args:
            prompt: token ids, at least one.
            sampling: how to draw.
            max_tokens: most tokens to generate; None, or more than the window holds, fills the window.
            qos: class to queue it in.
            now: the caller's clock, seconds.
            request: its id, if the caller hands ids out.
            param: the client's field that held the prompt, for the error.
            batch_invariant: its lane ticks alone.
            media: it holds media: its lane is never taken.

        Raises:
            ContextLengthExceeded: the prompt alone does not fit the window. Nothing was queued.
        """
        if len(prompt) > self._pool.limit:
            raise ContextLengthExceeded(len(prompt), self._pool.limit, param=param)
        room = self._pool.limit - len(prompt) + 1
        if request is None:
            request = self._next_id
        self._next_id = max(self._next_id, request) + 1
        record = Request(
            id=request,
            qos=qos,
            tokens=list(prompt),
            prompt=len(prompt),
            max_new=room if max_tokens is None else min(max_tokens, room),
            sampling=sampling,
            arrived=now,
            batch_invariant=batch_invariant,
            media=media,
            queued=now,
            queued_tick=self._counters.ticks,
        )
        self._counters.submitted += 1
        why = "batch-invariant, so it will tick alone" if batch_invariant else ""
        self._note(record, "queued", now, count=self._queues.depth(qos), why=why)
        self._requests[record.id] = record
        self._queues.append(record)
        self._mark_arrival(record, now)
        return record

    def _mark_arrival(self, record: Request, now: float) -> None:
        if record.qos <= URGENT:
            self._urgent_before, self._urgent_at = self._urgent_at, now
        if self._in_flight is not None:
            self._arrived.append(record.id)

    def finish(
        self,
        request: RequestId,
        reason: FinishReason,
        error: str = "",
        now: float | None = None,
        *,
        observed: bool = False,
    ) -> list[Effect]:
        """End a request now, whatever it is doing. Nothing of it is delivered after this returned.

        An id that is not queued or running is ignored: it has ended already. ``observed``: the engine has ended it.
        """
        record = self._requests.pop(request, None)
        if record is None:
            return []
        if record.phase is Phase.RUNNING and self._in_flight is not None:
            self._cancelled.append(request)
        certain = observed or self._in_flight is None
        self._admission.leave(record, keep=reason is not FinishReason.ERROR, certain=certain)
        record.move(Phase.FINISHED)
        record.decoding, record.fed, record.reason = False, 0, reason
        self._counters.finished[reason] += 1
        when = now if now is not None else max(record.arrived, record.last_token or 0.0, record.seated)
        why = f"{reason.value} after {record.generated} tokens" + (f": {error}" if error else "")
        self._note(record, "finished", when, why=why)
        self._ended[record.id] = record.trail
        if len(self._ended) > TRAILS:
            self._ended.popitem(last=False)
        return [Finished(record.id, reason, error)]

    def finish_all(self, reason: FinishReason, error: str = "") -> list[Effect]:
        """End every request, oldest first."""
        return [effect for request in list(self._requests) for effect in self.finish(request, reason, error)]

    # -- an operator steers ---------------------------------------------------------------------------------------

    def set_caps(self, caps: Mapping[QosClass, int | None]) -> None:
        """Cap the lanes of these classes, or (None) no longer. Running lanes are not touched.

        Raises:
            ValueError: a cap is not 1 to the lanes there are; nothing was changed.
        """
        for qos, lanes in caps.items():
            if lanes is not None and not 1 <= lanes <= self.limits.lanes:
                raise ValueError(f"{lanes} lanes for {qos.label}: 1 to {self.limits.lanes} can be held")
        merged = {**self._lanes.caps, **caps}
        self._lanes.caps = {qos: lanes for qos, lanes in sorted(merged.items()) if lanes is not None}

    def set_paused(self, qos: QosClass, paused: bool) -> None:
        """Give a class no more lanes, or again; what runs goes on."""
        (self._lanes.paused.add if paused else self._lanes.paused.discard)(qos)

    def set_qos(self, request: RequestId, qos: QosClass, now: float) -> bool:
        """Re-class a queued or running request; False if there is none of that id.

        A queued one joins the end of its new class and keeps the wait it has behind it. A running one keeps its lane,
        and is judged by the new class from now on.
        """
        record = self._requests.get(request)
        if record is None:
            return False
        if record.qos is qos:
            return True
        waiting = record.phase is not Phase.RUNNING
        if waiting:
            self._queues.remove(record)
        record.qos = qos
        if waiting:
            self._queues.append(record)
            self._mark_arrival(record, now)
        self._note(record, "reclassed", now)
        return True

    def pin(self, request: RequestId, expires: float, now: float) -> int:
        """Keep what a request has left or will leave, as long as nothing else can make room.

        Args:
            request: it is queued, running or has ended.
            expires: until when, on the caller's clock.
            now: the caller's clock, seconds.

        Returns:
            How many tokens that is by now.

        Raises:
            InvalidValue: there is nothing to pin, or it is more than may be pinned.
        """
        length = self._kv.pin(request, self._requests.values(), expires)
        self._note_pin(request, "pinned", now, length)
        return length

    def unpin(self, request: RequestId, now: float) -> None:
        """Take a request's pin away. Raises :class:`InvalidValue` if it has none."""
        if not self._kv.unpin(request, self._requests.values()):
            raise InvalidValue(f"request {request} is not pinned; `sfctl pins` lists what is", param="id")
        self._note_pin(request, "unpinned", now)

    def _note_pin(self, request: RequestId, kind: Kind, now: float, tokens: int = 0) -> None:
        trail = self.trail(request)
        if trail is not None:
            trail.add(Entry(now, self._counters.ticks, kind, tokens=tokens))

    def pins(self) -> list[Pinned]:
        """What is pinned, oldest first."""
        return self._kv.pins(self._requests.values())

    def expire_pins(self, now: float) -> float:
        """Pins whose time is over are no more; returns when the next one's is."""
        self._kv.expire_pins(now)
        return self._kv.pin_expires

    def set_pressure(self, rung: Rung) -> None:
        """How short of memory the operating system is (source: the specification, "Preemption", "Memory pressure").

        From a warning on nothing is saved in host memory, and when one comes what is there goes first, and then the
        pool's entries down to the low watermark. While it is critical, background requests get no lanes, and those that
        decode lose theirs with the next plan.
        """
        before, self._admission.rung = self._admission.rung, rung
        self._kv.saving = rung is Rung.NORMAL
        if rung > before and rung in (Rung.WARNING, Rung.CRITICAL):
            self._kv.drop_host()
            self._kv.evict_down(self._filled())
        self._hurry = self._hurry or rung >= Rung.CRITICAL

    def _filled(self) -> int:
        """Cells that running requests have filled."""
        return sum(lane.fed for lane in self._lanes.in_order())

    # -- the crank ------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan | None:
        """The next tick, or None if there is nothing to do.

        Raises:
            OutOfOrder: a plan is in flight already.
        """
        if self._in_flight is not None:
            raise OutOfOrder(f"tick {self._in_flight.tick} is in flight")
        tick, admission = self._counters.ticks + 1, self._admission
        self._kv.expire_pins(now)
        self._kv.give_back()
        admission.worth_waiting = budget.worth_waiting(self._rates, self._kv.cache.wait_seconds, self._kv.cache.least)
        if admission.rung >= Rung.CRITICAL:
            self._relieve(tick, now)
        if self.limits.cache.enabled:
            self._kv.relieve(self._filled())
        admit, lost = admission.admit(tick, now, self._admit_at_most)
        self._effects += [Paused(record.id, "preempted by more urgent work") for record in lost]
        seated = self._lanes.in_order()
        self._kv.park_next(idle=not seated)
        if not seated and not admission.retire and not self._kv.ops:
            return None
        ticking, exact = self._turns.take(seated)
        open_tick = self._open(ticking)
        target = budget.tick_target(self.policy, granular=self.limits.granular, open_tick=open_tick)
        prefill, decode, step = self._grants(ticking, exact, open_tick, target, now)
        planner.count_starved(() if exact else ticking, prefill, decode)
        self._decode_grant = sum(grant.rounds for grant in decode)
        self._counters.ticks = tick
        self._cancelled, self._arrived, self._hurry, self._observed = [], [], False, {}
        self._sent = len(admission.retire), len(self._kv.ops)
        self._in_flight = Plan(
            tick=tick,
            retire=tuple(dict.fromkeys(admission.retire)),
            kv=tuple(self._kv.ops),
            admit=tuple(admit),
            prefill=prefill,
            decode=decode,
            step_tokens=step,
            exact=exact,
        )
        return self._in_flight

    def _relieve(self, tick: int, now: float) -> None:
        """Critical memory pressure: every decoding background lane gives way."""
        for record in reversed(self._lanes.in_order()):
            if record.qos is QosClass.BACKGROUND and record.decoding and record.preemptible:
                self._admission.preempt(record, tick, now, None, "memory is critical")
                self._effects.append(Paused(record.id, "the machine is short of memory"))

    def _open(self, ticking: Sequence[Request]) -> bool:
        """A lane is free, or one is about to be: it ends within the tick that a full house would get."""
        if not self._lanes.full:
            return True
        busy = budget.tick_target(self.policy, granular=self.limits.granular, open_tick=False)
        rounds = budget.decode_rounds(self._rates, busy)
        return any(lane.decoding and lane.remaining_new <= rounds for lane in ticking)

    def _latency(self, ticking: Sequence[Request], now: float) -> bool:
        """Somebody would notice long steps: a stream that somebody may be reading, or the next chat. Background work
        alone would not."""
        lately = now - self._urgent_at < budget.LATENCY_MODE_SECONDS
        if self.limits.abandons:
            often = self._urgent_at - self._urgent_before < budget.LATENCY_MODE_ABANDONING
            lately = often and now - self._urgent_at < budget.LATENCY_MODE_ABANDONING
        return lately or any(lane.decoding and lane.qos < QosClass.BACKGROUND for lane in ticking)

    def _grants(
        self, ticking: list[Request], exact: bool, open_tick: bool, target: float, now: float
    ) -> tuple[tuple[Prefill, ...], tuple[Decode, ...], int]:
        decoding = sum(lane.decoding for lane in ticking)
        newcomer = open_tick or any(lane.qos > QosClass.INTERACTIVE for lane in ticking)
        if not self.policy.prefill_budget:
            busy = len(ticking) - decoding + len(self._queues)
            self._adaptive = budget.adapt(self._adaptive, self._rates, target, prefilling=busy, decoding=decoding)
        latency = self._latency(ticking, now)
        self._prefill_budget = budget.prefill_budget(
            self.policy,
            self._adaptive,
            self._rates,
            open_tick=newcomer,
            yielding=self.limits.granular and not latency,
        )
        if exact:
            step = min(budget.EXACT_STEP, self.limits.max_step)
            prefill = planner.grant_exact(ticking[0], self._prefill_budget, step)
        else:
            step = budget.step_tokens(self._rates, latency=latency, max_step=self.limits.max_step)
            prefill = planner.grant_prefill(ticking, self._prefill_budget, self.policy.starvation_ticks)
        decode = planner.grant_decode(
            ticking,
            prefill,
            rounds=budget.decode_rounds(self._rates, target),
            patient=not latency,
            step=step,
            most=self.policy.decode_budget,
            waiting=len(self._queues) > 0,
            starvation_ticks=self.policy.starvation_ticks,
        )
        return prefill, decode, step

    def observe(self, request: RequestId, position: int, token: int, *, end: bool, now: float) -> Observed:
        """Record a token before anyone sees it.

        Args:
            request: whose.
            position: its index among the request's tokens, prompt included.
            token: its id.
            end: it ends the generation.
            now: the caller's clock, seconds.

        Returns:
            What to do with it. After ``FINISHED`` the request has ended.

        Raises:
            OutOfOrder: a token was left out, or the request is not in a lane.
        """
        record = self._requests.get(request)
        if record is None:
            return Observed.IGNORED
        if record.phase is not Phase.RUNNING or position > len(record.tokens):
            raise OutOfOrder(f"token {position} of request {request}, which has {len(record.tokens)}")
        if position < len(record.tokens):
            return Observed.IGNORED
        record.tokens.append(token)
        record.decoding = True
        record.abandoned = False
        record.fed = len(record.tokens) - 1
        record.last_token = now
        self._observed[request] = self._observed.get(request, 0) + 1
        self._counters.decode_tokens += 1
        if record.first_token is None:
            record.first_token = now
            self._note(record, "first-token", now, why=f"{now - record.arrived:.3f} s")
        if not end and record.remaining_new > 0:
            return Observed.ACCEPTED
        cancelled = list(self._cancelled)
        self.finish(request, FinishReason.STOP if end else FinishReason.LENGTH, now=now, observed=True)
        self._cancelled = cancelled  # the engine knows that this lane is over; nothing to hurry for on its account
        return Observed.FINISHED

    def apply(self, report: TickReport, now: float) -> list[Effect]:
        """Take a tick's report into the books.

        Raises:
            OutOfOrder: it is not the report of the plan in flight, or its counts are not what was observed.
        """
        plan = self._in_flight
        if plan is None or report.tick != plan.tick:
            raise OutOfOrder(f"a report of tick {report.tick}, which is not in flight")
        self._in_flight = None
        if report.outcome == "replan":
            return self._replan(plan, report, now)
        self._admit_at_most = None
        self._cleared = False
        del self._admission.retire[: self._sent[0]]
        del self._kv.ops[: self._sent[1]]
        self._take_kv(plan, report)
        for request, produced in report.decoded:
            if request in self._requests and self._observed.get(request, 0) != produced:
                raise OutOfOrder(
                    f"{produced} tokens reported of request {request}, {self._observed.get(request, 0)} seen"
                )
        for request, fed in report.prefilled:
            record = self._requests.get(request)
            if record is not None:
                record.abandoned = False
                record.fed += 0 if record.decoding else fed
        for request, lost in report.abandoned:
            record = self._requests.get(request)
            if record is not None:
                record.abandoned = True
                self._note(record, "abandoned", now, tokens=lost, why="something more urgent")
        self._cells_used = report.cells_used
        self._threads = report.timing.threads or self._threads
        self._rates = self._rates.updated(report.timing)
        self._counters.take(report)
        effects: list[Effect] = []
        for fault in report.faults:
            effects += self.finish(fault.request, FinishReason.ERROR, fault.message, now)
        self._cancelled, self._arrived = [], []
        return effects

    def _take_kv(self, plan: Plan, report: TickReport) -> None:
        """What was saved, and what could not be done: a lane that was to be seeded has begun from nothing."""
        for blob, size in report.exported:
            self._kv.exported(blob, size)
        emptied = set(report.emptied)
        for op in plan.kv:
            if isinstance(op, Import) and op.sequence in emptied:
                self._kv.unreadable(op.blob)
            if isinstance(op, Recall) and op.sequence in emptied:
                self._kv.unrecallable(op.key)
        for sequence in report.emptied:
            self._kv.emptied(sequence)
        for record in self._lanes.in_order():
            if record.sequence in emptied:
                record.fed = 0
                if not record.pauses:
                    self._counters.cached_tokens -= record.cached
                    record.cached = 0

    def _replan(self, plan: Plan, report: TickReport, now: float) -> list[Effect]:
        """Nothing ran. Whom the plan admitted goes back to the queue heads, and the next plan admits fewer."""
        self._counters.replans += 1
        if not plan.admit:
            raise OutOfOrder(f"tick {plan.tick} was refused though it admitted nobody: {report.reason}")
        for seat in reversed(plan.admit):
            record = self._requests.get(seat.request)
            if record is not None:
                self._admission.undo(record, plan.tick, now, report.reason)
        # The engine never seated them, so it has no lanes of theirs to forget; their sequences may still need emptying.
        never_seated = {seat.request for seat in plan.admit}
        retire = self._admission.retire
        retire[:] = [request for request in retire if request not in never_seated or request in plan.retire]
        if self._pool.kept and not self._cleared:
            # Whatever the engine lacks, it gets back what is kept before anybody has to wait.
            self._cleared = True
            self._kv.clear()
            return []
        self._admit_at_most = len(plan.admit) // 2
        if self._admit_at_most == 0 and not len(self._lanes):
            # Alone in an empty engine and still refused: it will never fit.
            self._admit_at_most = None
            why = f"the engine cannot hold this request: {report.reason}"
            return [e for seat in plan.admit for e in self.finish(seat.request, FinishReason.ERROR, why, now)]
        return []

    def engine_lost(self, now: float) -> list[Effect]:
        """The engine died with everything it held. Lanes go back to their queue heads and keep their tokens."""
        tick = self._counters.ticks
        records = sorted(self._lanes.in_order(), key=lambda record: record.id)
        for record in reversed(records):
            self._admission.lose_engine(record, tick, now)
        self._admission.lose_kept()
        self._in_flight = None
        self._cancelled, self._arrived = [], []
        self._admit_at_most = None
        self._cleared = False
        self._cells_used = 0
        self._counters.engine_computed = 0
        return [Paused(record.id, "the engine is being restarted") for record in records]

    def adopt_parked(self, found: Iterable[tuple[str, bytes, int]]) -> None:
        """What an engine that was just started has found on disk: (key, packed token ids, bytes), longest unused
        first."""
        self._kv.adopt(found)

    def sealed(self, key: str, size: int) -> None:
        """Something has been written to disk, or (0 bytes) could not be."""
        self._kv.sealed(key, size)

    @property
    def parking(self) -> bool:
        """Something is being written to disk, or will be once nothing else is to do."""
        return self._kv.parking

    def take_effects(self) -> list[Effect]:
        """What plans have done to requests since this was last asked."""
        effects, self._effects = self._effects, []
        return effects

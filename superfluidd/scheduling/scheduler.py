"""The scheduler: the one mutable object. Every method is synchronous and returns what the shell must do.

See the package docstring for how it is driven and which rules it keeps.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from superfluidd.errors import ContextLengthExceeded
from superfluidd.scheduling import budget, planner
from superfluidd.scheduling.plan import Admit, Admitted, Effect, Finished, OutOfOrder, Paused, Plan, TickReport
from superfluidd.scheduling.pool import KvPool
from superfluidd.scheduling.queues import ClassQueues
from superfluidd.scheduling.request import Phase, Request
from superfluidd.types import FinishReason, QosClass, RequestId, SamplingParams


class Limits(msgspec.Struct, frozen=True):
    """What the scheduler may hand out, from the engine's hello.

    Attributes:
        lanes: requests that run at once.
        shared: KV layout: one pool, or a window per sequence.
        cells: KV cells in all.
        sequences: engine sequences.
        window: longest context of one sequence, tokens.
        max_step: largest useful prefill micro-batch, tokens.
    """

    lanes: int
    shared: bool
    cells: int
    sequences: int
    window: int
    max_step: int = 512


class Observed(enum.Enum):
    """What :meth:`Scheduler.observe` made of a token."""

    ACCEPTED = "accepted"
    """Recorded: deliver it."""
    FINISHED = "finished"
    """Recorded, and it is the request's last: deliver it, then the end."""
    IGNORED = "ignored"
    """Of a request that has ended or been cancelled, or a token recorded before: deliver nothing."""


class Statistics(msgspec.Struct, frozen=True):
    """Counters since the start, and the present state. Times are the caller's."""

    ticks: int
    submitted: int
    finished: dict[FinishReason, int]
    pauses: int
    replans: int
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_rounds: int
    decode_seconds: float
    lanes: int
    lanes_busy: int
    queued: dict[QosClass, int]
    cells: int
    cells_promised: int
    cells_used: int
    rates: budget.Rates
    threads: int


class Scheduler:
    """Queues, lanes and the KV pool's books for one model.

    Args:
        limits: what there is to hand out.
        first_id: id of the first request; ids are unique over all models of a daemon.
    """

    def __init__(self, limits: Limits, first_id: int = 1) -> None:
        self.limits = limits
        self._next_id = first_id
        self._requests: dict[RequestId, Request] = {}
        self._queues = ClassQueues()
        self._seats: dict[int, Request] = {}
        self._pool = self._new_pool()
        self._retire: list[tuple[RequestId, int]] = []
        self._in_flight: Plan | None = None
        self._stale = False
        self._observed: dict[RequestId, int] = {}
        self._admit_at_most: int | None = None
        self._rates = budget.Rates()
        self._submitted = 0
        self._ticks = 0
        self._pauses = 0
        self._replans = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        self._prefill_tokens = 0
        self._prefill_seconds = 0.0
        self._decode_tokens = 0
        self._decode_rounds = 0
        self._decode_seconds = 0.0
        self._cells_used = 0
        self._threads = 0

    def _new_pool(self) -> KvPool:
        limits = self.limits
        return KvPool(shared=limits.shared, cells=limits.cells, sequences=limits.sequences, window=limits.window)

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
            queued=now,
        )
        self._submitted += 1
        self._requests[record.id] = record
        self._queues.append(record)
        return record

    def finish(self, request: RequestId, reason: FinishReason, error: str = "") -> list[Effect]:
        """End a request now, whatever it is doing. Nothing of it is delivered after this returned.

        An id that is not queued or running is ignored: it has ended already.
        """
        record = self._requests.pop(request, None)
        if record is None:
            return []
        if record.phase is Phase.RUNNING:
            self._unseat(record)
            self._stale = self._stale or self._in_flight is not None
        else:
            self._queues.remove(record)
        record.move(Phase.FINISHED)
        record.reason = reason
        self._finished[reason] += 1
        return [Finished(record.id, reason, error)]

    def _unseat(self, record: Request) -> None:
        """Give lane, sequence and cells back in the books; the next plan does it in the engine."""
        assert record.lane is not None
        assert record.sequence is not None
        del self._seats[record.lane]
        self._pool.release(record.sequence)
        self._retire.append((record.id, record.sequence))
        record.lane = record.sequence = None
        record.fed = 0
        record.decoding = False

    # -- the crank ------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan | None:
        """The next tick, or None if there is nothing to do.

        Raises:
            OutOfOrder: a plan is in flight already.
        """
        if self._in_flight is not None:
            raise OutOfOrder(f"tick {self._in_flight.tick} is in flight")
        retire = tuple(request for request, _ in self._retire)
        free = tuple(dict.fromkeys(sequence for _, sequence in self._retire))
        admit = tuple(self._admit())
        seated = [self._seats[lane] for lane in sorted(self._seats)]
        if not seated and not retire:
            return None
        prefill = planner.grant_prefill(seated, budget.PREFILL_BUDGET)
        step = budget.step_tokens(decoding=any(record.decoding for record in seated), max_step=self.limits.max_step)
        decode = planner.grant_decode(
            seated,
            prefill,
            self._rates,
            step=step,
            open_tick=len(seated) < self.limits.lanes,
            waiting=len(self._queues) > 0,
        )
        self._ticks += 1
        self._stale = False
        self._observed = {}
        self._in_flight = Plan(
            tick=self._ticks,
            retire=retire,
            free=free,
            admit=admit,
            prefill=prefill,
            decode=decode,
            step_tokens=step,
        )
        return self._in_flight

    def _admit(self) -> list[Admit]:
        """Seat queue heads while there is a lane and the pool can promise their cells.

        The head is never overtaken by a smaller request behind it: it would wait for ever under a steady load.
        """
        seated: list[Admit] = []
        while len(self._seats) < self.limits.lanes and self._admit_at_most != len(seated):
            record = self._queues.head()
            if record is None or not self._pool.fits(record.cells):
                break
            self._queues.remove(record)
            record.move(Phase.RUNNING)
            record.lane = next(lane for lane in range(self.limits.lanes) if lane not in self._seats)
            record.sequence = self._pool.promise(record.cells)
            self._seats[record.lane] = record
            seated.append(
                Admit(
                    request=record.id,
                    sequence=record.sequence,
                    tokens=tuple(record.tokens),
                    prompt=record.prompt,
                    sampling=record.sampling,
                )
            )
        return seated

    def observe(self, request: RequestId, position: int, token: int, *, end: bool, now: float) -> Observed:
        """Record a token before anyone sees it.

        Args:
            request: whose.
            position: its index among the request's tokens, prompt included.
            token: its id.
            end: it ends the generation.
            now: the caller's clock, seconds.

        Returns:
            What to do with it. After ``FINISHED`` the request has ended; :meth:`ending` says how.

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
        record.fed = len(record.tokens) - 1
        self._observed[request] = self._observed.get(request, 0) + 1
        self._decode_tokens += 1
        if record.first_token is None:
            record.first_token = now
        if not end and record.remaining_new > 0:
            return Observed.ACCEPTED
        stale = self._stale
        self.finish(request, FinishReason.STOP if end else FinishReason.LENGTH)
        self._stale = stale  # the engine knows that this lane is over; nothing to hurry for on its account
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
        del self._retire[: len(plan.retire)]
        for request, produced in report.decoded:
            record = self._requests.get(request)
            if record is not None and self._observed.get(request, 0) != produced:
                raise OutOfOrder(
                    f"{produced} tokens reported of request {request}, {self._observed.get(request, 0)} seen"
                )
        for request, fed in report.prefilled:
            self._prefill_tokens += fed
            record = self._requests.get(request)
            if record is not None and not record.decoding:
                record.fed += fed
        self._cells_used = report.cells_used
        self._threads = report.timing.threads or self._threads
        self._rates = self._rates.updated(report.timing)
        self._prefill_seconds += report.timing.prefill_seconds
        self._decode_rounds += report.timing.decode_rounds
        self._decode_seconds += report.timing.decode_seconds
        effects: list[Effect] = [Admitted(admitted.request) for admitted in plan.admit]
        for fault in report.faults:
            effects += self.finish(fault.request, FinishReason.ERROR, fault.message)
        self._stale = False
        return effects

    def _replan(self, plan: Plan, report: TickReport, now: float) -> list[Effect]:
        """Nothing ran. Whom the plan admitted goes back to the queue heads, and the next plan admits fewer."""
        self._replans += 1
        if not plan.admit:
            raise OutOfOrder(f"tick {plan.tick} was refused though it admitted nobody: {report.reason}")
        for admitted in reversed(plan.admit):
            record = self._requests.get(admitted.request)
            if record is not None:
                self._requeue(record, Phase.PREEMPTED if record.pauses else Phase.WAITING)
        # The engine never seated them, nor does it know them.
        never_seated = {admitted.request for admitted in plan.admit}
        self._retire = [(request, sequence) for request, sequence in self._retire if request not in never_seated]
        self._admit_at_most = len(plan.admit) // 2
        if self._admit_at_most == 0 and not self._seats:
            # Alone in an empty engine and still refused: it will never fit.
            self._admit_at_most = None
            effects: list[Effect] = []
            for admitted in plan.admit:
                effects += self.finish(
                    admitted.request,
                    FinishReason.ERROR,
                    f"the engine cannot hold this request: {report.reason}",
                )
            return effects
        return []

    def _requeue(self, record: Request, phase: Phase) -> None:
        self._unseat(record)
        record.move(phase)
        self._queues.prepend(record)

    def engine_lost(self, now: float) -> list[Effect]:
        """The engine died with everything it held. Lanes go back to their queue heads and keep their tokens."""
        effects: list[Effect] = []
        for lane in sorted(self._seats, key=lambda lane: self._seats[lane].id, reverse=True):
            record = self._seats[lane]
            record.pauses += 1
            record.queued = now
            self._pauses += 1
            self._requeue(record, Phase.PREEMPTED)
            effects.append(Paused(record.id, "the engine is being restarted"))
        self._retire.clear()
        self._in_flight = None
        self._stale = False
        self._admit_at_most = None
        self._cells_used = 0
        effects.reverse()
        return effects

    def finish_all(self, reason: FinishReason, error: str = "") -> list[Effect]:
        """End every request, oldest first."""
        return [effect for request in list(self._requests) for effect in self.finish(request, reason, error)]

    # -- looking in -----------------------------------------------------------------------------------------------

    @property
    def should_interrupt(self) -> bool:
        """The tick in flight is no longer the best plan: a lane in it was cancelled, or a waiting request could be
        seated now. The engine should end it at its next step."""
        if self._in_flight is None:
            return False
        if self._stale:
            return True
        head = self._queues.head()
        return head is not None and len(self._seats) < self.limits.lanes and self._pool.fits(head.cells)

    @property
    def idle(self) -> bool:
        """Nothing queued, nothing running."""
        return not self._requests

    @property
    def window(self) -> int:
        """The longest context any request can have, tokens."""
        return self._pool.limit

    def request(self, request: RequestId) -> Request | None:
        """A queued or running request's record: to read, not to change."""
        return self._requests.get(request)

    def seated(self) -> list[Request]:
        """Running requests in lane order: to read, not to change."""
        return [self._seats[lane] for lane in sorted(self._seats)]

    def queued(self) -> list[Request]:
        """Waiting requests in the order they would be served: to read, not to change."""
        return list(self._queues)

    def why_waiting(self) -> str:
        """What the next request in line waits for, in words for people."""
        head = self._queues.head()
        if head is None:
            return ""
        if len(self._seats) >= self.limits.lanes:
            return f"a lane: all {self.limits.lanes} are busy"
        if not self._pool.fits(head.cells):
            free = self.limits.cells - self._pool.promised
            return f"KV cells: needs {head.cells}, {free} of {self.limits.cells} are free"
        return "the tick in flight"

    def statistics(self) -> Statistics:
        """Counters and state, in one consistent record."""
        return Statistics(
            ticks=self._ticks,
            submitted=self._submitted,
            finished=dict(self._finished),
            pauses=self._pauses,
            replans=self._replans,
            prefill_tokens=self._prefill_tokens,
            prefill_seconds=self._prefill_seconds,
            decode_tokens=self._decode_tokens,
            decode_rounds=self._decode_rounds,
            decode_seconds=self._decode_seconds,
            lanes=self.limits.lanes,
            lanes_busy=len(self._seats),
            queued=self._queues.depths(),
            cells=self.limits.cells,
            cells_promised=self._pool.promised,
            cells_used=self._cells_used,
            rates=self._rates,
            threads=self._threads,
        )

    def check_integrity(self) -> None:
        """Raise :class:`OutOfOrder` unless the books agree with themselves, and at idle with the engine's count."""
        waiting = {record.id for record in self._queues}
        running = {record.id for record in self._seats.values()}
        if waiting & running or waiting | running != set(self._requests):
            raise OutOfOrder(f"requests {sorted(self._requests)}, waiting {sorted(waiting)}, running {sorted(running)}")
        promised = sum(record.cells for record in self._seats.values())
        if promised != self._pool.promised or (self.limits.shared and promised > self.limits.cells):
            raise OutOfOrder(f"{self._pool.promised} cells promised, {promised} owed, {self.limits.cells} in all")
        if self.idle and not self._retire and self._in_flight is None and self._cells_used:
            raise OutOfOrder(f"nothing runs but the engine holds {self._cells_used} cells")

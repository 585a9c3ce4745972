"""The scheduler's books: what it knows, and every way to look at it. Nothing here decides anything."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from superfluidd.scheduling import budget
from superfluidd.scheduling.admission import Admission
from superfluidd.scheduling.entries import Cache
from superfluidd.scheduling.entries import Entry as KvEntry
from superfluidd.scheduling.kv import Kv
from superfluidd.scheduling.lanes import Lanes
from superfluidd.scheduling.plan import Effect, OutOfOrder, Plan, Urgency
from superfluidd.scheduling.policy import Policy
from superfluidd.scheduling.pool import KvPool
from superfluidd.scheduling.qos import URGENT, format_caps
from superfluidd.scheduling.queues import ClassQueues
from superfluidd.scheduling.request import Phase, Request
from superfluidd.scheduling.shares import Share
from superfluidd.scheduling.statistics import Counters, Statistics
from superfluidd.scheduling.trail import Entry, Kind, Trail
from superfluidd.scheduling.turns import Turns
from superfluidd.types import QosClass, RequestId


class Limits(msgspec.Struct, frozen=True):
    """What the scheduler may hand out, from the engine's hello.

    Attributes:
        lanes: requests that run at once.
        shared: KV layout: one pool, or a window per sequence.
        cells: KV cells in all.
        sequences: engine sequences; those beyond the lanes hold KV that is kept.
        window: longest context of one sequence, tokens.
        max_step: largest useful prefill micro-batch, tokens.
        granular: a running tick can be ended at the engine's next step, and rounds cost the same however they are cut.
        abandons: a prefill step can be given up in its middle.
        cache: how KV that requests leave behind is kept.
    """

    lanes: int
    shared: bool
    cells: int
    sequences: int
    window: int
    max_step: int = 512
    granular: bool = True
    abandons: bool = False
    cache: Cache = Cache()


class Books:
    """State of one scheduler.

    Args:
        limits: what there is to hand out.
        policy: the operator's settings.
        caps: most lanes of a class.
        first_id: id of the first request; ids are unique over all models of a daemon.
        host, disk: shares of the memory and disk space for KV, if other schedulers use them as well.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy | None = None,
        caps: Mapping[QosClass, int] | None = None,
        first_id: int = 1,
        host: Share | None = None,
        disk: Share | None = None,
    ) -> None:
        self.limits = limits
        self.policy = policy or Policy()
        self._next_id = first_id
        self._requests: dict[RequestId, Request] = {}
        self._queues = ClassQueues()
        self._lanes = Lanes(limits.lanes, caps)
        self._pool = KvPool(shared=limits.shared, cells=limits.cells, sequences=limits.sequences, window=limits.window)
        self._counters = Counters()
        self._kv = Kv(self._pool, limits.cache, self._counters, host, disk)
        self._admission = Admission(self.policy, self._queues, self._lanes, self._pool, self._kv, self._counters)
        self._turns = Turns()
        self._in_flight: Plan | None = None
        self._observed: dict[RequestId, int] = {}
        self._admit_at_most: int | None = None
        self._cleared = False
        """The latest plan was refused, and what was kept has been given up for it."""
        self._effects: list[Effect] = []
        self._ended: OrderedDict[RequestId, Trail] = OrderedDict()
        # What has happened since the plan in flight was made:
        self._cancelled: list[RequestId] = []
        self._arrived: list[RequestId] = []
        self._hurry = False
        self._sent = 0, 0
        """How much of what there is to retire and to do with KV the plan in flight has taken care of."""
        self._urgent_at = self._urgent_before = -math.inf
        """When the latest interactive or completion request arrived, and the one before it."""
        self._rates = budget.Rates()
        self._adaptive = budget.ADAPTIVE_START
        self._prefill_budget = 0
        self._decode_grant = 0
        self._cells_used = 0
        self._threads = 0

    def _note(self, record: Request, kind: Kind, now: float, *, count: int = 1, tokens: int = 0, why: str = "") -> None:
        tick = self._counters.ticks
        record.trail.add(Entry(now, tick, kind, record.qos.label, count=count, tokens=tokens, why=why))

    # -- looking in -----------------------------------------------------------------------------------------------

    @property
    def urgency(self) -> Urgency:
        """Whether the tick in flight is to end early: a lane in it was cancelled, or an interactive or completion
        request was queued (source: the specification, "Prefill and decode budgets"). A native engine finishes its tick.
        Going finer than the specification, any newcomer that finds a lane free ends it, too: it costs nobody anything.

        A running prefill step is given up if the lane that was cancelled is part of it, or if the interactive or
        completion request can be seated; but not if a lane in it has not got on since the last time, nor if the step is
        so short that less would be won than lost.
        """
        plan = self._in_flight
        if plan is None or not self.limits.granular:
            return Urgency.NONE
        waiting = [record for request in self._arrived if (record := self._requests.get(request))]
        waiting = [record for record in waiting if record.phase is not Phase.RUNNING]
        urgent = [record for record in waiting if record.qos <= URGENT]
        if not urgent and not self._cancelled and not self._hurry:
            free = any(self._admission.finds_room(record, plan.tick + 1) for record in waiting)
            return Urgency.STOP if free else Urgency.NONE
        if not self.limits.abandons or not budget.worth_abandoning(self._rates, plan.prefill, plan.step_tokens):
            return Urgency.STOP
        fed = {chunk.request for chunk in plan.prefill}
        lanes = [record for request in fed if (record := self._requests.get(request))]
        if any(lane.abandoned for lane in lanes):
            return Urgency.STOP
        wanted = any(request in fed for request in self._cancelled) or any(
            self._admission.could_seat(record, plan.tick + 1) for record in urgent
        )
        return Urgency.ABANDON if wanted else Urgency.STOP

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
        return self._lanes.in_order()

    def queued(self) -> list[Request]:
        """Waiting requests by class and place: to read, not to change."""
        return list(self._queues)

    @property
    def pin_cells(self) -> int:
        """How much may be pinned, tokens."""
        return self._kv.pin_cells

    def kept(self) -> Sequence[KvEntry]:
        """KV that requests left behind: to read, not to change."""
        return self._kv.entries

    def position(self, request: RequestId) -> int:
        """Place of a waiting request in its class's queue, from 1; 0 if it is not waiting."""
        record = self._requests.get(request)
        return 0 if record is None or record.phase is Phase.RUNNING else self._queues.position(record)

    def trail(self, request: RequestId) -> Trail | None:
        """What was decided about a request, also some time after its end."""
        record = self._requests.get(request)
        return self._ended.get(request) if record is None else record.trail

    def why_waiting(self, record: Request) -> str:
        """What a waiting request waits for, in words for people."""
        qos = record.qos
        if qos in self._lanes.paused:
            return f"an operator: {qos.label} is paused"
        if self._lanes.capped(qos):
            return f"its class: {format_caps({qos: self._lanes.caps[qos]})} is the cap"
        if not self._admission.rung.admits(qos, record.cells):
            return "memory: the machine is out of it"
        leader = self._admission.leader(record, self._counters.ticks + 1)
        if leader is not None:
            return f"what its prompt begins with: request {leader.id} is being fed it"
        candidates = self._admission.candidates(self._counters.ticks + 1, None)
        if not candidates or record is not candidates[0]:
            return "its turn"
        if self._lanes.full:
            return f"a lane: all {self.limits.lanes} are busy"
        if not self._admission.fits(record):
            free = self.limits.cells - self._pool.promised
            return f"KV cells: needs {record.cells}, {free} of {self.limits.cells} are free"
        return "the tick in flight"

    def statistics(self) -> Statistics:
        """Counters and state, in one consistent record."""
        counters = self._counters
        return Statistics(
            ticks=counters.ticks,
            submitted=counters.submitted,
            finished=dict(counters.finished),
            pauses=counters.pauses,
            preemptions=dict(counters.preemptions),
            starvation_grants=dict(counters.starvation_grants),
            replans=counters.replans,
            prefill_tokens=counters.prefill_tokens,
            prefill_seconds=counters.prefill_seconds,
            abandoned_tokens=counters.abandoned_tokens,
            computed=counters.computed,
            decode_tokens=counters.decode_tokens,
            decode_rounds=counters.decode_rounds,
            decode_seconds=counters.decode_seconds,
            lanes=self.limits.lanes,
            lanes_busy=len(self._lanes),
            queued=self._queues.depths(),
            caps=dict(self._lanes.caps),
            paused=tuple(sorted(self._lanes.paused)),
            cells=self.limits.cells,
            cells_promised=self._pool.promised,
            cells_kept=self._pool.kept,
            kv=self._kv.statistics(),
            cells_used=self._cells_used,
            prefill_budget=self._prefill_budget,
            decode_grant=self._decode_grant,
            rates=self._rates,
            threads=self._threads,
        )

    def check_integrity(self) -> None:
        """Raise :class:`OutOfOrder` unless the books agree with themselves, and at idle with the engine's count."""
        waiting = {record.id for record in self._queues}
        seated = self._lanes.in_order()
        running = {record.id for record in seated}
        if waiting & running or waiting | running != set(self._requests):
            raise OutOfOrder(f"requests {sorted(self._requests)}, waiting {sorted(waiting)}, running {sorted(running)}")
        promised = sum(record.cells for record in seated)
        kept = self._kv.resident()
        if promised != self._pool.promised or (self.limits.shared and promised + kept > self.limits.cells):
            raise OutOfOrder(
                f"{self._pool.promised} cells promised and {kept} kept, {promised} owed, {self.limits.cells} in all"
            )
        if kept != self._pool.kept:
            raise OutOfOrder(f"{self._pool.kept} cells kept, {kept} of them by somebody")
        to_do = self._admission.retire or self._kv.ops
        exact = self.limits.cache.cut == "anywhere"  # elsewhere an engine drops cells that it will not look at again
        if self.idle and not to_do and self._in_flight is None:
            wrong = self._cells_used != kept if exact else self._cells_used > kept
            if wrong:
                raise OutOfOrder(f"nothing runs, {kept} cells are kept, but the engine holds {self._cells_used}")

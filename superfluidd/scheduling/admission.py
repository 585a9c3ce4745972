"""Who gets a lane next: queues, lanes, the pool and preemption in one place. One call a tick."""

from __future__ import annotations

from superfluidd.scheduling import budget
from superfluidd.scheduling.kv import Kv
from superfluidd.scheduling.lanes import Lanes
from superfluidd.scheduling.plan import Admit
from superfluidd.scheduling.policy import Policy
from superfluidd.scheduling.pool import KvPool
from superfluidd.scheduling.preemption import choose_victims
from superfluidd.scheduling.pressure import TINY_CELLS, Rung
from superfluidd.scheduling.qos import URGENT
from superfluidd.scheduling.queues import ClassQueues, effective_class
from superfluidd.scheduling.request import Phase, Request
from superfluidd.scheduling.statistics import Counters
from superfluidd.scheduling.trail import Entry, Kind
from superfluidd.types import QosClass, RequestId

AWAIT_TICKS = 64
"""Ticks after which a request waits no longer for a prefix that another is being fed."""


class Admission:
    """Moves requests between queues and lanes, in the books. The scheduler owns it and everything it is given.

    Attributes:
        retire: requests whose lanes the engine has yet to forget.
        worth_waiting: tokens of a prefix that is worth waiting for.
        rung: how short of memory the operating system is, and so who gets lanes.
    """

    def __init__(
        self, policy: Policy, queues: ClassQueues, lanes: Lanes, pool: KvPool, kv: Kv, counters: Counters
    ) -> None:
        self.policy = policy
        self.retire: list[RequestId] = []
        self.worth_waiting = budget.WAIT_UNKNOWN
        self.rung = Rung.NORMAL
        self._queues = queues
        self._lanes = lanes
        self._pool = pool
        self._kv = kv
        self._counters = counters

    # -- who is next ----------------------------------------------------------------------------------------------

    def candidates(self, tick: int, now: float | None) -> list[Request]:
        """Class heads that may be seated, best first.

        Args:
            tick: number of the tick they would be seated in.
            now: heads that may not be seated are told why in their trails; None keeps quiet.
        """
        small = TINY_CELLS if self.rung is Rung.TINY_CHATS else None
        heads = self._queues.heads(tick, self.policy.starvation_ticks, small)
        allowed: list[Request] = []
        for head in heads:
            bar = self._bar(head)
            leader = self.leader(head, tick) if bar is None else None
            if now is not None:
                self._note_bar(head, bar, leader, tick, now)
            if bar is None and leader is None:
                allowed.append(head)
        alone = [head for head in allowed if head.batch_invariant]
        if not alone:
            return allowed
        barrier = min(alone, key=lambda head: head.qos)
        passed: list[Request] = []
        for head in allowed:
            if head is barrier or head.qos < barrier.qos:
                passed.append(head)
            elif now is not None:
                entry = Entry(now, tick, "held-back", head.qos.label, other=barrier.id, other_qos=barrier.qos.label)
                head.trail.add(entry)
        return passed

    def _bar(self, head: Request) -> tuple[Kind, str] | None:
        """What keeps a class from getting lanes at all."""
        qos = head.qos
        if qos in self._lanes.paused:
            return "class-paused", ""
        if self._lanes.capped(qos):
            return "capped", f"{self._lanes.held_by(qos)} of {self._lanes.caps[qos]}"
        if not self.rung.admits(qos, head.cells):
            return "memory-critical", ""
        return None

    def _note_bar(
        self, head: Request, bar: tuple[Kind, str] | None, leader: Request | None, tick: int, now: float
    ) -> None:
        if bar is not None:
            big = head.cells if bar[0] == "memory-critical" and head.qos is QosClass.INTERACTIVE else 0
            head.trail.add(Entry(now, tick, bar[0], head.qos.label, why=bar[1], tokens=big))
        elif leader is not None:
            if head.awaits_tick is None:
                head.awaits_tick = tick
            self._note(head, "awaits-prefix", tick, now, other=leader)

    def leader(self, head: Request, tick: int) -> Request | None:
        """The lane that is being fed what a request's prompt begins with, if that is worth waiting for, and for a
        while."""
        if head.awaits_tick is not None and tick - head.awaits_tick >= AWAIT_TICKS:
            return None
        return self._kv.leader(head, self._lanes.in_order(), self.worth_waiting)

    def fits(self, record: Request, without: list[Request] | None = None) -> bool:
        """Whether a request could be seated, with these lanes given up."""
        gone = without or []
        if len(self._lanes) - len(gone) >= self._lanes.count:
            return False
        if self._pool.shared and self._shares_pool_with(record, gone):
            return False
        if not gone:
            return self._pool.fits(record.cells)
        if not self._pool.shared:
            return record.cells <= self._pool.limit
        freed = sum(lane.cells for lane in gone)
        return record.cells <= self._pool.limit and self._pool.promised - freed + record.cells <= self._pool.cells

    def _shares_pool_with(self, record: Request, gone: list[Request]) -> bool:
        """In a shared pool a batch-invariant request must be the only one: where its cells lie depends on others."""
        others = [lane for lane in self._lanes.in_order() if lane not in gone]
        return bool(others) and (record.batch_invariant or any(lane.batch_invariant for lane in others))

    def victims(self, record: Request, tick: int) -> list[Request]:
        """Lanes to give up for a request that cannot be seated otherwise; empty if it may not or would not help."""
        return choose_victims(
            record,
            self._lanes.in_order(),
            agents=self.policy.agent_preempts_background,
            protected=lambda lane: self._protected(lane, tick),
            enough=lambda lanes: self.fits(record, lanes),
        )

    def _protected(self, lane: Request, tick: int) -> bool:
        """Who was seated in this very tick; and who got a lane for having waited, for as long as a class's wait: it
        would otherwise lose it before it got anything done, again and again."""
        return lane.seated_tick == tick or (lane.risen and tick - lane.seated_tick <= self.policy.starvation_ticks)

    def could_seat(self, record: Request, tick: int) -> bool:
        """Whether the next plan could seat a waiting request."""
        return record in self.candidates(tick, None) and (self.fits(record) or bool(self.victims(record, tick)))

    def finds_room(self, record: Request, tick: int) -> bool:
        """Whether the next plan could seat a waiting request without taking anybody's lane."""
        return not self._lanes.full and record in self.candidates(tick, None) and self.fits(record)

    # -- seating and unseating ------------------------------------------------------------------------------------

    def admit(self, tick: int, now: float, at_most: int | None) -> tuple[list[Admit], list[Request]]:
        """Seat who is next, for as long as there is room or somebody who must make it.

        A head is never overtaken by a smaller request of its class behind it, nor by a lower class when only the pool
        is short: it would wait for ever under a steady load. But an interactive or completion request does not wait
        behind one that has merely risen.

        Returns:
            What the engine shall seat, and who lost a lane for it.
        """
        seats: list[Admit] = []
        lost: list[Request] = []
        while at_most is None or len(seats) < at_most:
            heads = self.candidates(tick, now)
            chosen = self._choose(heads, tick)
            if chosen is None:
                break
            record, victims = chosen
            for victim in victims:
                self.preempt(victim, tick, now, record)
            lost += victims
            seats.append(self._seat(record, heads, tick, now))
        return seats, lost

    def _choose(self, heads: list[Request], tick: int) -> tuple[Request, list[Request]] | None:
        """The next request to seat, and whose lanes it takes."""
        for place, head in enumerate(heads):
            may_pass = place == 0 or (head.qos <= URGENT and head.qos < heads[0].qos)
            if may_pass and self.fits(head):
                return head, []
            victims = self.victims(head, tick)
            if victims:
                return head, victims
        return None

    def _seat(self, record: Request, heads: list[Request], tick: int, now: float) -> Admit:
        self._note_overtaken(record, tick, now)
        effective = effective_class(record, tick, self.policy.starvation_ticks)
        passed = [head for head in heads if effective <= head.qos < record.qos]
        record.risen = bool(passed)
        if passed:
            self._counters.starvation_grants[record.qos] += 1
            self._note(record, "starved-up", tick, now, other=passed[0], why=QosClass(effective).label)
        again = record.phase is Phase.PREEMPTED
        self._queues.remove(record)
        record.move(Phase.RUNNING)
        record.sequence, record.fed = self._kv.seat(record, self._lanes.in_order())
        self._lanes.seat(record)
        record.seated, record.seated_tick, record.starved = now, tick, 0
        if again:
            self._note(record, "resumed", tick, now, tokens=record.fed)
        else:
            record.cached = record.fed
            self._counters.prefix_hits += record.fed > 0
            self._counters.cached_tokens += record.fed
            why = f"it had waited {now - record.queued:.3f} s"
            self._note(record, "admitted", tick, now, tokens=record.fed, why=why)
        return Admit(
            request=record.id,
            sequence=record.sequence,
            tokens=tuple(record.tokens),
            prompt=record.prompt,
            sampling=record.sampling,
            cached=record.fed,
        )

    def preempt(self, record: Request, tick: int, now: float, winner: Request | None, why: str = "") -> None:
        """Take a running request's lane. It goes back to the head of its queue; its KV is held while there is room."""
        assert record.sequence is not None
        lane = self._lanes.leave(record)
        self.retire.append(record.id)
        self._counters.preemptions[record.qos] += 1
        self._note(record, "preempted", tick, now, other=winner, lane=lane, tokens=record.fed, why=why)
        self._hold(record)
        self.requeue(record, Phase.PREEMPTED, tick, now)
        record.pauses += 1
        self._counters.pauses += 1

    def _hold(self, record: Request) -> None:
        """Keep what the engine has of a request that is losing its lane, if it has anything."""
        self._kv.leave(record, waits=True)
        record.fed, record.decoding = 0, False

    def requeue(self, record: Request, phase: Phase, tick: int, now: float) -> None:
        """Back to the head of its class."""
        record.move(phase)
        record.queued, record.queued_tick = now, tick
        self._queues.prepend(record)

    def undo(self, record: Request, tick: int, now: float, why: str) -> None:
        """Take a seat back that the engine refused before anything ran. Its wait goes on as if nothing had been."""
        self._lanes.leave(record)
        self._hold(record)
        queued, queued_tick = record.queued, record.queued_tick
        self.requeue(record, Phase.PREEMPTED if record.pauses else Phase.WAITING, tick, now)
        record.queued, record.queued_tick = queued, queued_tick
        self._note(record, "refused-by-engine", tick, now, why=why)

    def leave(self, record: Request, *, keep: bool, certain: bool) -> None:
        """A running or waiting request is over: give back whatever it has.

        Args:
            record: it is.
            keep: its KV may be of use to others.
            certain: the engine holds exactly what the books say.
        """
        if record.phase is Phase.RUNNING:
            self._lanes.leave(record)
            self.retire.append(record.id)
            self._kv.leave(record, waits=False, certain=certain, whole=keep)
        else:
            self._queues.remove(record)
            self._kv.disown(record)

    def lose_engine(self, record: Request, tick: int, now: float) -> None:
        """The engine took a running request's KV with it."""
        assert record.sequence is not None
        lane = self._lanes.leave(record)
        self._pool.release(record.sequence)
        record.sequence, record.fed, record.decoding = None, 0, False
        self._note(record, "engine-lost", tick, now, lane=lane)
        self.requeue(record, Phase.PREEMPTED, tick, now)
        record.pauses += 1
        self._counters.pauses += 1

    def lose_kept(self) -> None:
        """The engine took with it whatever was kept, and has nothing to retire or empty any more."""
        self._kv.lose()
        self.retire.clear()

    # -- writing down ---------------------------------------------------------------------------------------------

    def _note_overtaken(self, winner: Request, tick: int, now: float) -> None:
        """Of those it goes ahead of, only the class heads are told: the cost must not grow with the queues. Who has
        just been preempted for it knows already."""
        for qos in QosClass:
            head = self._queues.first(qos)
            if head is not None and head.id < winner.id and not (head.pauses and head.queued_tick == tick):
                self._note(head, "overtaken", tick, now, other=winner)

    def _note(
        self,
        record: Request,
        kind: Kind,
        tick: int,
        now: float,
        *,
        other: Request | None = None,
        lane: int | None = None,
        tokens: int = 0,
        why: str = "",
    ) -> None:
        seat = record.lane if lane is None else lane
        record.trail.add(
            Entry(
                now,
                tick,
                kind,
                record.qos.label,
                other=0 if other is None else other.id,
                other_qos="" if other is None else other.qos.label,
                lane=-1 if seat is None else seat,
                tokens=tokens,
                why=why,
            )
        )

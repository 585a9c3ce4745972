"""Time for the scheduler: works plans off as the executor does over the simulated runtime, and charges what that costs.

It is the same to the moment as a daemon with ``--engine simulated`` in process (a test compares first-token times),
but there are no tokens, no tasks and no clock: a plan is arithmetic.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import msgspec

from superfluidd.engine.runtimes.simulated import LANE_SECONDS, PREFILL_RATE, PREFILL_SECONDS, ROUND_SECONDS
from superfluidd.scheduling.books import Limits
from superfluidd.scheduling.entries import Cache
from superfluidd.scheduling.plan import Plan, TickReport, Timing, Urgency
from superfluidd.scheduling.policy import Policy
from superfluidd.scheduling.request import Request
from superfluidd.scheduling.scheduler import Observed, Scheduler
from superfluidd.simulate.stats import Stats, Timeline
from superfluidd.simulate.trace import Arrival
from superfluidd.types import QosClass, RequestId, SamplingParams

SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)

_OWN = 1 << 30
"""Token ids from here on belong to one request alone, those below to a prefix."""


class Engine(msgspec.Struct, frozen=True):
    """The engine that is simulated.

    Attributes:
        lanes: requests at once; ``spare``: sequences beside them.
        window: longest context, tokens.
        speed: divides the simulated runtime's costs.
        cache: how KV that requests leave behind is kept.
    """

    lanes: int = 8
    spare: int = 2
    window: int = 8192
    max_step: int = 512
    speed: float = 1.0
    cache: Cache = Cache()

    @property
    def limits(self) -> Limits:
        """For the scheduler."""
        sequences = self.lanes + self.spare
        return Limits(
            lanes=self.lanes,
            shared=False,
            cells=sequences * self.window,
            sequences=sequences,
            window=self.window,
            max_step=self.max_step,
            granular=True,
            abandons=True,
            cache=self.cache,
        )

    def step_seconds(self, tokens: int, lanes: int) -> float:
        """What a step costs: a token a lane is a decode round."""
        nominal = ROUND_SECONDS + LANE_SECONDS * lanes if tokens == lanes else PREFILL_SECONDS + tokens / PREFILL_RATE
        return nominal / self.speed


class World:
    """A scheduler, an engine of arithmetic, and what comes of it.

    Args:
        engine: what is simulated.
        policy, caps: the scheduler's settings.
        timeline: collects lanes over time, if anybody wants to see them.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy | None = None,
        caps: Mapping[QosClass, int] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.stats = Stats(lanes=engine.lanes)
        self.first_tokens: dict[RequestId, float] | None = None
        """If set, when each request had its first token: for tests."""
        self._engine = engine
        self._scheduler = Scheduler(engine.limits, policy, caps)
        self._timeline = timeline
        self._live: dict[RequestId, Request] = {}
        self._unfed: dict[RequestId, int] = {}
        """Known tokens of a lane that are not fed yet, as the engine counts."""
        self._decoding: set[RequestId] = set()
        self._arrivals: Iterator[Arrival] = iter(())
        self._next: Arrival | None = None
        self._now = 0.0
        self._submitted = 0

    def run(self, arrivals: Iterator[Arrival]) -> Stats:
        """Let a trace pass. Raises what reading it raises."""
        self._arrivals = arrivals
        self._next = next(arrivals, None)
        begun = self._next.t if self._next is not None else 0.0
        self._now = begun
        while True:
            self._arrive(self._now)
            plan = self._scheduler.plan(self._now)
            if plan is None:
                if self._next is None:
                    break
                self._now = self._next.t
                continue
            started = self._now
            self._scheduler.apply(self._tick(plan), self._now)
            self._scheduler.take_effects()
            self._account(started)
        self.stats.seconds = self._now - begun
        return self._finish()

    def _finish(self) -> Stats:
        counted = self._scheduler.statistics()
        stats = self.stats
        stats.ticks, stats.abandoned_tokens = counted.ticks, counted.abandoned_tokens
        stats.prefill_tokens, stats.decode_tokens = counted.prefill_tokens, counted.decode_tokens
        stats.cached_tokens = counted.kv.cached_tokens
        for qos in QosClass:
            stats.classes[qos].preemptions = counted.preemptions[qos]
            stats.classes[qos].starvation_grants = counted.starvation_grants[qos]
        return stats

    def _account(self, started: float) -> None:
        seconds = self._now - started
        self.stats.busy += seconds
        seated = self._scheduler.seated()
        self.stats.lane_seconds += len(seated) * seconds
        if self._timeline is not None:
            lanes = [0] * len(QosClass)
            for record in seated:
                lanes[record.qos] += 1
            self._timeline.add(started, seconds, lanes)

    # -- arrivals -------------------------------------------------------------------------------------------------

    def _arrive(self, until: float) -> None:
        """Whoever comes up to that moment."""
        while self._next is not None and self._next.t <= until:
            self._submit(self._next)

    def _submit(self, arrival: Arrival) -> None:
        record = self._scheduler.submit(
            self._prompt(arrival),
            sampling=SAMPLING,
            max_tokens=arrival.output,
            qos=arrival.qos,
            now=arrival.t,
        )
        self._live[record.id] = record
        self.stats.classes[arrival.qos].requests += 1
        self._next = next(self._arrivals, None)

    def _prompt(self, arrival: Arrival) -> list[int]:
        """Token ids that are equal as far as the trace says, and no further."""
        self._submitted += 1
        own = _OWN + self._submitted % _OWN
        shared = [zlib.crc32(arrival.prefix.encode()) % _OWN] * arrival.prefix_tokens
        return shared + [own] * (arrival.prompt - arrival.prefix_tokens)

    def _pass(self, seconds: float, *, abandonable: bool) -> Urgency:
        """Let a step's time pass, with whoever comes in it. ABANDON: it ended there and then."""
        end = self._now + seconds
        told = Urgency.NONE
        while self._next is not None and self._next.t < end:
            self._now = self._next.t
            self._submit(self._next)
            told = max(told, self._scheduler.urgency)
            if told is Urgency.ABANDON and abandonable:
                return told
        self._now = end
        return told

    # -- a tick, as the executor runs it --------------------------------------------------------------------------

    def _tick(self, plan: Plan) -> TickReport:
        self._seat(plan)
        grants = {grant.request: grant.rounds for grant in plan.decode}
        chunks = [[chunk.request, chunk.tokens] for chunk in plan.prefill]
        decoded: dict[RequestId, int] = {}
        prefilled: dict[RequestId, int] = {}
        abandoned: tuple[tuple[RequestId, int], ...] = ()
        rounds, round_tokens, round_seconds, fed, feed_seconds = 0, 0, 0.0, 0, 0.0
        stopped = False
        while not stopped:
            batch = [request for request, left in grants.items() if left > 0 and request in self._decoding]
            if batch:
                seconds = self._engine.step_seconds(len(batch), len(batch))
                stopped = self._pass(seconds, abandonable=False) > Urgency.NONE
                for request in batch:
                    grants[request] -= 1
                    self._token(request, decoded)
                rounds += 1
                round_tokens += len(batch)
                round_seconds += seconds
                stopped = stopped or self._scheduler.urgency > Urgency.NONE
            micro = [] if stopped else _take(chunks, plan.step_tokens)
            if micro:
                tokens = sum(share for _, share in micro)
                seconds = self._engine.step_seconds(tokens, len(micro))
                told = self._pass(seconds, abandonable=True)
                if told is Urgency.ABANDON:
                    abandoned, stopped = tuple(micro), True
                    break
                for request, share in micro:
                    prefilled[request] = prefilled.get(request, 0) + share
                    self._unfed[request] -= share
                    if self._unfed[request] == 0:
                        self._decoding.add(request)
                        self._token(request, decoded)
                fed += tokens
                feed_seconds += seconds
                stopped = told > Urgency.NONE or self._scheduler.urgency > Urgency.NONE
            if not batch and not micro:
                break
        return TickReport(
            plan.tick,
            "stopped" if stopped else "done",
            tuple(prefilled.items()),
            tuple(decoded.items()),
            timing=Timing(rounds, round_tokens, round_seconds, fed, feed_seconds),
            abandoned=abandoned,
        )

    def _seat(self, plan: Plan) -> None:
        for request in plan.retire:
            self._unfed.pop(request, None)
            self._decoding.discard(request)
        for seat in plan.admit:
            record = self._live[seat.request]
            self._unfed[seat.request] = len(seat.tokens) - seat.cached
            self.stats.classes[record.qos].queue_wait.add(record.seated - record.queued)

    def _token(self, request: RequestId, decoded: dict[RequestId, int]) -> None:
        record = self._live.get(request)
        if record is None:
            return
        last = record.last_token
        seen = self._scheduler.observe(request, len(record.tokens), 0, end=False, now=self._now)
        decoded[request] = decoded.get(request, 0) + 1
        stats = self.stats.classes[record.qos]
        stats.tokens += 1
        if last is None:
            stats.ttft.add(self._now - record.arrived)
            if self.first_tokens is not None:
                self.first_tokens[request] = self._now
        else:
            stats.gap.add(self._now - last)
        if seen is Observed.FINISHED:
            stats.finished += 1
            del self._live[request]


def _take(chunks: list[list[int]], most: int) -> list[tuple[RequestId, int]]:
    """The next micro-batch: (request, tokens), at most ``most`` tokens in all, in the plan's order."""
    micro: list[tuple[RequestId, int]] = []
    while chunks and most > 0:
        share = min(chunks[0][1], most)
        micro.append((chunks[0][0], share))
        most -= share
        chunks[0][1] -= share
        if chunks[0][1] == 0:
            chunks.pop(0)
    return micro

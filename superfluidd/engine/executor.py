"""One tick of a plan over a runtime, step by step.

Mechanism only: the executor does what the plan says and reports what it did. A step is one call of the runtime: a
decode round for every lane with grant left, or a prefill micro-batch. Rounds and micro-batches alternate, rounds
first, and every step's tokens leave at once. After each step the tick ends if it was told to.

A step that fails is tried again lane by lane, so that one bad lane does not take its neighbours along.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import msgspec

from superfluidd.engine.parking import Store
from superfluidd.engine.port import Choice, Draw, EngineError, Feed, OutOfCells, Runtime, StepAbandoned
from superfluidd.engine.threads import FixedThreads, ThreadPolicy
from superfluidd.engine.wire import StepDone, TokenOut
from superfluidd.scheduling.plan import (
    Admit,
    Copy,
    Cut,
    Discard,
    Export,
    Forget,
    Free,
    Import,
    KvOp,
    LaneFault,
    Park,
    Plan,
    Recall,
    TickReport,
    Timing,
)
from superfluidd.types import RequestId

log = logging.getLogger(__name__)


Elsewhere = Export | Discard | Park | Forget
"""What changes no sequence."""


class BadPlan(Exception):
    """The plan contradicts itself or what the executor holds: a fault of the daemon's, never of a lane."""


class StepStarting(msgspec.Struct, frozen=True):
    """An abandonable prefill step is about to begin: of interest to whoever lets its time pass."""

    tokens: int
    lanes: int


@dataclass(slots=True)
class _Lane:
    """A seated request. ``tokens[:fed]`` are in KV; a decoding lane has one token left to feed."""

    request: RequestId
    sequence: int
    tokens: list[int]
    prompt: int
    fed: int
    draw_from: Admit
    end_tokens: tuple[int, ...]
    decoding: bool = False
    over: bool = False


@dataclass(slots=True)
class _Chunk:
    """Prompt tokens of a lane still to feed in this tick."""

    lane: _Lane
    left: int


@dataclass(slots=True)
class _Saved:
    """KV in host memory."""

    state: bytes
    length: int


class _Tally:
    """What a tick has done so far."""

    def __init__(self) -> None:
        self.emptied: dict[int, None] = {}
        """In the order in which it happened. What is refilled or emptied on purpose later in the plan is not in it."""
        self.exported: list[tuple[int, int]] = []
        self.prefilled: dict[RequestId, int] = {}
        self.decoded: dict[RequestId, int] = {}
        self.faults: list[LaneFault] = []
        self.abandoned: tuple[tuple[RequestId, int], ...] = ()
        self.rounds = 0
        self.round_tokens = 0
        self.round_seconds = 0.0
        self.fed = 0
        self.feed_seconds = 0.0

    def feed(self, micro: Sequence[tuple[_Lane, int]]) -> None:
        """These lanes were fed so many tokens, but for those that failed."""
        for lane, share in micro:
            if not lane.over or lane.decoding:
                self.prefilled[lane.request] = self.prefilled.get(lane.request, 0) + share
                self.fed += share


class Executor:
    """Lanes over a runtime.

    Args:
        runtime: computes.
        threads: chooses compute threads step by step; by default nothing is changed.
        store: keeps what is parked; without one nothing can be.
    """

    def __init__(self, runtime: Runtime, threads: ThreadPolicy | None = None, store: Store | None = None) -> None:
        self._runtime = runtime
        self._store = store
        self._threads = threads or FixedThreads()
        self._lanes: dict[RequestId, _Lane] = {}
        self._saved: dict[int, _Saved] = {}
        self._exact = False

    def run(self, plan: Plan, should_stop: Callable[[], bool]) -> Generator[StepDone | StepStarting, None, TickReport]:
        """Run one tick: yields after every step, and before those that can be abandoned; returns the report.

        Args:
            plan: what to do.
            should_stop: asked after every step; True ends the tick there.

        Raises:
            BadPlan: before anything ran.
        """
        self._validate(plan)
        tally = _Tally()
        refusal = self._seat(plan, tally)
        if refusal:
            return TickReport(plan.tick, "replan", cells_used=self._runtime.cells_used(), reason=refusal)
        self._runtime.abandon(False)
        self._exact = plan.exact
        grants = {grant.request: grant.rounds for grant in plan.decode}
        chunks = [_Chunk(self._lanes[chunk.request], chunk.tokens) for chunk in plan.prefill]
        packs = self._runtime.info.packs_prefill_with_decode and not plan.exact
        stopped = False
        while not stopped:
            batch = [
                lane
                for request in grants
                if grants[request] > 0 and (lane := self._lanes[request]).decoding and not lane.over
            ]
            for lane in batch:
                grants[lane.request] -= 1
            if packs and batch and (micro := self._take(chunks, plan.step_tokens)):
                tokens = self._packed_step(batch, micro, tally)
                yield StepDone(plan.tick, tuple(tokens), tuple(tally.prefilled.items()))
                stopped = should_stop()
                continue
            if batch:
                yield StepDone(plan.tick, tuple(self._decode_round(batch, tally)))
                stopped = should_stop()
            micro = [] if stopped else self._take(chunks, plan.step_tokens)
            if micro:
                if self._runtime.info.abandons:
                    yield StepStarting(sum(share for _, share in micro), len(micro))
                tokens = self._prefill_step(micro, tally)
                if tally.abandoned:
                    stopped = True
                    break
                yield StepDone(plan.tick, tuple(tokens), tuple(tally.prefilled.items()))
                stopped = should_stop()
            if not batch and not micro:
                break
        return TickReport(
            tick=plan.tick,
            outcome="stopped" if stopped else "done",
            prefilled=tuple(tally.prefilled.items()),
            decoded=tuple(tally.decoded.items()),
            faults=tuple(tally.faults),
            cells_used=self._runtime.cells_used(),
            computed=self._runtime.computed(),
            timing=Timing(
                decode_rounds=tally.rounds,
                decode_tokens=tally.round_tokens,
                decode_seconds=tally.round_seconds,
                prefill_tokens=tally.fed,
                prefill_seconds=tally.feed_seconds,
                threads=self._threads.current,
            ),
            abandoned=tally.abandoned,
            emptied=tuple(tally.emptied),
            exported=tuple(tally.exported),
        )

    # -- before the first step ------------------------------------------------------------------------------------

    def _validate(self, plan: Plan) -> None:
        """Nothing has happened yet when this raises."""
        retired = set(plan.retire)
        admitted = {seat.request for seat in plan.admit}
        if len(admitted) != len(plan.admit) or admitted & (self._lanes.keys() - retired):
            raise BadPlan(f"tick {plan.tick} admits a request twice")
        known = (self._lanes.keys() - retired) | admitted
        named = [chunk.request for chunk in plan.prefill] + [grant.request for grant in plan.decode]
        strangers = sorted(set(named) - known)
        if strangers:
            raise BadPlan(f"tick {plan.tick} names requests {strangers} that have no lane")
        held = {lane.sequence for request, lane in self._lanes.items() if request not in retired}
        taken = [seat.sequence for seat in plan.admit]
        changed = {op.sequence for op in plan.kv if not isinstance(op, Elsewhere)}
        if len(set(taken)) != len(taken) or held & (set(taken) | changed):
            raise BadPlan(f"tick {plan.tick} uses a sequence twice")
        named_sequences = {*taken, *changed, *_sources(plan.kv)}
        outside = sorted(number for number in named_sequences if not 0 <= number < self._runtime.info.sequences)
        if outside:
            raise BadPlan(f"tick {plan.tick} names sequences {outside} that do not exist")
        if any(isinstance(op, Cut | Copy | Import | Recall) and op.length < 1 for op in plan.kv):
            raise BadPlan(f"tick {plan.tick} wants less than one token in a sequence")
        unfed = {request: len(lane.tokens) - lane.fed for request, lane in self._lanes.items()}
        for seat in plan.admit:
            unfed[seat.request] = len(seat.tokens) - seat.cached
            if unfed[seat.request] < 1 or seat.cached < 0:
                raise BadPlan(f"request {seat.request} has no token left to feed")
        for chunk in plan.prefill:
            unfed[chunk.request] -= chunk.tokens
            if chunk.tokens < 1 or unfed[chunk.request] < 0:
                raise BadPlan(
                    f"tick {plan.tick} feeds {chunk.tokens} tokens of request {chunk.request}, which has fewer"
                )
        if plan.prefill and plan.step_tokens < 1:
            raise BadPlan(f"tick {plan.tick} feeds {plan.step_tokens} tokens a step")

    def _seat(self, plan: Plan, tally: _Tally) -> str:
        """Retire, move KV and admit. A reason to replan, or nothing; a refusal has changed nothing."""
        if self._runtime.info.layout == "shared":
            lengths = self._lengths_after(plan.kv)
            needed = sum(max(0, len(seat.tokens) - lengths[seat.sequence]) for seat in plan.admit)
            room = self._runtime.info.cells - sum(lengths)
            if needed > room:
                return f"{needed} cells are needed to seat {len(plan.admit)} requests, {room} are free"
        for request in plan.retire:
            self._lanes.pop(request, None)
        for op in plan.kv:
            self._move(op, tally)
        for seat in plan.admit:
            self._lanes[seat.request] = _Lane(
                request=seat.request,
                sequence=seat.sequence,
                tokens=list(seat.tokens),
                prompt=seat.prompt,
                fed=self._cached(seat, tally),
                draw_from=seat,
                end_tokens=self._runtime.info.end_tokens,
            )
        return ""

    def _lengths_after(self, ops: Sequence[KvOp]) -> list[int]:
        """What every sequence will hold, if nothing fails."""
        lengths = [self._runtime.length(sequence) for sequence in range(self._runtime.info.sequences)]
        for op in ops:
            match op:
                case Free():
                    lengths[op.sequence] = 0
                case Cut() | Copy() | Import() | Recall():
                    lengths[op.sequence] = op.length
                case Export() | Discard() | Park() | Forget():
                    pass
        return lengths

    def _move(self, op: KvOp, tally: _Tally) -> None:
        """Do one thing with KV. What cannot be done leaves its sequence empty, or nothing saved, and is reported."""
        runtime = self._runtime
        if not isinstance(op, Elsewhere):
            tally.emptied.pop(op.sequence, None)
        try:
            match op:
                case Free():
                    runtime.free(op.sequence)
                case Cut():
                    if runtime.length(op.sequence) < op.length or not runtime.cut(op.sequence, op.length):
                        raise EngineError(f"sequence {op.sequence} cannot be cut to {op.length} tokens")
                case Copy():
                    runtime.free(op.sequence)
                    runtime.copy(op.source, op.sequence, op.length)
                case Import():
                    runtime.free(op.sequence)
                    saved = self._saved.get(op.blob)
                    if saved is None or saved.length < op.length:
                        raise EngineError(f"there is no state {op.blob} of {op.length} tokens")
                    runtime.restore(op.sequence, saved.state, op.length)
                case Export():
                    state = runtime.export(op.sequence)
                    self._saved[op.blob] = _Saved(state, runtime.length(op.sequence))
                    tally.exported.append((op.blob, len(state)))
                case Discard():
                    self._saved.pop(op.blob, None)
                case Park():
                    self._park(op)
                case Recall():
                    runtime.free(op.sequence)
                    if self._store is None:
                        raise EngineError("nothing is parked")
                    runtime.restore(op.sequence, self._store.recall(op.key, op.length), op.length)
                case Forget():
                    if self._store is not None:
                        self._store.forget(op.key)
        except (EngineError, MemoryError, OverflowError) as error:
            log.warning("KV is computed again: %s", error)
            if isinstance(op, Export):
                tally.exported.append((op.blob, 0))
            elif isinstance(op, Park) and self._store is not None:
                self._store.refuse(op.key)
            elif not isinstance(op, Elsewhere):
                runtime.free(op.sequence)
                tally.emptied[op.sequence] = None

    def _park(self, op: Park) -> None:
        if self._store is None:
            raise EngineError("there is nowhere to park")
        if op.blob:
            saved = self._saved.get(op.blob)
            if saved is None:
                raise EngineError(f"there is no state {op.blob} to park")
            self._store.seal(op.key, op.tokens, saved.state)
        else:
            self._store.seal(op.key, op.tokens, self._runtime.export(op.sequence))

    def _cached(self, seat: Admit, tally: _Tally) -> int:
        """How many tokens of a seat its sequence really holds: what was promised, or none."""
        holds = self._runtime.length(seat.sequence)
        if holds == seat.cached:
            return holds
        if seat.sequence not in tally.emptied:
            log.warning("sequence %d holds %d tokens, not %d; they go", seat.sequence, holds, seat.cached)
        self._runtime.free(seat.sequence)
        tally.emptied[seat.sequence] = None
        return 0

    # -- steps ----------------------------------------------------------------------------------------------------

    def _decode_round(self, batch: Sequence[_Lane], tally: _Tally) -> list[TokenOut]:
        start = self._runtime.seconds()
        if self._exact:
            self._threads.before_exact(self._runtime)
        else:
            self._threads.before_round(self._runtime, len(batch))
        out = self._step(batch, _round(batch), tally)
        seconds = self._runtime.seconds() - start
        if not self._exact:
            self._threads.after_round(len(batch), seconds)
        tally.rounds += 1
        tally.round_tokens += len(out)
        tally.round_seconds += seconds
        return out

    def _take(self, chunks: list[_Chunk], most: int) -> list[tuple[_Lane, int]]:
        """The next micro-batch: (lane, tokens), at most ``most`` tokens in all, in the plan's order."""
        micro: list[tuple[_Lane, int]] = []
        while chunks and most > 0:
            chunk = chunks[0]
            share = 0 if chunk.lane.over else min(chunk.left, most)
            if share:
                micro.append((chunk.lane, share))
                most -= share
                chunk.left -= share
            if chunk.lane.over or chunk.left == 0:
                chunks.pop(0)
        return micro

    def _prefill_step(self, micro: Sequence[tuple[_Lane, int]], tally: _Tally) -> list[TokenOut]:
        start = self._runtime.seconds()
        (self._threads.before_exact if self._exact else self._threads.before_prefill)(self._runtime)
        try:
            out = self._step(
                [lane for lane, _ in micro], _chunks(micro), tally, abandonable=self._runtime.info.abandons
            )
        except StepAbandoned:
            tally.abandoned = tuple((lane.request, share) for lane, share in micro)
            return []
        tally.feed(micro)
        seconds = self._runtime.seconds() - start
        tally.feed_seconds += seconds
        return out

    def _packed_step(self, batch: Sequence[_Lane], micro: Sequence[tuple[_Lane, int]], tally: _Tally) -> list[TokenOut]:
        """A decode round and a micro-batch in one call. Its time is shared out by tokens."""
        start, fed = self._runtime.seconds(), sum(share for _, share in micro)
        self._threads.before_prefill(self._runtime)
        out = self._step([*batch, *(lane for lane, _ in micro)], [*_round(batch), *_chunks(micro)], tally)
        tally.feed(micro)
        seconds = self._runtime.seconds() - start
        part = len(batch) / (len(batch) + fed)
        tally.rounds += 1
        tally.round_tokens += len(batch)
        tally.round_seconds += part * seconds
        tally.feed_seconds += (1 - part) * seconds
        return out

    def _step(
        self, lanes: Sequence[_Lane], feeds: Sequence[Feed], tally: _Tally, *, abandonable: bool = False
    ) -> list[TokenOut]:
        """One call for all lanes; if it fails, one call each, and the lanes that fail alone are faulted. A lane alone
        that finds no room gets a second try: the books say that there is some."""
        try:
            try:
                self._runtime.step(feeds, abandonable=abandonable)
            except OutOfCells as error:
                if len(feeds) > 1:
                    raise
                log.warning("request %d: %s; trying again", lanes[0].request, error)
                self._runtime.step(feeds, abandonable=abandonable)
        except StepAbandoned:
            raise
        except EngineError as error:
            if len(feeds) == 1:
                self._fault(lanes[0], str(error), tally)
                return []
            out: list[TokenOut] = []
            for lane, feed in zip(lanes, feeds, strict=True):
                out += self._step([lane], [feed], tally)
            return out
        return [
            token
            for index, (lane, feed) in enumerate(zip(lanes, feeds, strict=True))
            if (token := self._settle(index, lane, feed, tally)) is not None
        ]

    def _settle(self, index: int, lane: _Lane, feed: Feed, tally: _Tally) -> TokenOut | None:
        """Book a fed lane and draw its next token, if it is time for one."""
        lane.fed += len(feed.tokens)
        if not feed.sample:
            return None
        seat = lane.draw_from
        position = len(lane.tokens)
        try:
            choice: Choice = self._runtime.choose(
                index, Draw(seat.sampling, position, lane.tokens, lane.prompt, lane.end_tokens)
            )
        except (EngineError, ValueError, ArithmeticError, LookupError) as error:
            self._fault(lane, f"sampling failed: {error}", tally)
            return None
        lane.tokens.append(choice.token)
        lane.decoding = True
        end = choice.token in lane.end_tokens and not seat.sampling.ignore_eos
        lane.over = end
        tally.decoded[lane.request] = tally.decoded.get(lane.request, 0) + 1
        return TokenOut(lane.request, position, choice.token, end, choice.logprob, choice.top)

    def _fault(self, lane: _Lane, message: str, tally: _Tally) -> None:
        lane.over = True
        lane.decoding = False
        tally.faults.append(LaneFault(lane.request, message))


def _round(batch: Sequence[_Lane]) -> list[Feed]:
    return [Feed(lane.sequence, lane.fed, lane.tokens[lane.fed :], True) for lane in batch]


def _chunks(micro: Sequence[tuple[_Lane, int]]) -> list[Feed]:
    return [
        Feed(lane.sequence, lane.fed, lane.tokens[lane.fed : lane.fed + share], lane.fed + share == len(lane.tokens))
        for lane, share in micro
    ]


def _sources(ops: Sequence[KvOp]) -> set[int]:
    read = {op.sequence for op in ops if isinstance(op, Export) or (isinstance(op, Park) and not op.blob)}
    return {op.source for op in ops if isinstance(op, Copy)} | read

"""A pure stand-in for executor and runtime: works plans off over token lists, stops where told, dies when told.

The next token is a function of every token the sequence was fed, so a request that was fed anything but its own tokens
says something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from superfluidd.scheduling.books import Limits
from superfluidd.scheduling.entries import key_of, pack
from superfluidd.scheduling.plan import (
    Copy,
    Cut,
    Discard,
    Export,
    Forget,
    Free,
    Import,
    KvOp,
    Park,
    Plan,
    Recall,
    TickReport,
    Timing,
)
from superfluidd.scheduling.scheduler import Scheduler
from superfluidd.types import QosClass, SamplingParams

END = 9
"""The token that ends a generation."""

CELL_BYTES = 8
"""What a saved token takes."""


def next_token(tokens: Sequence[int]) -> int:
    """Depends on all of them; now and then it is END."""
    state = 7
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (1 << 61)
    return END if state % 23 == 0 else 100 + state % 800


def alone(prompt: Sequence[int], most: int, window: int) -> list[int]:
    """What a request generates when nothing else is there."""
    tokens = list(prompt)
    room = min(most, window - len(prompt) + 1)
    while len(tokens) - len(prompt) < room:
        tokens.append(next_token(tokens))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


class FakeEngine:
    """Lanes over token lists. It checks what a real engine would trip over."""

    def __init__(self, limits: Limits, *, ends: bool = True) -> None:
        self.limits = limits
        self.ends = ends
        """Now and then a reply ends by itself."""
        self.sequences: dict[int, list[int]] = {number: [] for number in range(limits.sequences)}
        self.lanes: dict[int, tuple[int, list[int]]] = {}
        self.decoding: set[int] = set()
        self.prefilled: dict[int, int] = {}
        self.decoded: dict[int, int] = {}
        self.abandoned: dict[int, int] = {}
        self.blobs: dict[int, list[int]] = {}
        self.disk: dict[str, list[int]] = {}
        self.sealed: list[tuple[str, int]] = []
        """What has been written since the scheduler was last told."""
        self.emptied: list[int] = []
        self.exported: list[tuple[int, int]] = []
        self.faulty = False
        """Every third copy, import or export fails."""
        self.moves = 0
        self.give_up = False
        """Abandon the next prefill step."""

    @property
    def cells_used(self) -> int:
        return sum(map(len, self.sequences.values()))

    def seat(self, plan: Plan) -> str:
        """Retire, move KV, admit; a reason to replan if the pool cannot hold it, and then nothing has changed."""
        after = self._lengths_after(plan)
        needed = sum(len(seat.tokens) - after[seat.sequence] for seat in plan.admit)
        if self.limits.shared and sum(after.values()) + needed > self.limits.cells:
            return "the pool cannot hold it"
        for request in plan.retire:
            self.lanes.pop(request, None)
            self.decoding.discard(request)
        self.emptied, self.exported = [], []
        for op in plan.kv:
            self._move(op)
        for seat in plan.admit:
            assert seat.request not in self.lanes, "admitted twice"
            held = self.sequences[seat.sequence]
            if seat.sequence not in self.emptied:
                assert len(held) == seat.cached, "the sequence holds something else"
            assert held == list(seat.tokens[: len(held)]), "seeded with somebody else's tokens"
            assert seat.cached < len(seat.tokens), "nothing is left to feed"
            assert all(sequence != seat.sequence for sequence, _ in self.lanes.values())
            self.lanes[seat.request] = (seat.sequence, list(seat.tokens))
        return ""

    def _lengths_after(self, plan: Plan) -> dict[int, int]:
        lengths = {number: len(tokens) for number, tokens in self.sequences.items()}
        for op in plan.kv:
            match op:
                case Free(sequence):
                    lengths[sequence] = 0
                case Cut(sequence, length) | Copy(_, sequence, length) | Import(_, sequence, length):
                    lengths[sequence] = length
                case Recall(_, sequence, length):
                    lengths[sequence] = length
                case Export() | Discard() | Park() | Forget():
                    pass
        return lengths

    def _move(self, op: KvOp) -> None:
        running = {sequence for sequence, _ in self.lanes.values()}
        if not isinstance(op, Discard | Export | Park | Forget):
            assert op.sequence not in running, "changed under a running lane"
            if op.sequence in self.emptied:
                self.emptied.remove(op.sequence)
        fails = self.fails(op)
        match op:
            case Free(sequence):
                self.sequences[sequence].clear()
            case Cut(sequence, length):
                if length > len(self.sequences[sequence]):
                    assert self.faulty, "cut to more than there is"
                    self.sequences[sequence].clear()
                    self.emptied.append(sequence)
                del self.sequences[sequence][length:]
            case Copy(source, sequence, length):
                self._fill(sequence, self.sequences[source], length, fails=fails)
            case Import(blob, sequence, length):
                self._fill(sequence, self.blobs.get(blob, []), length, fails=fails)
            case Export(sequence, blob):
                if not fails:
                    self.blobs[blob] = list(self.sequences[sequence])
                    assert self.blobs[blob] or self.faulty, "saved nothing"
                self.exported.append((blob, 0 if fails else max(1, CELL_BYTES * len(self.blobs[blob]))))
            case Discard(blob):
                assert blob in self.blobs or self.faulty, "forgotten twice"
                self.blobs.pop(blob, None)
            case Park(key, tokens, sequence, blob):
                held = self.blobs.get(blob, []) if blob else self.sequences[sequence]
                fails = fails or (self.faulty and key_of(pack(held)) != key)
                assert fails or (pack(held) == tokens and key == key_of(tokens)), "parked under another's name"
                if not fails:
                    self.disk[key] = list(held)
                self.sealed.append((key, 0 if fails else CELL_BYTES * len(held)))
            case Recall(key, sequence, length):
                self._fill(sequence, self.disk.get(key, []), length, fails=fails)
            case Forget(key):
                self.disk.pop(key, None)
        assert not self.limits.shared or self.cells_used <= self.limits.cells

    def _fill(self, sequence: int, tokens: list[int], length: int, *, fails: bool) -> None:
        assert not self.sequences[sequence], "filled though it is not empty"
        if fails or len(tokens) < length:
            assert fails or self.faulty, "more is wanted than there is"
            self.emptied.append(sequence)
        else:
            self.sequences[sequence] += tokens[:length]

    def fails(self, op: KvOp) -> bool:
        """Whether this cannot be done; random lives let some fail."""
        if not self.faulty or isinstance(op, Free | Cut | Discard | Forget):
            return False
        self.moves += 1
        return self.moves % 3 == 0

    def parked(self) -> list[tuple[str, bytes, int]]:
        """What the next engine finds on disk."""
        return [(key, pack(tokens), CELL_BYTES * len(tokens)) for key, tokens in self.disk.items()]

    def run(self, plan: Plan) -> Iterator[tuple[int, int, int, bool] | None]:
        """Yields (request, position, token, end) for every token, and None after every step."""
        self.prefilled, self.decoded = {}, {}
        over: set[int] = set()
        self.abandoned = {}
        grants = {grant.request: grant.rounds for grant in plan.decode}
        chunks = [[chunk.request, chunk.tokens] for chunk in plan.prefill]
        while True:
            batch = [request for request in grants if grants[request] > 0 and request in self.decoding - over]
            for request in batch:
                grants[request] -= 1
                yield from self._feed(request, 1, over)
            if batch:
                yield None
            room = plan.step_tokens
            worked = False
            if chunks and self.give_up:
                request, left = chunks[0]
                self.abandoned[request] = min(left, room)
                return
            while chunks and room > 0:
                request, left = chunks[0]
                share = min(left, room)
                room -= share
                chunks[0][1] -= share
                if chunks[0][1] == 0:
                    chunks.pop(0)
                self.prefilled[request] = self.prefilled.get(request, 0) + share
                yield from self._feed(request, share, over)
                worked = True
            if worked:
                yield None
            if not batch and not worked:
                return

    def _feed(self, request: int, count: int, over: set[int]) -> Iterator[tuple[int, int, int, bool]]:
        sequence, tokens = self.lanes[request]
        held = self.sequences[sequence]
        assert len(held) + count <= len(tokens), "fed more than is known"
        held += tokens[len(held) : len(held) + count]
        assert len(held) <= self.limits.window
        assert not self.limits.shared or self.cells_used <= self.limits.cells, "the pool was promised twice"
        if len(held) == len(tokens):
            token = next_token(held) if self.ends else 100
            tokens.append(token)
            self.decoding.add(request)
            self.decoded[request] = self.decoded.get(request, 0) + 1
            if token == END:
                over.add(request)
            yield request, len(tokens) - 1, token, token == END

    def report(self, plan: Plan, outcome: str) -> TickReport:
        return TickReport(
            plan.tick,
            outcome,  # type: ignore[arg-type]
            tuple(self.prefilled.items()),
            tuple(self.decoded.items()),
            (),
            self.cells_used,
            Timing(1, 1, 0.01, 10, 0.02),
            abandoned=tuple(self.abandoned.items()),
            emptied=tuple(self.emptied),
            exported=tuple(self.exported),
        )


def submit(
    scheduler: Scheduler,
    prompt: Sequence[int],
    most: int | None = 5,
    qos: QosClass = QosClass.AGENT,
    now: float = 0.0,
    *,
    alone: bool = False,
    media: bool = False,
) -> int:
    """Queue a request and return its id."""
    return scheduler.submit(
        prompt,
        sampling=SamplingParams(temperature=0.0),
        max_tokens=most,
        qos=qos,
        now=now,
        param="messages",
        batch_invariant=alone,
        media=media,
    ).id

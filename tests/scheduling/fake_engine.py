"""A pure stand-in for executor and runtime: works plans off over token lists, stops where told, dies when told.

The next token is a function of every token the sequence was fed, so a request that was fed anything but its own tokens
says something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from superfluidd.scheduling.books import Limits
from superfluidd.scheduling.plan import Plan, TickReport, Timing
from superfluidd.scheduling.scheduler import Scheduler
from superfluidd.types import QosClass, SamplingParams

END = 9
"""The token that ends a generation."""


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
        self.give_up = False
        """Abandon the next prefill step."""

    @property
    def cells_used(self) -> int:
        return sum(map(len, self.sequences.values()))

    def seat(self, plan: Plan) -> str:
        """Retire, free, admit; a reason to replan if the pool cannot hold it, and then nothing has changed."""
        freed = sum(len(self.sequences[number]) for number in plan.free)
        needed = sum(len(seat.tokens) - seat.cached for seat in plan.admit)
        if self.limits.shared and self.cells_used - freed + needed > self.limits.cells:
            return "the pool cannot hold it"
        for request in plan.retire:
            self.lanes.pop(request, None)
            self.decoding.discard(request)
        for number in plan.free:
            assert all(sequence != number for sequence, _ in self.lanes.values()), "freed under a running lane"
            self.sequences[number].clear()
        for seat in plan.admit:
            assert seat.request not in self.lanes, "admitted twice"
            held = self.sequences[seat.sequence]
            assert len(held) == seat.cached, "the sequence holds something else"
            assert held == list(seat.tokens[: seat.cached]), "seeded with somebody else's tokens"
            assert seat.cached < len(seat.tokens), "nothing is left to feed"
            assert all(sequence != seat.sequence for sequence, _ in self.lanes.values())
            self.lanes[seat.request] = (seat.sequence, list(seat.tokens))
        return ""

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

"""Measured rates, and what one tick and one step may cost.

The rules are the specification's ("Ticks", "Prefill and decode budgets") where a figure appears with its name. Rates
are learned from reports; before the first report the floors apply.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from superfluidd.scheduling.plan import Prefill, Timing
from superfluidd.scheduling.policy import PREFILL_BUDGET, Policy

TARGET_OPEN_NATIVE = 0.25
TARGET_OPEN = 0.05
"""Seconds a tick aims at while a lane is free or finishing: on a native engine, and on one whose decode rounds cost the
same however they are cut into ticks."""

TARGET_BUSY = 0.25
"""Seconds such an engine's tick aims at, at most, while every lane is busy. A native one's: the policy's target."""

ROUNDS_FLOOR = 4
ROUNDS_CEILING = 256
"""Bounds of a decode grant: below the floor the cost of a tick itself shows, above the ceiling news travel slowly."""

ADAPTIVE_LEAST = 256
ADAPTIVE_START = 1024
"""Where the adaptive prefill budget begins, and the least it gets to. The most is PREFILL_BUDGET."""

OPEN_SECONDS = 0.5
"""Work of one tick's prefill while a newcomer could be admitted at its end."""

OPEN_SECONDS_YIELDING = 2.0
"""The same where a newcomer need not wait for the end, because the tick ends for it at the next step, and nobody has
lately been in a hurry: small chunks cost prefill an eighth of its rate on two slow cores."""

LONGEST_SECONDS = 8.0
"""Work of one tick's prefill at any time."""

CHUNK, SMALL_CHUNK = 512, 128
"""Prefill comes in whole chunks of the one, or of the other where a model is too slow for the first."""

STEP_SECONDS = 0.2
"""Length of a prefill step in latency mode: the gap it makes in the streams beside it."""

STEP_LEAST = 64
"""Tokens of the smallest step: below it prefill loses its rate (on two slow cores 165 tokens/s in steps of 16, 209 in
64, 229 in 128)."""

STEP_GRAIN = 32
"""Steps are multiples of this."""

STEP_UNKNOWN = 128
"""Tokens of a step in latency mode before a rate is known."""

LATENCY_MODE_SECONDS = 300.0
"""How long short steps outlast the latest interactive or completion request."""

LATENCY_MODE_ABANDONING = 3.5
"""The same where a step is given up for such a request, and then only if the latest two came within this time of each
other. Short steps only save what giving up loses (half a step of 0.8 s), and cost an eighth of the prefill rate: they
pay while such requests come this often."""

ABANDON_LEAST = 0.1
"""Seconds of the shortest prefill step that is worth giving up: on average half of it is lost, so that somebody waits
for half of it less."""

WAIT_MOST, WAIT_UNKNOWN = 1024, 256
"""A prefix of WAIT_MOST tokens that another lane is being fed is always worth waiting for; one of WAIT_UNKNOWN before a
rate is known."""

EXACT_STEP = 64
"""Tokens of every prefill step of a batch-invariant lane: the same whatever else goes on, since another batch shape is
another rounding. No prefill budget is smaller."""

_SAMPLES = 7
"""Measurements a rate is the median of."""

_WEIGHTY = 64
"""Prompt tokens of a tick from which on its rate says something; the fixed cost of a call hides it in less."""


class Rates(msgspec.Struct, frozen=True):
    """What the engine has been costing.

    A rate is the median of the latest few measurements: one outlier moves it not at all, a change by the fourth.
    """

    rounds: tuple[float, ...] = ()
    """Seconds per decode round."""
    prefills: tuple[float, ...] = ()
    """Prompt tokens per second."""
    slight: tuple[float, ...] = ()
    """The same of ticks that fed few tokens: better than nothing."""

    @property
    def round_seconds(self) -> float | None:
        """Seconds of a decode round; None before one was measured."""
        return _median(self.rounds)

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens per second; None before any were measured."""
        return _median(self.prefills or self.slight)

    def updated(self, timing: Timing) -> Rates:
        """With one more tick taken into account."""
        rounds, prefills, slight = self.rounds, self.prefills, self.slight
        if timing.decode_rounds and timing.decode_seconds > 0:
            rounds = (*rounds, timing.decode_seconds / timing.decode_rounds)[-_SAMPLES:]
        if timing.prefill_tokens and timing.prefill_seconds > 0:
            rate = timing.prefill_tokens / timing.prefill_seconds
            if timing.prefill_tokens >= _WEIGHTY:
                prefills = (*prefills, rate)[-_SAMPLES:]
            else:
                slight = (*slight, rate)[-_SAMPLES:]
        return Rates(rounds, prefills, slight)


def _median(samples: tuple[float, ...]) -> float | None:
    return sorted(samples)[len(samples) // 2] if samples else None


def _whole(number: float) -> int:
    """Rounded down, but not for the last digit of a sum of seconds."""
    return int(number + 1e-6)


def tick_target(policy: Policy, *, granular: bool, open_tick: bool) -> float:
    """Seconds a tick aims at. A smaller ``--tick-target-ms`` wins everywhere.

    Args:
        policy: the operator's.
        granular: a decode round costs the same however rounds are cut into ticks.
        open_tick: a lane is free, or one is finishing.
    """
    if open_tick:
        return min(TARGET_OPEN if granular else TARGET_OPEN_NATIVE, policy.tick_target)
    return min(TARGET_BUSY, policy.tick_target) if granular else policy.tick_target


def decode_rounds(rates: Rates, target: float) -> int:
    """Decode rounds that fit into a tick of ``target`` seconds."""
    cost = rates.round_seconds
    if cost is None:
        return ROUNDS_FLOOR
    return max(ROUNDS_FLOOR, min(ROUNDS_CEILING, _whole(target / cost)))


def prefill_budget(policy: Policy, adaptive: int, rates: Rates, *, open_tick: bool, yielding: bool = False) -> int:
    """Prompt tokens one tick may feed, over all lanes.

    Args:
        policy: the operator's.
        adaptive: the controller's present budget, used where the policy asks for it.
        rates: as measured.
        open_tick: a newcomer could be admitted at the end of the tick.
        yielding: the tick ends for a newcomer at the next step, and nobody has lately been in a hurry.
    """
    seconds = OPEN_SECONDS_YIELDING if yielding else OPEN_SECONDS
    return min(policy.prefill_budget or adaptive, _open_cap(rates, seconds) if open_tick else _cap(rates))


def _open_cap(rates: Rates, seconds: float) -> int:
    """So many seconds of work, in whole chunks; one chunk before a rate is known."""
    rate = rates.prefill_tokens_per_second
    if rate is None:
        return CHUNK
    tokens = _whole(rate * seconds)
    return tokens // CHUNK * CHUNK if tokens >= CHUNK else max(1, tokens // SMALL_CHUNK) * SMALL_CHUNK


def _cap(rates: Rates) -> int:
    rate = rates.prefill_tokens_per_second
    return PREFILL_BUDGET if rate is None else max(CHUNK, _whole(rate * LONGEST_SECONDS))


def adapt(present: int, rates: Rates, target: float, *, prefilling: int, decoding: int) -> int:
    """The adaptive prefill budget after one more measurement.

    It heads for what prefill's share of a tick of ``target`` seconds holds, but by no more than a factor of two at a
    time.

    Args:
        present: the budget so far, tokens.
        rates: as measured.
        target: seconds the tick aims at.
        prefilling: lanes in prefill and requests that wait; ``decoding``: lanes that decode. Prefill's share is
            the first out of both.
    """
    rate = rates.prefill_tokens_per_second
    if rate is None or not prefilling:
        return present
    wanted = _whole(rate * target * prefilling / (prefilling + decoding))
    wanted = max(present // 2, min(2 * present, wanted))
    return max(ADAPTIVE_LEAST, min(PREFILL_BUDGET, wanted))


def step_tokens(rates: Rates, *, latency: bool, max_step: int) -> int:
    """Tokens of one prefill micro-batch.

    Args:
        rates: as measured.
        latency: somebody would notice how long a step is.
        max_step: the largest the engine gains from.
    """
    if not latency:
        return max_step
    rate = rates.prefill_tokens_per_second
    tokens = STEP_UNKNOWN if rate is None else _whole(rate * STEP_SECONDS) // STEP_GRAIN * STEP_GRAIN
    return min(max_step, max(STEP_LEAST, tokens))


def worth_waiting(rates: Rates, seconds: float, least: int) -> int:
    """Tokens of a shared prefix from which on a request waits until another has been fed it: that many seconds of
    prefill, and at least ``least``."""
    rate = rates.prefill_tokens_per_second
    return WAIT_UNKNOWN if rate is None else max(least, min(WAIT_MOST, _whole(rate * seconds)))


def worth_abandoning(rates: Rates, prefill: Sequence[Prefill], step: int) -> bool:
    """Whether a prefill step of this tick is long enough to be given up; where no rate is known yet it is."""
    tokens = min(step, sum(chunk.tokens for chunk in prefill))
    rate = rates.prefill_tokens_per_second
    return tokens > 0 and (rate is None or tokens >= ABANDON_LEAST * rate)

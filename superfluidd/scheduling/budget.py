"""Measured rates, and what one tick may cost.

The rules here are the specification's where a figure appears with its name; the rest of its budget rules have their
place here too. Rates are learned from reports; before the first report the floors apply.
"""

from __future__ import annotations

import msgspec

from superfluidd.scheduling.plan import Timing

PREFILL_BUDGET = 4096
"""Prompt tokens one tick may feed, over all lanes (the specification's pinned default)."""

TARGET_OPEN = 0.05
"""Seconds a tick aims at while a lane is free or finishing, on round-granular engines."""

TARGET_BUSY = 0.25
"""Seconds a tick aims at while every lane is busy, on round-granular engines."""

ROUNDS_FLOOR = 4
ROUNDS_CEILING = 256
"""Bounds of a decode grant: below the floor the cost of a tick itself shows, above the ceiling news travel slowly."""

STEP_BESIDE_DECODE = 128
"""Prefill micro-batch while lanes decode: each step is a gap in their streams. On two slow cores 128 tokens is the
smallest size that keeps the prefill rate."""

_KEEP = 0.7
"""Weight of the past in a moving average."""


class Rates(msgspec.Struct, frozen=True):
    """What the engine has been costing. None: not measured yet."""

    round_seconds: float | None = None
    prefill_tokens_per_second: float | None = None

    def updated(self, timing: Timing) -> Rates:
        """With one more tick taken into account."""
        round_seconds = self.round_seconds
        if timing.decode_rounds:
            round_seconds = _average(round_seconds, timing.decode_seconds / timing.decode_rounds)
        prefill = self.prefill_tokens_per_second
        if timing.prefill_tokens and timing.prefill_seconds > 0:
            prefill = _average(prefill, timing.prefill_tokens / timing.prefill_seconds)
        return Rates(round_seconds, prefill)


def _average(old: float | None, sample: float) -> float:
    return sample if old is None else _KEEP * old + (1 - _KEEP) * sample


def decode_rounds(rates: Rates, *, open_tick: bool) -> int:
    """Decode rounds one tick may run.

    Args:
        rates: measured so far.
        open_tick: a lane is free, or one is finishing.
    """
    if not rates.round_seconds:
        return ROUNDS_FLOOR
    target = TARGET_OPEN if open_tick else TARGET_BUSY
    return max(ROUNDS_FLOOR, min(ROUNDS_CEILING, int(target / rates.round_seconds)))


def step_tokens(*, decoding: bool, max_step: int) -> int:
    """Tokens of one prefill micro-batch.

    Args:
        decoding: some lane decodes beside it.
        max_step: the largest the engine gains from.
    """
    return min(STEP_BESIDE_DECODE, max_step) if decoding else max_step

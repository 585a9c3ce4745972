"""What an operator has decided: the knobs of one scheduler, as one record."""

from __future__ import annotations

import msgspec

PREFILL_BUDGET = 4096
"""Prompt tokens a tick may feed over all lanes: the specification's pinned default, and the most it may be."""

PREFILL_BUDGET_LEAST = 64
"""The least it may be. 0 asks for the adaptive controller."""


class Policy(msgspec.Struct, frozen=True):
    """Settings of the scheduler (source: the specification, "Prefill and decode budgets").

    Attributes:
        starvation_ticks: ticks a job waits before it rises by a class, and a prefill before it is starving.
        prefill_budget: prompt tokens of a tick, 64 to 4096; 0 sizes it by what ticks take.
        decode_budget: tokens a tick may decode over all lanes; 0 sets no bound.
        tick_target: seconds a tick may take while every lane is busy.
        agent_preempts_background: an agent may take a background request's lane.
    """

    starvation_ticks: int = 8
    prefill_budget: int = PREFILL_BUDGET
    decode_budget: int = 0
    tick_target: float = 2.0
    agent_preempts_background: bool = False

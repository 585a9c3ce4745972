"""Who gives up a lane, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from superfluidd.scheduling.qos import may_preempt
from superfluidd.scheduling.request import Request

TIRED = 3
"""Times a request may lose its lane before it is passed over while there is another victim."""


def order(victim: Request) -> tuple[bool, int, bool, int]:
    """Sort key of victims, first to go first: not yet preempted TIRED times, worst class, decoding before prefilling,
    youngest."""
    return (victim.pauses >= TIRED, -victim.qos, not victim.decoding, -victim.id)


def choose_victims(
    newcomer: Request,
    seated: Iterable[Request],
    *,
    agents: bool,
    protected: Callable[[Request], bool],
    enough: Callable[[list[Request]], bool],
) -> list[Request]:
    """The lanes that must be given up so that ``newcomer`` can be seated; empty if no lanes would do.

    Source: the specification, "Preemption": the lowest class below the newcomer's, decoding before prefilling, never a
    batch-invariant or a media lane.

    Args:
        newcomer: waits.
        seated: run.
        agents: an agent may preempt background.
        protected: lanes that may not be chosen just now.
        enough: whether giving these up seats the newcomer.
    """
    legal = sorted(
        (
            lane
            for lane in seated
            if may_preempt(newcomer.qos, lane.qos, agents=agents) and lane.preemptible and not protected(lane)
        ),
        key=order,
    )
    chosen: list[Request] = []
    for lane in legal:
        chosen.append(lane)
        if enough(chosen):
            break
    else:
        return []
    # A lane taken early may turn out to be too small to matter beside a bigger one taken later.
    for lane in list(chosen):
        rest = [other for other in chosen if other is not lane]
        if rest and enough(rest):
            chosen = rest
    return chosen

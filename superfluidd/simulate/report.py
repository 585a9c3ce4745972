"""Results of simulations, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from superfluidd.simulate.stats import ClassStats, Durations, Stats
from superfluidd.types import QosClass

SHARES = (0.5, 0.95, 0.99)

ROWS: tuple[tuple[str, Callable[[ClassStats], str]], ...] = (
    ("requests", lambda one: f"{one.requests:,}"),
    ("queue wait P50/95/99, s", lambda one: _spread(one.queue_wait)),
    ("oldest wait, s", lambda one: _number(one.queue_wait.most)),
    ("first token P50/95/99, s", lambda one: _spread(one.ttft)),
    ("gap P50/95/99, s", lambda one: _spread(one.gap)),
    ("longest gap, s", lambda one: _number(one.gap.most)),
    ("preempted", lambda one: f"{one.preemptions:,}"),
    ("starved up", lambda one: f"{one.starvation_grants:,}"),
)


def table(results: Mapping[str, Stats]) -> str:
    """Text for people: a column per setting.

    Args:
        results: by the setting's name.
    """
    lines = [["", *results]]
    for qos in QosClass:
        if not any(stats.classes[qos].requests for stats in results.values()):
            continue
        lines.append([qos.label, *[""] * len(results)])
        lines += [[f"  {name}", *(row(stats.classes[qos]) for stats in results.values())] for name, row in ROWS]
    lines.append(["engine", *[""] * len(results)])
    lines.append(["  busy", *(f"{stats.utilisation:.1%} of {stats.seconds:,.0f} s" for stats in results.values())])
    lines.append(["  lanes in use", *(f"{stats.mean_lanes:.2f} of {stats.lanes}" for stats in results.values())])
    lines.append(["  tokens fed", *(f"{stats.prefill_tokens:,}" for stats in results.values())])
    lines.append(["  of them again", *(f"{stats.abandoned_tokens:,} given up" for stats in results.values())])
    lines.append(["  taken from the cache", *(f"{stats.cached_tokens:,}" for stats in results.values())])
    lines.append(["  tokens generated", *(f"{stats.decode_tokens:,}" for stats in results.values())])
    lines.append(["  ticks", *(f"{stats.ticks:,}" for stats in results.values())])
    widths = [max(len(line[column]) for line in lines) for column in range(len(results) + 1)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def plain(stats: Stats) -> dict[str, Any]:
    """The same for programs."""
    return {
        "seconds": stats.seconds,
        "utilisation": stats.utilisation,
        "lanes": stats.lanes,
        "mean_lanes": stats.mean_lanes,
        "ticks": stats.ticks,
        "prefill_tokens": stats.prefill_tokens,
        "abandoned_prefill_tokens": stats.abandoned_tokens,
        "cached_tokens": stats.cached_tokens,
        "decode_tokens": stats.decode_tokens,
        "classes": {qos.label: _plain(stats.classes[qos]) for qos in QosClass},
    }


def _plain(one: ClassStats) -> dict[str, Any]:
    return {
        "requests": one.requests,
        "finished": one.finished,
        "tokens": one.tokens,
        "queue_wait": _percentiles(one.queue_wait),
        "ttft": _percentiles(one.ttft),
        "gap": _percentiles(one.gap),
        "preemptions": one.preemptions,
        "starvation_grants": one.starvation_grants,
    }


def _percentiles(durations: Durations) -> dict[str, float]:
    return {f"p{share * 100:.0f}": durations.percentile(share) for share in SHARES} | {"max": durations.most}


def _spread(durations: Durations) -> str:
    return " / ".join(_number(durations.percentile(share)) for share in SHARES)


def _number(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:,.1f}"

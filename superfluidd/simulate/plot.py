"""A picture of a simulation: lanes by class over time, and how long first tokens took."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from superfluidd.errors import UsageError
from superfluidd.simulate.stats import GROWTH, Durations, Stats, Timeline
from superfluidd.types import QosClass

COLOURS = ("tab:green", "tab:cyan", "tab:blue", "tab:gray")


def check() -> None:
    """Raise :class:`UsageError` if nothing can be drawn here: before hours of simulation, not after."""
    _matplotlib()


def draw(path: Path, results: Mapping[str, Stats], timelines: Mapping[str, Timeline]) -> None:
    """Write the picture.

    Args:
        path: a file name that says the format, such as out.png.
        results, timelines: by the setting's name.

    Raises:
        UsageError: there is no matplotlib, or it cannot write that file.
    """
    pyplot = _matplotlib()
    figure, axes = pyplot.subplots(
        len(results), 2, figsize=(13, 3.4 * len(results)), squeeze=False, constrained_layout=True
    )
    for (name, stats), (left, right) in zip(results.items(), axes, strict=True):
        timeline = timelines[name]
        rows = timeline.mean_lanes()
        hours = [index * timeline.span / 3600 for index in range(len(rows))]
        lanes = [[row[qos] for row in rows] for qos in QosClass]
        left.stackplot(hours, lanes, labels=[qos.label for qos in QosClass], colors=COLOURS)
        left.set(title=f"{name}: lanes", xlabel="hours", ylim=(0, stats.lanes))
        left.legend(loc="upper left", fontsize="small")
        for qos in QosClass:
            ttft = stats.classes[qos].ttft
            if ttft.count:
                right.plot(*_cumulative(ttft), label=qos.label, color=COLOURS[qos])
        right.set(title=f"{name}: first token", xlabel="seconds", ylabel="share of requests", xscale="log", ylim=(0, 1))
        right.legend(loc="lower right", fontsize="small")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _cumulative(durations: Durations) -> tuple[list[float], list[float]]:
    seconds: list[float] = []
    shares: list[float] = []
    seen = 0
    for bucket in sorted(durations.buckets):
        seen += durations.buckets[bucket]
        seconds.append(GROWTH**bucket)
        shares.append(seen / durations.count)
    return seconds, shares


def _matplotlib() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'superfluidd[plot]'") from None

"""Goals and pictures of the tables.

Matplotlib is needed only where a script is asked for a picture, and then without a display.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

COLOURS = ("#1b6ca8", "#7fb2d6", "#c0504d", "#e3a5a3", "#5b8c5a", "#8c6bb1")


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is judged by.

    Attributes:
        text: what is asked for.
        measured: for people.
        passed: None if there are no clean figures.
    """

    text: str
    measured: str
    passed: bool | None


def goal_for(text: str, found: Sequence[float], verdict: Callable[[float], bool], *, worst: bool = False) -> Goal:
    """A goal for the median of some figures, or for the largest of them."""
    if not found:
        return Goal(text=text, measured="no clean figures", passed=None)
    judged = max(found) if worst else statistics.median(found)
    measured = f"{judged:.3g} ({min(found):.3g}-{max(found):.3g})"
    return Goal(text=text, measured=measured, passed=verdict(judged))


def verdicts(goals: Sequence[Goal]) -> str:
    """A line for each goal."""
    words = {True: "pass", False: "FAIL", None: "?   "}
    return "\n".join(f"{words[goal.passed]}  {goal.text}: {goal.measured}" for goal in goals)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A series over numbers.

    Attributes:
        label: in the legend.
        points: figures by x; where there are several, the line goes through their median and a bar spans them.
        dashed: drawn lighter, as a thing to compare with.
    """

    label: str
    points: Mapping[int, Sequence[float]]
    dashed: bool = False


class Dots(msgspec.Struct, frozen=True, kw_only=True):
    """One panel of figures by name: a dot for each.

    Attributes:
        title: above the panel.
        unit: at the axis.
        rows: name -> series -> figures.
        log: logarithmic axis.
        limit: a line at this figure.
    """

    title: str
    unit: str
    rows: Mapping[str, Mapping[str, Sequence[float]]]
    log: bool = False
    limit: float | None = None


def require(path: Path | None) -> None:
    """Find out whether a plot can be drawn before hours are spent on measuring for it.

    Raises:
        SystemExit: matplotlib is not installed, or there is no such folder.
    """
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        sys.exit(f"there is no folder {path.absolute().parent}")
    _pyplot()


def _pyplot() -> Any:
    # Through importlib, so that types check the same with matplotlib and without.
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        sys.exit("plots need matplotlib: pip install matplotlib")


def lines(
    path: Path, found: Sequence[Line], *, title: str, x: str, y: str, log_x: bool = False, log_y: bool = False
) -> None:
    """Draw series over a common axis.

    Args:
        path: PNG to write.
        found: the series.
        title, x, y: what is shown.
        log_x, log_y: logarithmic axes; an x of 0 is kept.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for line, colour in zip(found, COLOURS, strict=False):
        xs, middles, below, above = spans(line.points)
        if not xs:
            continue
        style = "--" if line.dashed else "-"
        axes.errorbar(xs, middles, yerr=[below, above], label=line.label, color=colour, fmt=f"o{style}", capsize=3)
    if log_x:
        axes.set_xscale("symlog", linthresh=10)
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(importlib.import_module("matplotlib.ticker").LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    ticks = sorted({number for line in found for number in line.points})
    axes.set_xticks(ticks, [f"{number:,g}" for number in ticks])
    axes.minorticks_off()
    axes.set(title=title, xlabel=x, ylabel=y)
    _finish(pyplot, figure, [axes], path)


def dots(path: Path, panels: Sequence[Dots], *, title: str) -> None:
    """Draw panels of dots side by side.

    Args:
        path: PNG to write.
        panels: all with the same names in the same order.
        title: above them.
    """
    pyplot = _pyplot()
    tall = 1.6 + 0.7 * max(len(panel.rows) for panel in panels)
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), tall), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, panel in zip(grid[0], panels, strict=True):
        shown: dict[str, str] = {}
        for place, series in enumerate(panel.rows.values()):
            for label, figures in series.items():
                new = label not in shown
                colour = shown.setdefault(label, COLOURS[2 * len(shown) % len(COLOURS)])
                axes.plot(figures, [place] * len(figures), "o", color=colour, alpha=0.7, label=label if new else None)
        if panel.limit is not None:
            axes.axvline(panel.limit, color="grey", linestyle=":", label=f"limit {panel.limit:g}")
        if panel.log:
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0)
        axes.set_yticks(range(len(panel.rows)), list(panel.rows))
        axes.set_ylim(len(panel.rows) - 0.5, -0.5)
        axes.set(title=panel.title, xlabel=panel.unit)
    figure.suptitle(title)
    _finish(pyplot, figure, list(grid[0]), path)


def _finish(pyplot: Any, figure: Any, every: Sequence[Any], path: Path) -> None:
    for axes in every:
        axes.grid(visible=True, alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def spans(
    points: Mapping[int, Sequence[float]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """What an error bar takes: x, median, and how far the figures reach below and above it. No figures, no point."""
    found = []
    for number, figures in sorted(points.items()):
        if figures:
            middle = statistics.median(figures)
            found.append((number, middle, middle - min(figures), max(figures) - middle))
    columns = [list(column) for column in zip(*found, strict=True)] or [[], [], [], []]
    return columns[0], columns[1], columns[2], columns[3]

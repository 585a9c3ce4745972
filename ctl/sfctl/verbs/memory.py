"""Models and memory: ``models``, ``mem``, ``pressure``."""

from __future__ import annotations

from sfctl.render import Cell, Colour, clean, count, duration, paint, plural, size, table
from sfctl.verbs.overview import STATE_COLOURS
from sfctl.verbs.verb import Context, Verb
from superfluidd.control.protocol import (
    MemoryOwner,
    MemResult,
    ModelsResult,
    ModelView,
    NoParams,
    PressureResult,
)

MODEL_COLUMNS = (
    *("MODEL", "STATE", "ENGINE", "DEVICE", "ARCHITECTURE", "KV", ">WINDOW", ">CELLS"),
    *(">PREFIXES", ">HITS", ">CACHED", "PREFIX REUSE", "STOPS"),
)

MEM_COLUMNS = ("MODEL", "OWNER", ">MIB", ">AT MOST")

REUSE = {
    "anywhere": "any beginning of a prompt, forks included",
    "window": "whole prefixes only: the model keeps a sliding window",
    "head": "whole prefixes only: the model's state is recurrent",
}
"""What the engine's way of shortening sequences means for prefixes."""

LEVEL_COLOURS: dict[str, Colour] = {"normal": "green", "warning": "yellow", "critical": "red"}


def models(context: Context) -> str:
    """A row per model."""
    return context.show(
        context.client.call("models", NoParams(), ModelsResult),
        lambda result: table(MODEL_COLUMNS, [model_row(model) for model in result.models], context.colour),
    )


def model_row(model: ModelView) -> list[Cell]:
    """A model's row of ``models``."""
    return [
        Cell(model.name, "bold"),
        Cell(model.state, STATE_COLOURS[model.state]),
        Cell(model.engine or "-"),
        Cell(model.device or "-"),
        Cell(model.architecture or "-"),
        Cell(model.layout or "-"),
        Cell(count(model.window)),
        Cell(count(model.cells)),
        Cell(count(model.prefixes)),
        Cell(count(model.prefix_hits)),
        Cell(count(model.cached_tokens)),
        Cell(REUSE.get(model.cut, "-")),
        Cell(stops(model) if model.engine else "-"),
    ]


def stops(model: ModelView) -> str:
    """Where the engine can be stopped for somebody who comes."""
    if not model.granular:
        return "after a tick"
    return "in a step" if model.abandons else "after a step"


def mem(context: Context) -> str:
    """A row per owner, and what that comes to."""
    return context.show(
        context.client.call("mem", NoParams(), MemResult), lambda result: memory_report(result, context.colour)
    )


def memory_report(result: MemResult, colour: bool) -> str:
    """``mem`` as text."""
    held = sum(owner.size for owner in result.owners if not owner.disk)
    rows = [*map(_owner, result.owners), [Cell(""), Cell("sum", "bold"), Cell(size(held), "bold"), Cell("")]]
    return (
        table(MEM_COLUMNS, rows, colour)
        + f"\nresident   {size(result.resident)} MiB by the operating system's count\n"
        + f"available  {size(result.available)} of {size(result.total)} MiB\n"
    )


def _owner(owner: MemoryOwner) -> list[Cell]:
    most = "-" if owner.most is None else size(owner.most)
    return [
        Cell(owner.model or "-"),
        Cell(owner.owner + (" (disk)" if owner.disk else "")),
        Cell(size(owner.size)),
        Cell(most),
    ]


def pressure(context: Context) -> str:
    """What is watched, what it says and what is done about it."""
    return context.show(
        context.client.call("pressure", NoParams(), PressureResult),
        lambda result: pressure_report(result, context.colour),
    )


def pressure_report(result: PressureResult, colour: bool) -> str:
    """``pressure`` as text."""
    figures = [
        *([] if result.some is None else [f"some {result.some:.1f} %"]),
        *([] if result.full is None else [f"full {result.full:.1f} % of 10 s"]),
        *([] if result.available is None else [f"{result.available:.0%} of memory available"]),
        *([] if result.kernel is None else [f"kernel level {result.kernel}"]),
    ]
    since = "" if result.since is None else f", for {duration(result.since)}"
    lines = [
        f"watch    {clean(result.mode)}: {clean(result.source)}",
        *(f"         not {clean(line)}" for line in result.refused),
        f"level    {paint(clean(result.level), LEVEL_COLOURS.get(result.level, ''), colour)}",
        f"figures  {', '.join(figures) or 'none'}",
        f"rung     {clean(result.rung)}{since}",
        f"does     {clean(result.does)}" + (", but for the dry run" if result.mode == "dry-run" else ""),
        f"events   {count(result.events)}, and {plural(result.false_alarms, 'false alarm')}",
    ]
    return "\n".join(lines) + "\n"


VERBS = (
    Verb("models", "the served models: engine, KV layout, what prefixes can be used", "Returns at once.", models),
    Verb("mem", "who holds how much memory", "Returns at once.", mem),
    Verb("pressure", "what is watched of the system's memory, and what is done about it", "Returns at once.", pressure),
)

"""Tables, made from the JSON files of a run and from nothing else: ``python -m tests.bench.report FOLDER``."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from tests.bench.harness import OURS, PEER, Cell

SPEEDS = ("tokens_per_s", "prefill_tokens_per_s")


def read(folder: Path) -> list[Cell]:
    """The cells of a run, in order.

    Raises:
        SystemExit: there are none.
    """
    cells = [msgspec.json.decode(path.read_bytes(), type=Cell) for path in sorted(folder.glob("*.json"))]
    if not cells:
        sys.exit(f"there are no results in {folder}")
    return cells


def tables(cells: Sequence[Cell]) -> str:
    """Every table that the cells have figures for."""
    parts = [_heading(cells), speed_table(cells), daemon_table(cells), _footnotes(cells)]
    return "\n\n".join(part for part in parts if part)


def speed_table(cells: Sequence[Cell]) -> str:
    """Tokens per second and first-token times, with ratios of the rounds that are clean on both sides."""
    rows = []
    for name in _names(cells):
        for key in (*SPEEDS, "ttft_median_s"):
            if key == "ttft_median_s" and not name.endswith("greedy-8"):
                continue
            ours, peer = values(cells, OURS, name, key), values(cells, PEER, name, key)
            if not ours and not peer:
                continue
            lower = key not in SPEEDS
            found = ratios(ours, peer, lower_is_better=lower)
            label = name.replace("-", " ") + (", first token, s" if lower else ", tokens/s")
            cost = (cpu_per_1k(cells, OURS, name), cpu_per_1k(cells, PEER, name)) if not lower else (None, None)
            rows.append([label, spread(ours.values()), spread(peer.values()), spread(found, 2)])
            rows[-1] += [f"{value:.1f}" if value is not None else "" for value in cost]
            rows[-1].append(str(len(found)))
    if not rows:
        return ""
    head = ["cell", OURS, PEER, "ratio, more is better", f"CPU s/1k, {OURS}", f"CPU s/1k, {PEER}", "rounds"]
    return markdown(head, rows)


def daemon_table(cells: Sequence[Cell]) -> str:
    """What our daemon process costs beside its worker."""
    rows = []
    share = [cell.window.cpu["daemon"] / cell.window.wall for cell in _clean(cells, OURS, "greedy-8")]
    if share:
        rows.append(["daemon while 8 streams decode, % of a core", spread([100 * value for value in share])])
    for group in ("daemon", "worker"):
        idle = values(cells, OURS, "idle", f"{group}_cores")
        if idle:
            rows.append([f"idle {group}, % of a core", spread([100 * value for value in idle.values()], 2)])
    memory = [cell.rss["daemon"] / 1e6 for cell in cells if cell.system == OURS]
    if memory:
        rows.append(["daemon resident, MB", spread(memory)])
    return markdown(["superfluidd", "median (range)"], rows) if rows else ""


def values(cells: Sequence[Cell], system: str, name: str, key: str) -> dict[int, float]:
    """A figure by round, of clean cells."""
    return {cell.round: cell.values[key] for cell in _clean(cells, system, name) if key in cell.values}


def ratios(ours: dict[int, float], peer: dict[int, float], *, lower_is_better: bool = False) -> list[float]:
    """Ours against the peer's of the same round, turned so that more is better."""
    pairs = [(ours[number], peer[number]) for number in sorted(ours) if number in peer]
    return [theirs / mine if lower_is_better else mine / theirs for mine, theirs in pairs]


def cpu_per_1k(cells: Sequence[Cell], system: str, name: str) -> float | None:
    """Median CPU seconds that a server spent on 1,000 tokens."""
    spent = [
        1000
        * sum(seconds for group, seconds in cell.window.cpu.items() if group not in ("client", "neighbour"))
        / cell.values["tokens"]
        for cell in _clean(cells, system, name)
        if cell.values.get("tokens")
    ]
    return statistics.median(spent) if spent else None


def same_texts(cells: Sequence[Cell]) -> tuple[int, int]:
    """Greedy replies that are equal on both sides, and pairs compared. Counted, not judged: near-ties flip."""
    equal = pairs = 0
    for cell in cells:
        if cell.system != OURS or not cell.texts:
            continue
        for other in cells:
            # A cell that was measured again has another nonce, so other prompts.
            same = (other.name, other.round, other.attempts) == (cell.name, cell.round, cell.attempts)
            if other.system == PEER and same:
                found = list(zip(cell.texts, other.texts, strict=True))
                pairs += len(found)
                equal += sum(mine == theirs for mine, theirs in found)
    return equal, pairs


def _clean(cells: Sequence[Cell], system: str, name: str) -> list[Cell]:
    return [cell for cell in cells if cell.system == system and cell.name == name and not cell.void]


def _names(cells: Sequence[Cell]) -> list[str]:
    kinds = ("greedy", "sampled", "prefill", "busy-greedy", "busy-sampled", "busy-prefill", "after-greedy")

    def place(name: str) -> tuple[int, str]:
        kind = name.rstrip("0123456789").rstrip("-")
        return (kinds.index(kind) if kind in kinds else len(kinds), name)

    return sorted({cell.name for cell in cells}, key=place)


def _heading(cells: Sequence[Cell]) -> str:
    one = cells[0]
    parts = [f"{name} {value}" for name, value in {**one.machine, **one.versions}.items()]
    return "\n".join([f"{one.at}: " + ", ".join(parts), *_commands(cells)])


def _commands(cells: Sequence[Cell]) -> list[str]:
    found: dict[str, str] = {}
    for cell in cells:
        found.setdefault(cell.system, " ".join(cell.argv))
    return list(found.values())


def _footnotes(cells: Sequence[Cell]) -> str:
    lines = []
    equal, pairs = same_texts(cells)
    if pairs:
        lines.append(f"Greedy replies equal on both sides: {equal} of {pairs}.")
    void = [f"{cell.system} {cell.name} round {cell.round}" for cell in cells if cell.void]
    lines.append(f"Void cells: {', '.join(void) or 'none'}.")
    return "\n".join(lines)


def spread(found: Iterable[float], digits: int | None = None) -> str:
    numbers = list(found)
    if not numbers:
        return "none"

    def show(value: float) -> str:
        return f"{value:.{digits}f}" if digits is not None else f"{value:.3g}" if value < 100 else f"{value:.0f}"

    return f"{show(statistics.median(numbers))} ({show(min(numbers))}-{show(max(numbers))})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    line: Callable[[Sequence[str]], str] = lambda row: (  # noqa: E731
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
    )
    return "\n".join([line(head), line(["-" * width for width in widths]), *(line(row) for row in rows)])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.bench.report FOLDER")
    print(tables(read(Path(sys.argv[1]))))

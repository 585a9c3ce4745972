"""The two KV layouts of our own server on one model: ``python -m tests.bench.layouts``

What ``--kv-layout auto`` should choose is a question of this table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.bench import harness
from tests.bench.harness import OURS, Cell, Recorder, Setup
from tests.bench.prepare_model import requantized
from tests.bench.prompts import Prompts
from tests.bench.throughput import GREEDY, QUICK, Sizes, Workloads

LAYOUTS = ("per-sequence", "shared")
AT_ONCE = (1, 8)


def table(cells: Sequence[Cell]) -> str:
    """Median and range by layout, of clean cells; the layout is on the record's command line."""
    lines = ["| cell | " + " | ".join(LAYOUTS) + " |", "| --- |" + " --- |" * len(LAYOUTS)]
    for name in dict.fromkeys(cell.name for cell in cells):
        row = []
        for layout in LAYOUTS:
            found = [
                next(value for key, value in cell.values.items() if key.endswith("tokens_per_s"))
                for cell in cells
                if cell.name == name and not cell.void and cell.argv[cell.argv.index("--kv-layout") + 1] == layout
            ]
            spread = f"{statistics.median(found):.0f} ({min(found):.0f}-{max(found):.0f})" if found else "none"
            row.append(spread)
        lines.append(f"| {name}, tokens/s | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    harness.add_common_options(parser)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each with both layouts (default: %(default)s)")
    args = parser.parse_args()
    rounds: int = 1 if args.quick else args.rounds
    model: Path = args.model or requantized()
    setup = Setup(model=model, context=args.context, ours_args=harness.split_args(args.ours_args))
    loads = Workloads(Prompts(model), QUICK if args.quick else Sizes())
    folder = harness.results_folder(args, "layouts")
    cells = []
    for number in range(1, rounds + 1):
        for layout in LAYOUTS if number % 2 else LAYOUTS[::-1]:
            print(f"round {number} of {rounds}: {layout}", flush=True)
            recorder = Recorder(folder / layout, attempts=1 if args.quick else 6)
            with harness.running(OURS, msgspec.structs.replace(setup, layout=layout)) as server:
                loads.replies(server, 8, GREEDY, tokens=16)(f"warm-{layout}-{number}")
                cells.append(recorder.measure(server, "prefill", number, loads.prefill(server)))
                for at_once in AT_ONCE:
                    work = loads.replies(server, at_once, GREEDY)
                    cells.append(recorder.measure(server, f"greedy-{at_once}", number, work))
    print(f"\n{table(cells)}\nmade from {folder}")


if __name__ == "__main__":
    main()

"""What the scenarios of this folder have in common: rows of servers, alternating rounds, goals, an exit status."""

from __future__ import annotations

import argparse
import http.client
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from tests.bench import harness, plots, report
from tests.bench.harness import Cell, Recorder, Server, Setup
from tests.bench.plots import Goal
from tests.bench.prepare_model import requantized
from tests.bench.prompts import Prompts
from tests.bench.report import markdown, spread


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a server.

    Attributes:
        label: in tables.
        system: which server.
        args: appended to its command line.
        layout: of our KV memory.
    """

    label: str
    system: str
    args: tuple[str, ...] = ()
    layout: str = "per-sequence"


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark.

    Attributes:
        kind: names its cells and its folder.
        about: first line of ``--help``.
        rows: by the name that ``--only`` takes.
        lanes, context: lanes, and tokens of a lane's window.
        work: takes a server, a tokenizer, a nonce, and whether sizes are small; returns figures and texts.
        columns: title -> figure of a cell.
        goals: judges the cells.
    """

    kind: str
    about: str
    rows: Mapping[str, Row]
    lanes: int
    context: int
    work: Callable[[Server, Prompts, str, bool], tuple[dict[str, float], list[str]]]
    columns: Mapping[str, str]
    goals: Callable[[Sequence[Cell]], list[Goal]]


def by_round(cells: Sequence[Cell], scenario: Scenario, row: str, key: str) -> dict[int, float]:
    """A row's figure in the rounds where it is clean."""
    return report.values(cells, scenario.rows[row].system, f"{scenario.kind}-{row}", key)


def table(cells: Sequence[Cell], scenario: Scenario) -> str:
    """Medians and ranges of every row."""
    lines = []
    for name, row in scenario.rows.items():
        found = {title: by_round(cells, scenario, name, key) for title, key in scenario.columns.items()}
        rounds = max(map(len, found.values()))
        if rounds:
            lines.append([row.label, *(spread(values.values(), 3) for values in found.values()), str(rounds)])
    return markdown(["server", *scenario.columns, "rounds"], lines) if lines else "no clean figures"


def metric(server: Server, name: str) -> float:
    """A figure from a server's ``/metrics``, summed over its samples.

    Raises:
        SystemExit: there is none of that name.
    """
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10.0)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0].partition(" ")[0] == name]
    if not found:
        sys.exit(f"{server.name} has no metric {name}")
    return sum(found)


def main(scenario: Scenario, warm_up: Callable[[int, Prompts], None]) -> int:
    """Measure, and print table and verdict; 0 unless a goal was missed."""
    parser = argparse.ArgumentParser(description=scenario.about)
    harness.add_common_options(parser)
    parser.set_defaults(context=scenario.context)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each with every row (default: %(default)s)")
    parser.add_argument("--only", default=",".join(scenario.rows), help="rows (default: %(default)s)")
    parser.add_argument("--attempts", type=int, default=4, help="tries before a cell is void (default: %(default)s)")
    args = parser.parse_args()
    names = args.only.split(",")
    if not set(names) <= set(scenario.rows):
        parser.error(f"--only knows {', '.join(scenario.rows)}")
    rounds, attempts = (1, 1) if args.quick else (args.rounds, args.attempts)
    model: Path = args.model or requantized()
    prompts = Prompts(model)
    folder = harness.results_folder(args, scenario.kind)
    recorder = Recorder(folder, attempts=attempts)
    for number in range(1, rounds + 1):
        for name in names if number % 2 else names[::-1]:
            row = scenario.rows[name]
            print(f"round {number} of {rounds}: {row.label}", flush=True)
            setup = Setup(
                model=model,
                lanes=scenario.lanes,
                context=args.context,
                layout=row.layout,
                ours_args=(*row.args, *harness.split_args(args.ours_args)),
                peer_args=(*row.args, *harness.split_args(args.peer_args)),
            )
            with harness.running(row.system, setup) as server:
                warm_up(server.port, prompts)
                # The same nonce for every row: they are to compute the same prompts.
                cell = f"{scenario.kind}-{name}"

                def work(nonce: str, server: Server = server, cell: str = cell) -> tuple[dict[str, float], list[str]]:
                    nonce = scenario.kind + nonce.removeprefix(cell)
                    return scenario.work(server, prompts, nonce, args.quick)

                recorder.measure(server, cell, number, work)
    cells = report.read(folder)
    found = scenario.goals(cells)
    print(f"\n{report.tables(cells)}\n\n{table(cells, scenario)}\n\n{plots.verdicts(found)}\n\nmade from {folder}")
    return 0 if args.quick or all(goal.passed for goal in found) else 1

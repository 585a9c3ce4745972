"""The command line of ``superfluidd simulate``; apart from what it does, so that ``--help`` loads nothing."""

from __future__ import annotations

import argparse

SETTINGS = (
    "max-batch",
    "class-lanes",
    "agent-preempts-background",
    "starvation-ticks",
    "prefill-budget",
    "tick-decode-budget",
    "tick-target-ms",
    "prefix-cache",
    "pressure-high",
    "pressure-low",
)
"""Options of ``serve`` that a simulation knows."""

WINDOW = 8192
BASELINE = "as it is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="arrivals, a JSON object a line; - is standard input")
    parser.add_argument("--config", metavar="FILE", help="settings of the first run, from this superfluidd.toml")
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one more run with this setting, compared with the first; several settings in one pair of quotes go "
        "together. Known: " + ", ".join(SETTINGS),
    )
    parser.add_argument(
        "--window", type=int, default=WINDOW, metavar="N", help=f"context of a lane. Default: {WINDOW}."
    )
    parser.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="divides the simulated engine's costs. Default: 1."
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw lanes over time and first-token times, such as out.png")
    parser.add_argument("--generate", type=int, metavar="N", help="write a made-up day of N requests to --out instead")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the made-up day. Default: 1.")
    parser.add_argument("--record", metavar="OUT", help="write a trace from a running daemon instead, until Ctrl-C")
    parser.add_argument("--seconds", type=float, metavar="X", help="record for so long")
    parser.add_argument("--socket", metavar="PATH", help="control socket of the daemon to record from")
    parser.add_argument("--out", metavar="FILE", default="-", help="where --generate writes. Default: -.")

"""KV that is to be kept: ``pins``, ``pin``, ``unpin``."""

from __future__ import annotations

import argparse
import re

import msgspec

from sfctl.render import Cell, count, duration, share, table
from sfctl.verbs.verb import Context, Verb
from superfluidd.control.protocol import NoParams, PinParams, PinsResult, PinView, UnpinParams

COLUMNS = ("MODEL", ">ID", ">TOKENS", "WHERE", ">EXPIRES IN", "REQUEST-ID")

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds of the units a time is given in."""


def pins(context: Context) -> str:
    """A row per pin, and how much may be pinned."""
    return _shown(context, "pins", NoParams())


def pin(context: Context) -> str:
    """The pins as they are now."""
    return _shown(context, "pin", PinParams(context.args.id, context.args.ttl))


def unpin(context: Context) -> str:
    """The pins as they are now."""
    return _shown(context, "unpin", UnpinParams(context.args.id))


def _shown(context: Context, method: str, params: msgspec.Struct) -> str:
    answer = context.client.call(method, params, PinsResult)
    return context.show(answer, lambda result: report(result, context.colour))


def report(result: PinsResult, colour: bool) -> str:
    """Pins as text."""
    rows = table(COLUMNS, [_row(view) for view in result.pins], colour)
    budgets = [f"{budget.model}: {share(budget.pinned, budget.most)} tokens are pinned\n" for budget in result.budgets]
    return "\n".join([rows, "".join(budgets)])


def _row(view: PinView) -> list[Cell]:
    return [
        Cell(view.model),
        Cell(view.requests[-1] if view.requests else "-", "bold"),
        Cell(count(view.tokens)),
        Cell(view.place),
        Cell("never" if view.left is None else duration(view.left)),
        Cell(view.origin, "dim"),
    ]


def parse_time(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``10m``, ``2h`` or ``1d``."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give one such as 90s, 10m, 2h or 1d")
    return float(found[1]) * UNITS[found[2] or "s"]


def _one_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="a number from `lanes`, `queue` or `pins`, or an x-request-id")


def _id_and_time(parser: argparse.ArgumentParser) -> None:
    _one_id(parser)
    parser.add_argument(
        "--ttl", metavar="TIME", type=parse_time, help="how long, such as 90s, 10m, 2h or 1d; by default until unpinned"
    )


VERBS = (
    Verb("pins", "what is pinned, and how much may be", "Returns at once.", pins),
    Verb(
        "pin",
        "keep the KV of a request's conversation",
        "Returns at once: what an ended request has left is pinned from then on, what a queued or running one leaves "
        "will be. Pins give way only when nothing else can make room, the oldest first.",
        pin,
        _id_and_time,
    ),
    Verb(
        "unpin",
        "keep it no longer than anything else",
        "Returns at once: from then on it goes when it is its turn.",
        unpin,
        _one_id,
    ),
)

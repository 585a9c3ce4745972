"""Requests one by one: ``lanes``, ``queue``, ``cancel``."""

from __future__ import annotations

import argparse

from sfctl.render import Cell, Colour, count, duration, share, table
from sfctl.verbs.verb import Context, Verb
from superfluidd.control.protocol import (
    CancelParams,
    CancelResult,
    LanesResult,
    LaneView,
    NoParams,
    QueueResult,
    QueueView,
)

LANE_COLUMNS = (
    *("MODEL", ">LANE", ">ID", "CLASS", "PHASE", ">PREFILL", ">OUTPUT", ">KV", ">AGE", ">TTFT", "REQUEST-ID"),
)
QUEUE_COLUMNS = ("MODEL", "CLASS", ">POS", ">ID", ">PROMPT", ">OUTPUT", ">WAITED", "WAITS FOR", "REQUEST-ID")

CLASS_COLOURS: dict[str, Colour] = {"interactive": "green", "completion": "cyan", "agent": "", "background": "dim"}
PHASE_COLOURS: dict[str, Colour] = {"prefill": "yellow", "decode": ""}


def lanes(context: Context) -> str:
    """A row per running request."""
    return context.show(
        context.client.call("lanes", NoParams(), LanesResult),
        lambda result: table(LANE_COLUMNS, [_lane(view) for view in result.lanes], context.colour),
    )


def queue(context: Context) -> str:
    """A row per waiting request."""
    return context.show(
        context.client.call("queue", NoParams(), QueueResult),
        lambda result: table(QUEUE_COLUMNS, [_waiting(view) for view in result.queue], context.colour),
    )


def cancel(context: Context) -> str:
    """A row per request that was cancelled."""
    return context.show(
        context.client.call("cancel", CancelParams(context.args.id), CancelResult),
        lambda result: "".join(f"cancelled {request}\n" for request in result.cancelled),
    )


def _lane(view: LaneView) -> list[Cell]:
    return [
        Cell(view.model),
        Cell(view.lane),
        Cell(view.request, "bold"),
        Cell(view.qos, CLASS_COLOURS.get(view.qos, "")),
        Cell(view.phase, PHASE_COLOURS[view.phase]),
        Cell(share(view.prefilled, view.prompt + view.generated) if view.phase == "prefill" else count(view.prompt)),
        Cell(share(view.generated, view.max_tokens)),
        Cell(count(view.cells)),
        Cell(duration(view.age)),
        Cell(duration(view.ttft)),
        Cell(view.origin, "dim"),
    ]


def _waiting(view: QueueView) -> list[Cell]:
    return [
        Cell(view.model),
        Cell(view.qos, CLASS_COLOURS.get(view.qos, "")),
        Cell(view.position),
        Cell(view.request, "bold"),
        Cell(count(view.prompt)),
        Cell(count(view.generated)),
        Cell(duration(view.waited)),
        Cell(view.why),
        Cell(view.origin, "dim"),
    ]


def _one_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="a number from `lanes` or `queue`, or an x-request-id")


VERBS = (
    Verb(
        "lanes",
        "running requests, by model and lane",
        "Returns at once, also while an engine is busy, stalled or being replaced.",
        lanes,
    ),
    Verb(
        "queue",
        "waiting requests, by class and place in its queue",
        "Returns at once, also while an engine is busy, stalled or being replaced.",
        queue,
    ),
    Verb(
        "cancel",
        "end a queued or running request",
        "Returns as soon as the request is marked: its client gets nothing more, and its lane and KV memory are free "
        "at the engine's next step.",
        cancel,
        _one_id,
    ),
)

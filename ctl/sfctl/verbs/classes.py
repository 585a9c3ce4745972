"""QoS classes and why requests wait: ``caps``, ``pause``, ``resume``, ``qos``, ``explain``."""

from __future__ import annotations

import argparse

from sfctl.errors import Usage
from sfctl.render import Cell, clean, count, table
from sfctl.verbs.verb import Context, Verb
from superfluidd.control.protocol import (
    ClassesResult,
    ClassParams,
    ClassView,
    ExplainParams,
    ExplainResult,
    Explanation,
    NoParams,
    SetCapsParams,
    SetQosParams,
    SetQosResult,
)

COLUMNS = ("MODEL", "CLASS", ">CAP", ">HELD", ">QUEUED", "STATE")


def caps(context: Context) -> str:
    """A row per class, after the change if one was asked for."""
    words: list[str] = context.args.change
    if not words:
        return _classes(context, "caps", NoParams())
    if words[0] != "set" or len(words) == 1:
        raise Usage("to change caps: sfctl caps set CLASS=LANES ..., such as background=2 agent=off")
    return _classes(context, "set_caps", SetCapsParams(dict(_assignment(word) for word in words[1:])))


def pause(context: Context) -> str:
    """A row per class, after the change."""
    return _classes(context, "pause", ClassParams(context.args.qos))


def resume(context: Context) -> str:
    """A row per class, after the change."""
    return _classes(context, "resume", ClassParams(context.args.qos))


def qos(context: Context) -> str:
    """A line per request that was re-classed."""
    return context.show(
        context.client.call("set_qos", SetQosParams(context.args.id, context.args.qos), SetQosResult),
        lambda result: "".join(f"{request} is {clean(result.qos)} now\n" for request in result.requests),
    )


def explain(context: Context) -> str:
    """What was decided about a request, a line per decision."""
    return context.show(
        context.client.call("explain", ExplainParams(context.args.id), ExplainResult),
        lambda result: "\n".join(map(_story, result.requests)),
    )


def _story(one: Explanation) -> str:
    name = f" ({clean(one.origin)})" if one.origin else ""
    lines = [f"request {one.request}{name} on {clean(one.model)}", *(f"  {clean(line)}" for line in one.sentences)]
    return "\n".join([*lines, f"now: {clean(one.now)}"]) + "\n"


def _assignment(word: str) -> tuple[str, int | None]:
    name, equals, number = word.partition("=")
    if not equals or not (number == "off" or (number.isdecimal() and number.isascii() and len(number) < 10)):
        raise Usage(f"{word!r} is not CLASS=LANES, such as background=2, or CLASS=off")
    return name, None if number == "off" else int(number)


def _classes(context: Context, method: str, params: NoParams | SetCapsParams | ClassParams) -> str:
    return context.show(
        context.client.call(method, params, ClassesResult),
        lambda result: table(COLUMNS, [_row(view) for view in result.classes], context.colour),
    )


def _row(view: ClassView) -> list[Cell]:
    return [
        Cell(view.model),
        Cell(view.qos, "bold"),
        Cell("-" if view.cap is None else f"{view.cap} of {view.lanes}"),
        Cell(count(view.held)),
        Cell(count(view.queued)),
        Cell("paused", "yellow") if view.paused else Cell("open"),
    ]


def _change(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "change",
        nargs="*",
        metavar="set CLASS=LANES",
        help="`set` and the caps to change; CLASS=off takes a cap away",
    )


def _one_class(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("qos", metavar="CLASS", help="interactive, completion, agent or background")


def _one_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="a number from `lanes` or `queue`, or an x-request-id")


def _id_and_class(parser: argparse.ArgumentParser) -> None:
    _one_id(parser)
    _one_class(parser)


VERBS = (
    Verb(
        "explain",
        "why a request waits or waited, decision by decision",
        "Returns at once. The latest 256 requests of a model that have ended are still known.",
        explain,
        _one_id,
    ),
    Verb(
        "caps",
        "show how many lanes each class may hold, or change it",
        "Returns at once with the caps as they are now. A changed cap holds from the next tick on; running requests "
        "keep their lanes until they end, and no cap changes unless all of those named can.",
        caps,
        _change,
    ),
    Verb(
        "qos",
        "move a queued or running request to another class",
        "Returns at once. A queued request joins the end of its new class; a running one keeps its lane and is judged "
        "by the new class from then on.",
        qos,
        _id_and_class,
    ),
    Verb(
        "pause",
        "give a class no more lanes",
        "Returns at once. What runs goes on; what is queued or comes waits until `resume`.",
        pause,
        _one_class,
    ),
    Verb("resume", "give a paused class lanes again", "Returns at once.", resume, _one_class),
)

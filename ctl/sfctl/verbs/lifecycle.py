"""The daemon's own course: ``drain``."""

from __future__ import annotations

import argparse

from sfctl.render import plural
from sfctl.verbs.verb import Context, Verb
from superfluidd.control.protocol import DrainParams, DrainResult


def drain(context: Context) -> str:
    """How much is left."""
    wait: bool = context.args.wait
    return context.show(context.client.call("drain", DrainParams(wait), DrainResult, waits=wait), report)


def report(result: DrainResult) -> str:
    """``drain`` as text."""
    if not result.running and not result.queued:
        return "drained: nothing is running or queued\n"
    return f"draining: {plural(result.running, 'request')} running, {result.queued} queued\n"


def _wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="return only when nothing is running or queued any more")


VERBS = (
    Verb(
        "drain",
        "take no new requests; what is queued and running goes on",
        "Returns at once: from then on every new request is refused with status 503. With --wait it returns when "
        "nothing is running or queued any more; interrupting that wait leaves the daemon draining.",
        drain,
        _wait,
    ),
)

"""What is served, and for how long: ``load``, ``unload``, ``drain``."""

from __future__ import annotations

import argparse
import os

from sfctl.render import clean, count, plural
from sfctl.verbs.verb import Context, Verb
from superfluidd.control.protocol import DrainParams, DrainResult, LoadParams, ModelResult, UnloadParams


def load(context: Context) -> str:
    """What can be served now."""
    answer = context.client.call("load", LoadParams(named(context.args.model)), ModelResult, waits=True)
    return context.show(answer, _loaded)


def _loaded(result: ModelResult) -> str:
    model = result.model
    return f"{clean(model.name)} is {model.state}: {model.lanes} lanes of {count(model.window)} tokens\n"


def named(text: str) -> str:
    """A file's path as the daemon, which runs elsewhere, can read it; a name stays as it is."""
    return os.path.abspath(text) if "/" in text or text.endswith(".gguf") else text


def unload(context: Context) -> str:
    """That it is done."""
    params = UnloadParams(context.args.model, context.args.now)
    answer = context.client.call("unload", params, ModelResult, waits=True)
    return context.show(answer, lambda result: f"{clean(result.model.name)} is {result.model.state}\n")


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


def _model_or_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's name, or the path of a GGUF file")


def _model_and_now(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's name")
    parser.add_argument("--now", action="store_true", help="end its requests instead of waiting for them")


VERBS = (
    Verb(
        "load",
        "load a model that is not, or one more",
        "Returns when the model can serve. Interrupting the wait changes nothing.",
        load,
        _model_or_file,
    ),
    Verb(
        "unload",
        "give a model's memory back",
        "Returns when it has been: the model takes no new requests, those it has go on for at most the daemon's "
        "--drain-timeout, or with --now end at once with status 503. Interrupting the wait changes nothing.",
        unload,
        _model_and_now,
    ),
    Verb(
        "drain",
        "take no new requests; what is queued and running goes on",
        "Returns at once: from then on every new request is refused with status 503. With --wait it returns when "
        "nothing is running or queued any more; interrupting that wait leaves the daemon draining.",
        drain,
        _wait,
    ),
)

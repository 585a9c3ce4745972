"""What a verb is. A module per family of verbs lists its own in ``VERBS``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

import msgspec

from sfctl.client import Answer, Client

Result = TypeVar("Result", bound=msgspec.Struct)


class Context:
    """What a verb works with.

    Attributes:
        client: the connection to the daemon.
        args: the command line.
        colour: paint the output.
    """

    def __init__(self, client: Client, args: argparse.Namespace, colour: bool) -> None:
        self.client = client
        self.args = args
        self.colour = colour

    def show(self, answer: Answer[Result], text: Callable[[Result], str]) -> str:
        """What goes to standard output: the answer as it came for ``--json``, else ``text`` of it."""
        return answer.raw.decode() + "\n" if self.args.json else text(answer.result)


def nothing(parser: argparse.ArgumentParser) -> None:
    """The verb takes no arguments of its own."""


class Verb(msgspec.Struct, frozen=True):
    """One verb.

    Attributes:
        name: as typed.
        summary: what it does, in a few words.
        returns: when it returns, and what is true then.
        run: does it and returns the text for standard output.
        arguments: adds its own arguments.
    """

    name: str
    summary: str
    returns: str
    run: Callable[[Context], str]
    arguments: Callable[[argparse.ArgumentParser], None] = nothing

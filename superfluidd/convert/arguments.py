"""The command line of ``superfluidd convert``; apart from what it does, so that ``--help`` loads nothing."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("model", metavar="MODEL.gguf", help="the file to convert; - is the bundled model")
    parser.add_argument("directory", metavar="DIR", help="what to make; it must not exist yet")

"""``sfctl [--socket PATH] VERB``: arguments in, exit status out.

Exit status: 0 done, 1 refused, 2 wrong usage, 3 no daemon answers.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sfctl.client import Client
from sfctl.errors import CommandError
from sfctl.render import wants_colour
from sfctl.verbs import classes, lifecycle, memory, overview, pins, requests
from sfctl.verbs.verb import Context, Verb
from superfluidd import __version__
from superfluidd.control import paths

VERBS: tuple[Verb, ...] = (
    *overview.VERBS,
    *requests.VERBS,
    *classes.VERBS,
    *memory.VERBS,
    *pins.VERBS,
    *lifecycle.VERBS,
)


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.verb is None:
        parser.print_help(sys.stderr)
        return 2
    named: str | None = args.socket
    trusted = bool(named or os.environ.get("SUPERFLUIDD_SOCKET"))
    try:
        with Client([Path(named)] if named else paths.candidates(), trusted=trusted) as client:
            text = args.run(Context(client, args, wants_colour(sys.stdout, os.environ)))
    except CommandError as error:
        print(f"sfctl: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough. Python flushes once more at exit, which must find somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line of every verb."""
    parser = argparse.ArgumentParser(
        prog="sfctl",
        description="Look at a running superfluidd and steer it.",
        epilog="Exit status: 0 done, 1 refused, 2 wrong usage, 3 no daemon answers. See sfctl(1).",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sfctl {__version__}")
    parser.add_argument(
        "--socket",
        metavar="PATH",
        type=_path,
        help=f"the daemon's control socket. Default: $SUPERFLUIDD_SOCKET, else {paths.default_socket_path()}".replace(
            "%", "%%"
        ),
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for verb in VERBS:
        one = verbs.add_parser(
            verb.name,
            help=verb.summary,
            description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
            epilog=verb.returns,
            allow_abbrev=False,
        )
        # After the verb it must not undo one given before it.
        one.add_argument("--socket", metavar="PATH", type=_path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        one.add_argument("--json", action="store_true", help="print the daemon's answer as one line of JSON")
        verb.arguments(one)
        one.set_defaults(run=verb.run)
    return parser


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty; give the path of the daemon's control socket")
    return text


if __name__ == "__main__":
    sys.exit(main())

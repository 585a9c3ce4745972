"""``python -m superfluidd``: the command line, and the worker's way in, which imports no more than it needs."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line and return the exit code."""
    if len(sys.argv) > 1 and sys.argv[1] == "worker":
        from superfluidd.engine.worker import command

        return command(sys.argv[2:])
    from superfluidd.cli import main as command_line

    return command_line(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

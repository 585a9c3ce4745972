"""Why a command did not succeed; each knows the exit status that sfctl(1) documents for it."""

from __future__ import annotations

from typing import ClassVar


class CommandError(Exception):
    """Root of what is told in one line on standard error."""

    status: ClassVar[int] = 1


class Refused(CommandError):
    """A daemon is there and said no, or the kernel says the socket is somebody else's."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        """The error's stable name, where the daemon gave one."""


class Usage(CommandError):
    """The command line cannot be right."""

    status = 2


class NoDaemon(CommandError):
    """No daemon answers."""

    status = 3

"""One conversation with the daemon: a blocking socket, typed results."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

from sfctl.errors import NoDaemon, Refused, Usage
from superfluidd.control import paths, peer, protocol

PATIENCE = 10.0
"""Seconds that connecting, and any call that does not wait for something, may take."""

Result = TypeVar("Result", bound=msgspec.Struct)


class Answer(Generic[Result]):
    """What a call returned: ``raw`` as the daemon wrote it, ``result`` as this version understands it."""

    def __init__(self, raw: bytes, kind: type[Result]) -> None:
        self.raw = raw
        self._kind = kind

    @property
    def result(self) -> Result:
        """The typed result.

        Raises:
            Refused: this version does not understand it.
        """
        try:
            return msgspec.json.decode(self.raw, type=self._kind)
        except msgspec.DecodeError as error:
            raise Refused(
                f"cannot read the daemon's answer ({error}); is it of another version? `sfctl --version` shows this "
                f"one, and --json prints the answer as it is"
            ) from None


class Client:
    """A connection to the first daemon that answers.

    Args:
        candidates: sockets to try, in order.
        trusted: the user named the socket, so that whoever owns its directory is not asked about.

    Raises:
        NoDaemon: nobody listens on any of them.
        Refused: the socket is another user's.
        Usage: a path that cannot be a socket's.
    """

    def __init__(self, candidates: Sequence[Path], *, trusted: bool, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._ident = 0
        self._buffer = bytearray()
        tried = []
        for path in candidates:
            problem = self._connect(path, trusted)
            if problem is None:
                self.path = path
                return
            tried.append(f"{path} ({problem})")
        raise NoDaemon(
            f"no daemon answers on {' or '.join(tried)}; start one with `superfluidd serve`, or name the socket of a "
            f"running one with --socket"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def _connect(self, path: Path, trusted: bool) -> str | None:
        """Connect, or say why nobody is there."""
        if len(os.fsencode(path)) > paths.LONGEST:
            raise Usage(f"{path} is longer than the {paths.LONGEST} bytes a socket's path may have")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(self._patience)
        try:
            if not trusted:
                paths.check_private(path.parent, os.geteuid())
            self._socket.connect(str(path))
            return None
        except paths.UnsafeDirectory as error:
            problem = f"not trusted: {error}"
        except (FileNotFoundError, NotADirectoryError):
            problem = "no such socket"
        except ConnectionRefusedError:
            problem = "the daemon that made it is gone"
        except PermissionError:
            self._socket.close()
            raise Refused(
                f"{path} belongs to {_owner(path)} and only that user and root may use it; "
                f"run this as that user, for example with sudo -u"
            ) from None
        except (TimeoutError, BlockingIOError):
            problem = "it takes no connections; the daemon is stopped or overloaded"
        except OSError as error:
            problem = str(error.strerror or error)
        self._socket.close()
        return problem

    def call(self, method: str, params: msgspec.Struct, result: type[Result], *, waits: bool = False) -> Answer[Result]:
        """Call a method.

        Args:
            method: its name.
            params: its parameters.
            result: type of what it returns.
            waits: the call may take for ever, and is let.

        Raises:
            Refused: the daemon said no.
            NoDaemon: it went away, or does not answer.
        """
        self._ident += 1
        message = {"jsonrpc": "2.0", "id": self._ident, "method": method, "params": params}
        self._socket.settimeout(None if waits else self._patience)
        try:
            try:
                self._socket.sendall(msgspec.json.encode(message) + b"\n")
            except BrokenPipeError:
                pass  # closed on us, perhaps after saying why
            line = self._line()
        except TimeoutError:
            raise NoDaemon(
                f"the daemon on {self.path}{self._pid()} takes connections but has not answered for "
                f"{self._patience:g} s; it may be stopped (kill -CONT starts it again) or the machine overloaded"
            ) from None
        except OSError as error:
            raise NoDaemon(f"lost the daemon on {self.path}: {error.strerror or error}") from None
        if line is None:
            raise NoDaemon(f"the daemon on {self.path} went away before it answered")
        return Answer(_unwrap(line, self._ident, self.path), result)

    def _line(self) -> bytes | None:
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                return bytes(line)
            data = self._socket.recv(65536)
            if not data:
                return None
            self._buffer += data

    def _pid(self) -> str:
        try:
            return f" (pid {peer.credentials(self._socket).pid})"
        except OSError:
            return ""


def _unwrap(line: bytes, ident: int, path: Path) -> bytes:
    """The result inside a response."""
    try:
        reply = msgspec.json.decode(line, type=protocol.Reply)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise NoDaemon(f"what listens on {path} does not speak the control protocol") from None
    if isinstance(reply.error, protocol.ErrorBody):
        hint = "; the daemon is older than this sfctl" if reply.error.code == protocol.METHOD_NOT_FOUND else ""
        raise Refused(reply.error.message + hint, reply.error.data)
    if isinstance(reply.result, msgspec.UnsetType) or reply.id != ident:
        raise NoDaemon(f"what listens on {path} does not speak the control protocol")
    return bytes(reply.result)


def _owner(path: Path) -> str:
    """Who owns the socket, or the nearest directory above it that can be seen."""
    for place in (path, *path.parents):
        try:
            uid = place.lstat().st_uid
        except OSError:
            continue
        try:
            return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
        except KeyError:
            return f"uid {uid}"
    return "another user"

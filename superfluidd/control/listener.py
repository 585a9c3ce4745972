"""The control socket's file: created private, never taken from a live daemon, removed only while it is ours."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from superfluidd.control import paths, peer
from superfluidd.errors import AlreadyRunning, UsageError

log = logging.getLogger(__name__)

BACKLOG = 128
PATIENCE = 2.0
"""Seconds to wait for another daemon that is just starting on the same directory, or for an answer to a connect."""

FileId = tuple[int, int]
"""Device and inode."""


def open_listener(path: Path) -> socket.socket:
    """Listen on ``path``; the file is readable and writable by this user alone from its first moment.

    A socket file that nobody listens on any more is replaced.

    Raises:
        AlreadyRunning: some process listens there.
        UsageError: the path cannot be used; what is there is left alone.
    """
    if len(os.fsencode(path)) > paths.LONGEST:
        raise UsageError(
            f"the control socket's path {path} is longer than the {paths.LONGEST} bytes this system allows; "
            f"choose a shorter one with --socket"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.check_private(path.parent, os.geteuid())
        with _alone_in(path.parent):
            _clear(path)
            return _bind(path)
    except paths.UnsafeDirectory as error:
        raise UsageError(f"{error}; remove it, or choose another place with --socket") from error
    except OSError as error:
        raise UsageError(
            f"cannot put the control socket at {path}: {error.strerror or error}; choose another place with --socket"
        ) from error


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Keep other daemons that start now from looking and binding at the same time."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise AlreadyRunning(f"another process holds {directory}; choose another --socket") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def _clear(path: Path) -> None:
    """Remove a socket file that nobody listens on."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} exists and is not a socket; move it away, or choose another place with --socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PATIENCE)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            log.info("removing %s, which a daemon that is gone left behind", path)
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except (TimeoutError, BlockingIOError):
            who = "a process that is too busy to say which"
        else:
            try:
                who = f"process {peer.credentials(probe).pid}"
            except OSError:
                who = "a process"
    raise AlreadyRunning(
        f"{who} already listens on {path}; `sfctl --socket {path} status` asks it, --socket chooses another place"
    )


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        # The mode must be right when the file appears: a chmod afterwards leaves a moment in which others connect.
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def identify(path: Path) -> FileId | None:
    """Which file is at ``path`` now, None if there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove(path: Path, ours: FileId | None) -> None:
    """Remove the file unless somebody has put another one there since."""
    if ours is not None and identify(path) == ours:
        with contextlib.suppress(OSError):
            path.unlink()

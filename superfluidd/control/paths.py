"""Where the control socket is. Standard library only: the daemon and ``sfctl`` both ask here."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

NAME = "control.sock"
DIRECTORY = "superfluidd"

LONGEST = 103 if sys.platform == "darwin" else 107
"""Bytes of the longest path a Unix socket can have."""


class UnsafeDirectory(Exception):
    """A directory in a shared place that somebody else owns or may write to."""


def system_socket_path() -> Path:
    """Where a daemon run by root, or as a system service, listens."""
    return Path("/var/run" if sys.platform == "darwin" else "/run") / DIRECTORY / NAME


def default_socket_path(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """``$SUPERFLUIDD_SOCKET``, else the usual place for this user.

    A service manager's ``$RUNTIME_DIRECTORY`` counts only where it names our own directory: a client started by some
    other service inherits that service's.
    """
    uid = os.geteuid() if uid is None else uid
    if environ.get("SUPERFLUIDD_SOCKET"):
        return Path(environ["SUPERFLUIDD_SOCKET"])
    for directory in environ.get("RUNTIME_DIRECTORY", "").split(":"):
        if Path(directory).name == DIRECTORY:
            return Path(directory) / NAME
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / DIRECTORY / NAME
    if uid == 0:
        return system_socket_path()
    return Path(environ.get("TMPDIR") or "/tmp") / f"{DIRECTORY}-{uid}" / NAME


def candidates(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> tuple[Path, ...]:
    """Where a client that was told nothing looks, in order: the user's own daemon, then the system's."""
    own = default_socket_path(environ, uid)
    system = system_socket_path()
    return (own,) if environ.get("SUPERFLUIDD_SOCKET") or own == system else (own, system)


def check_private(directory: Path, uid: int) -> None:
    """Refuse a directory that others could have planted, or could swap the socket in.

    Only a directory inside one that everybody may write to, such as ``/tmp``, is at risk; others pass.

    Raises:
        UnsafeDirectory: it is a link, not a directory, not owned by ``uid``, or writable by others.
        OSError: it cannot be looked at.
    """
    directory = directory.absolute()
    if not directory.parent.stat().st_mode & stat.S_IWOTH:
        return
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeDirectory(f"{directory} is not a directory but a link or a file, in a place everybody can write to")
    if found.st_uid != uid:
        raise UnsafeDirectory(f"{directory} belongs to uid {found.st_uid}, not to uid {uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeDirectory(f"others may write to {directory}; `chmod go-w {directory}` mends that")

"""Who is at the other end of a Unix socket, as the kernel tells it."""

from __future__ import annotations

import socket
import struct
import sys
from typing import Protocol

import msgspec

SO_PEERCRED = getattr(socket, "SO_PEERCRED", 17)
SOL_LOCAL, LOCAL_PEERCRED, LOCAL_PEERPID = 0, 1, 2

_UCRED = struct.Struct("iII")
"""Linux ``struct ucred``: pid, uid, gid."""

_XUCRED = struct.Struct("IIh2x16I")
"""Darwin ``struct xucred``: version (0), uid, number of groups, 16 groups."""

_PID = struct.Struct("i")


class Peer(msgspec.Struct, frozen=True):
    """The process that connected, or that listens: its effective uid, and its pid (0 where it cannot be seen)."""

    uid: int
    pid: int


class HasOptions(Protocol):
    """The part of a socket that is needed; a Trio socket has it too."""

    def getsockopt(self, level: int, optname: int, buflen: int) -> bytes:
        """As ``socket.socket.getsockopt``."""


def credentials(sock: HasOptions, platform: str = sys.platform) -> Peer:
    """The peer of a connected Unix socket.

    Raises:
        OSError: the kernel does not say.
    """
    if platform == "darwin":
        version, uid, *_ = _XUCRED.unpack(sock.getsockopt(SOL_LOCAL, LOCAL_PEERCRED, _XUCRED.size))
        if version != 0:
            raise OSError(f"unknown version {version} of peer credentials")
        (pid,) = _PID.unpack(sock.getsockopt(SOL_LOCAL, LOCAL_PEERPID, _PID.size))
    else:
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, SO_PEERCRED, _UCRED.size))
    return Peer(uid, pid)

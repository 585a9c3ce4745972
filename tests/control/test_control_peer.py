"""Peer credentials: the kernel's for real, both platforms' layouts by injection."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from superfluidd.control.peer import LOCAL_PEERCRED, LOCAL_PEERPID, SO_PEERCRED, SOL_LOCAL, Peer, credentials


class Socket:
    """A socket that knows some options."""

    def __init__(self, options: dict[tuple[int, int], bytes]) -> None:
        self._options = options

    def getsockopt(self, level: int, optname: int, buflen: int) -> bytes:
        value = self._options[level, optname]
        assert buflen == len(value)
        return value


def test_this_platform_tells_this_process() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert credentials(left) == Peer(os.geteuid(), os.getpid())


def test_linux() -> None:
    sock = Socket({(socket.SOL_SOCKET, SO_PEERCRED): struct.pack("=iII", 77, 4_294_967_294, 5)})
    assert credentials(sock, "linux") == Peer(4_294_967_294, 77)


def xucred(version: int) -> bytes:
    """As Darwin lays it out: 76 bytes."""
    return struct.pack("=IIh2x16I", version, 501, 1, 20, *[0] * 15)


def test_darwin() -> None:
    sock = Socket({(SOL_LOCAL, LOCAL_PEERCRED): xucred(0), (SOL_LOCAL, LOCAL_PEERPID): struct.pack("=i", 88)})
    assert len(xucred(0)) == 76
    assert credentials(sock, "darwin") == Peer(501, 88)


def test_a_layout_of_an_unknown_version_is_not_guessed_at() -> None:
    with pytest.raises(OSError, match="version 1"):
        credentials(Socket({(SOL_LOCAL, LOCAL_PEERCRED): xucred(1)}), "darwin")

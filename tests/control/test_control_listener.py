"""The socket's file: private, never stolen, never somebody else's to lose."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from superfluidd.control import listener, paths
from superfluidd.control.listener import open_listener
from superfluidd.errors import AlreadyRunning, StartupError, UsageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "superfluidd" / "control.sock"


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The process's umask, restored afterwards."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def leave_behind(path: Path) -> None:
    """A socket file that nobody listens on."""
    path.parent.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


def test_file_and_directory_are_private_under_any_umask(path: Path, umask: int) -> None:
    if umask == 0o777:  # a directory made under it could not be entered, except by root
        path.parent.mkdir(0o700)
        path.parent.chmod(0o700)
    with open_listener(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path.stat().st_uid == os.geteuid()
    assert os.umask(umask) == umask, "the umask was not put back"


def test_the_file_is_never_more_open_than_in_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    class Watched(socket.socket):
        def bind(self, address: object, /) -> None:
            super().bind(address)  # type: ignore[arg-type]
            modes.append(stat.S_IMODE(path.stat().st_mode))

    monkeypatch.setattr(socket, "socket", Watched)
    with open_listener(path):
        pass
    assert modes == [0o600]


def test_a_file_that_a_daemon_left_behind_is_replaced(path: Path) -> None:
    leave_behind(path)
    with open_listener(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_second_daemon_is_told_who_is_there(path: Path) -> None:
    with open_listener(path):
        with pytest.raises(AlreadyRunning, match=rf"process {os.getpid()} already listens on .*sfctl --socket "):
            open_listener(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_daemon_too_busy_to_accept_is_a_daemon(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PATIENCE", 0.05)
    path.parent.mkdir()
    waiting: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        try:
            while True:
                client = socket.socket(socket.AF_UNIX)
                waiting.append(client)
                client.setblocking(False)
                client.connect(str(path))
        except BlockingIOError:
            pass
        with pytest.raises(AlreadyRunning, match="too busy"):
            open_listener(path)
        for client in waiting:
            client.close()
    assert path.exists()


def test_what_is_not_a_socket_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(UsageError, match="not a socket"):
        open_listener(path)
    assert path.read_text() == "precious"


def test_a_link_is_left_alone_even_if_it_leads_to_a_socket(path: Path) -> None:
    leave_behind(path.parent / "other")
    path.symlink_to("other")
    with pytest.raises(UsageError, match="not a socket"):
        open_listener(path)
    assert path.is_symlink()
    assert (path.parent / "other").exists()


def test_a_socket_of_another_kind_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(UsageError, match="cannot put the control socket"):
            open_listener(path)
    assert path.exists()


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    start = len(os.fsencode(tmp_path)) + 1
    fits = tmp_path / ("x" * (paths.LONGEST - start))
    with open_listener(fits):
        pass
    with pytest.raises(UsageError, match=rf"longer than the {paths.LONGEST} bytes .* --socket"):
        open_listener(tmp_path / ("x" * (paths.LONGEST - start + 1)))


def test_a_parent_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot put the control socket"):
        open_listener(tmp_path / "file" / "control.sock")


def test_a_planted_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "elsewhere").mkdir(0o700)
    (tmp_path / "superfluidd-1").symlink_to("elsewhere")
    with pytest.raises(UsageError, match=r"is not a directory but a link .* --socket"):
        open_listener(tmp_path / "superfluidd-1" / "control.sock")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_process_that_holds_the_directory_is_not_waited_for_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "PATIENCE", 0.05)
    path.parent.mkdir()
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)  # even one that others may share
        with pytest.raises(AlreadyRunning, match="another process holds"):
            open_listener(path)
    finally:
        os.close(handle)


def test_of_daemons_that_start_at_once_over_a_stale_file_one_wins(path: Path) -> None:
    leave_behind(path)
    won: list[socket.socket] = []
    lost: list[StartupError] = []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        try:
            won.append(open_listener(path))
        except StartupError as error:
            lost.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert all(isinstance(error, AlreadyRunning) for error in lost)
    with won[0], socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_only_our_own_file_is_removed(path: Path) -> None:
    with open_listener(path):
        ours = listener.identify(path)
        path.rename(path.with_name("ours"))
        leave_behind(path)
        listener.remove(path, ours)
        assert path.exists(), "another daemon's socket was removed"
        listener.remove(path.with_name("ours"), ours)
        assert not path.with_name("ours").exists()
        listener.remove(path.with_name("ours"), ours)
        listener.remove(path, None)
        assert path.exists()

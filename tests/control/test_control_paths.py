"""Where the socket goes, and which directories are trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from superfluidd.control import paths

SYSTEM = paths.system_socket_path()


@pytest.mark.parametrize(
    "environ, uid, expected",
    [
        ({"SUPERFLUIDD_SOCKET": "/a/b.sock", "XDG_RUNTIME_DIR": "/run/user/5"}, 5, "/a/b.sock"),
        ({"SUPERFLUIDD_SOCKET": "", "XDG_RUNTIME_DIR": "/run/user/5"}, 5, "/run/user/5/superfluidd/control.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/0"}, 0, "/run/user/0/superfluidd/control.sock"),
        ({"RUNTIME_DIRECTORY": "/run/superfluidd"}, 5, "/run/superfluidd/control.sock"),
        ({"RUNTIME_DIRECTORY": "/run/x:/run/superfluidd"}, 5, "/run/superfluidd/control.sock"),
        ({"RUNTIME_DIRECTORY": "/run/other", "TMPDIR": "/t"}, 5, "/t/superfluidd-5/control.sock"),
        ({}, 0, str(SYSTEM)),
        ({}, 5, "/tmp/superfluidd-5/control.sock"),
        ({"TMPDIR": "/var/tmp"}, 1000, "/var/tmp/superfluidd-1000/control.sock"),
    ],
)
def test_default_socket_path(environ: dict[str, str], uid: int, expected: str) -> None:
    assert paths.default_socket_path(environ, uid) == Path(expected)


def test_a_client_looks_at_its_own_daemon_first_and_then_at_the_systems() -> None:
    own = Path("/run/user/5/superfluidd/control.sock")
    assert paths.candidates({"XDG_RUNTIME_DIR": "/run/user/5"}, 5) == (own, SYSTEM)
    assert paths.candidates({}, 0) == (SYSTEM,)
    assert paths.candidates({"SUPERFLUIDD_SOCKET": "/a"}, 5) == (Path("/a"),)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A place like /tmp."""
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    return place


def test_a_directory_of_our_own_in_a_shared_place_is_trusted(shared: Path) -> None:
    (shared / "mine").mkdir(0o700)
    paths.check_private(shared / "mine", os.geteuid())


def test_a_link_in_a_shared_place_is_not(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (shared / "link").symlink_to(tmp_path / "real")
    with pytest.raises(paths.UnsafeDirectory, match="link"):
        paths.check_private(shared / "link", os.geteuid())


def test_somebody_elses_directory_in_a_shared_place_is_not(shared: Path) -> None:
    (shared / "theirs").mkdir(0o700)
    with pytest.raises(paths.UnsafeDirectory, match=f"belongs to uid {os.geteuid()}, not to uid {os.geteuid() + 1}"):
        paths.check_private(shared / "theirs", os.geteuid() + 1)


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_not(shared: Path, mode: int) -> None:
    (shared / "open").mkdir()
    (shared / "open").chmod(mode)
    with pytest.raises(paths.UnsafeDirectory, match="chmod go-w"):
        paths.check_private(shared / "open", os.geteuid())


def test_a_directory_in_a_private_place_is_nobodys_business(tmp_path: Path) -> None:
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o770)
    paths.check_private(tmp_path / "group", os.geteuid() + 1)

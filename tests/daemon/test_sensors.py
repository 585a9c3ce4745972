"""What tells of memory pressure: which source is armed, what its bytes mean, when a trigger fires. Files like the
kernel's stand in for it; triggers are real descriptors."""

from __future__ import annotations

import base64
import os
import socket
from pathlib import Path

import pytest
import trio

from superfluidd.daemon import sensors
from superfluidd.daemon.sensors import Averages, Psi, PsiTrigger, SourceLost, Sysctl, Told, arm, named, parse
from superfluidd.scheduling.pressure import Reading

CALM = "some avg10=0.00 avg60=0.00 avg300=0.00 total=100\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=50\n"


def text(some: float, full: float, total: int) -> str:
    return (
        f"some avg10={some:.2f} avg60=0.00 avg300=0.00 total={total}\nfull avg10={full:.2f} avg60=0 avg300=0 total=1\n"
    )


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (text(12.34, 5.0, 777), Psi(12.34, 5.0, 777)),
        ("some avg10=1.50 avg60=0.00 avg300=0.00 total=9\n", Psi(1.5, 0.0, 9)),
        ("", None),
        ("full avg10=1.50 total=9\n", None),
        ("some avg10=1.50\n", None),
        ("some avg10=much total=9\n", None),
        ("some avg10\nsome\n", None),
        ("\0\0\0", None),
    ],
)
def test_a_pressure_files_text(content: str, expected: Psi | None) -> None:
    assert parse(content) == expected


def test_averages_are_figures(tmp_path: Path) -> None:
    path = write(tmp_path / "memory", text(12.0, 3.0, 10))
    averages = Averages(path)
    assert averages(5.0) == Reading(5.0, some=12.0, full=3.0)
    write(path, text(0.0, 0.0, 10))
    assert averages(6.0) == Reading(6.0, some=0.0, full=0.0)
    assert averages(60.0) == Reading(60.0, some=0.0, full=0.0), "nothing that stands still has to change"


def test_averages_that_are_frozen_grow_old(tmp_path: Path) -> None:
    averages = Averages(write(tmp_path / "memory", text(50.0, 40.0, 10)))
    assert averages(5.0).at == 5.0
    assert averages(9.0).at == 5.0
    write(tmp_path / "memory", text(50.0, 40.0, 11))
    assert averages(10.0).at == 10.0


def test_a_file_that_has_gone_has_no_figures(tmp_path: Path) -> None:
    averages = Averages(write(tmp_path / "memory", CALM))
    averages(1.0)
    (tmp_path / "memory").unlink()
    assert averages(2.0) == Reading(2.0)


@pytest.mark.parametrize("level", [1, 2, 4, 3, None])
def test_macos_has_a_level_of_its_own(level: int | None) -> None:
    assert Sysctl(lambda: level)(3.0) == Reading(3.0, kernel=level)


def test_macos_is_polled() -> None:
    armed = arm(Path("/nowhere"), {}, "darwin")
    assert armed is not None
    assert armed.trigger is None
    assert armed.name == "polling kern.memorystatus_vm_pressure_level"


def test_a_sysctl_that_does_not_exist_is_no_level() -> None:
    assert sensors.sysctl_level() in (None, 1, 2, 4)


# -- which is armed -------------------------------------------------------------------------------------------------


def kernel(root: Path, *, group: bool = True, machine: bool = True) -> Path:
    write(root / "proc/self/cgroup", "1:name=systemd:/x\n0::/app.slice/superfluidd.service\n")
    if group:
        write(root / "sys/fs/cgroup/app.slice/superfluidd.service/memory.pressure", CALM)
    if machine:
        write(root / "proc/pressure/memory", CALM)
    return root


def refuse(monkeypatch: pytest.MonkeyPatch, *parts: str) -> list[str]:
    """A kernel whose pressure files take triggers, but for those with such a part in their path."""
    tried: list[str] = []

    class Trigger:
        def __init__(self, path: Path, data: bytes = sensors.TRIGGER) -> None:
            tried.append(str(path))
            if any(part in str(path) for part in parts):
                raise PermissionError(13, "Permission denied")
            self.name = f"{path} trigger"

    monkeypatch.setattr(sensors, "PsiTrigger", Trigger)
    return tried


def test_the_control_group_comes_before_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    armed = arm(kernel(tmp_path), {}, "linux")
    assert armed is not None
    assert armed.name == f"{tmp_path}/sys/fs/cgroup/app.slice/superfluidd.service/memory.pressure trigger"
    assert armed.refused == ()


def test_the_second_version_may_be_mounted_beside_the_first(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "2:memory:/y\n0::/x\n")
    path = write(tmp_path / "sys/fs/cgroup/unified/x/memory.pressure", CALM)
    assert sensors.control_group(tmp_path) == path


@pytest.mark.parametrize("cgroup", ["", "1:memory:/x\n", "0::/../x\n", "0::/gone\n"])
def test_no_control_group(tmp_path: Path, cgroup: str) -> None:
    write(tmp_path / "proc/self/cgroup", cgroup)
    write(tmp_path / "sys/fs/x/memory.pressure", CALM)
    assert sensors.control_group(tmp_path) is None


def test_a_group_that_refuses_is_followed_by_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "cgroup")
    armed = arm(kernel(tmp_path), {}, "linux")
    assert armed is not None
    assert armed.name == f"{tmp_path}/proc/pressure/memory trigger"
    [why] = armed.refused
    assert why.endswith("superfluidd.service/memory.pressure trigger: Permission denied")


def test_without_triggers_averages_are_polled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "cgroup", "proc")
    armed = arm(kernel(tmp_path, group=False), {}, "linux")
    assert armed is not None
    assert armed.trigger is None
    assert armed.name == f"polling {tmp_path}/proc/pressure/memory"
    assert armed.figures(1.0) == Reading(1.0, some=0.0, full=0.0)


def test_without_any_of_it_available_memory_is_polled(tmp_path: Path) -> None:
    armed = arm(tmp_path, {}, "linux")
    assert armed is not None
    assert armed.trigger is None
    assert armed.name == "polling available memory"
    share = armed.figures(1.0).available
    assert share is not None
    assert 0.0 < share < 1.0


def test_systemd_comes_first_and_may_say_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    armed = arm(kernel(tmp_path), {"MEMORY_PRESSURE_WATCH": str(fifo)}, "linux")
    assert armed is not None
    assert armed.name == f"{fifo} (FIFO)"
    assert armed.trigger is not None
    armed.trigger.close()
    assert arm(kernel(tmp_path), {"MEMORY_PRESSURE_WATCH": "/dev/null"}, "linux") is None


@pytest.mark.parametrize(
    ("watch", "data", "why"),
    [
        ("gone", "", "No such file or directory"),
        ("fifo", "!!", "$MEMORY_PRESSURE_WRITE is not base64"),
        (".", "", "is no pressure file, FIFO or socket"),
    ],
)
def test_what_systemd_named_wrongly_is_refused_and_the_next_is_armed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: str, data: str, why: str
) -> None:
    refuse(monkeypatch)
    os.mkfifo(tmp_path / "fifo")
    environ = {"MEMORY_PRESSURE_WATCH": str(tmp_path / watch), "MEMORY_PRESSURE_WRITE": data}
    armed = arm(kernel(tmp_path), environ, "linux")
    assert armed is not None
    assert armed.name.endswith("memory.pressure trigger")
    assert armed.refused == (f"$MEMORY_PRESSURE_WATCH: {why}",)


def test_what_systemd_wants_written_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path, bytes]] = []

    class Trigger:
        name = "x"

        def __init__(self, path: Path, data: bytes) -> None:
            seen.append((path, data))

    monkeypatch.setattr(sensors, "PsiTrigger", Trigger)
    path = write(tmp_path / "memory.pressure", CALM)
    named(path, base64.b64encode(b"some 200000 2000000\0").decode())
    named(path)
    assert seen == [(path, b"some 200000 2000000\0"), (path, b"some 150000 2000000\0")]


# -- triggers that fire ---------------------------------------------------------------------------------------------


async def test_a_fifo_fires_whatever_is_written_and_outlives_its_writers(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    trigger = named(tmp_path / "fifo")
    try:
        for data in (b"x", b"y" * 10_000):
            writer = os.open(tmp_path / "fifo", os.O_WRONLY | os.O_NONBLOCK)
            os.write(writer, data)
            os.close(writer)
            with trio.fail_after(5):
                assert await trigger.wait()
            with trio.move_on_after(0.01) as nothing_more:
                await trigger.wait()
            assert nothing_more.cancelled_caught
    finally:
        trigger.close()


async def test_a_socket_is_written_to_fires_and_can_be_lost(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        trigger = named(tmp_path / "socket", base64.b64encode(b"hello").decode())
        assert isinstance(trigger, Told)
        with listener.accept()[0] as peer:
            assert peer.recv(10) == b"hello"
            peer.send(b"!")
            with trio.fail_after(5):
                assert await trigger.wait()
        with trio.fail_after(5), pytest.raises(SourceLost, match="was closed at the other end"):
            await trigger.wait()
        trigger.close()


def test_a_socket_that_nobody_listens_on_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
    with pytest.raises(ConnectionRefusedError):
        named(tmp_path / "socket")


def test_a_file_that_is_no_pressure_file_cannot_be_armed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Operation not permitted"):
        PsiTrigger(write(tmp_path / "plain", CALM))


class Urgent:
    """A pair of sockets of which one has urgent data, as a pressure file with a trigger has; the kernel's own cannot be
    made to fire at will."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            self.near = socket.create_connection(listener.getsockname())
            self.far, _ = listener.accept()
        real_open, near = os.open, self.near

        def fake_open(path: object, flags: int, *rest: int) -> int:
            return os.dup(near.fileno()) if str(path).endswith("urgent") else real_open(path, flags, *rest)  # type: ignore[call-overload, no-any-return]

        monkeypatch.setattr(sensors.os, "open", fake_open)

    def fire(self) -> None:
        self.far.send(b"!", socket.MSG_OOB)

    def close(self) -> None:
        self.near.close()
        self.far.close()


async def test_a_pressure_trigger_waits_for_urgent_data_and_growth_confirms_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "urgent", text(0.0, 0.0, 100))
    urgent = Urgent(monkeypatch)
    trigger = PsiTrigger(path)
    try:
        assert urgent.far.recv(100) == b"some 150000 2000000\0"
        with trio.move_on_after(0.01) as quiet:
            await trigger.wait()
        assert quiet.cancelled_caught
        urgent.fire()
        with trio.fail_after(5):
            assert not await trigger.wait(), "nothing has stalled since it was armed"
        write(path, text(9.0, 0.0, 200))
        urgent.fire()
        with trio.fail_after(5):
            assert await trigger.wait()
        urgent.fire()
        with trio.fail_after(5):
            assert not await trigger.wait(), "nothing since the last one"
    finally:
        trigger.close()
        urgent.close()


async def test_a_pressure_trigger_whose_group_is_removed_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "urgent", CALM)
    urgent = Urgent(monkeypatch)
    trigger = PsiTrigger(path)
    try:
        urgent.far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        urgent.far.close()  # a reset: the descriptor reports an error, as the kernel's does when a group is removed
        with trio.fail_after(5), pytest.raises(SourceLost, match="has gone"):
            await trigger.wait()
    finally:
        trigger.close()
        urgent.close()

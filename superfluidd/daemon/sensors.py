"""What tells of memory pressure: the kernel's figures, and file descriptors that become readable because of it.

Triggers are tried in this order, and the first that can be armed is used (source: the specification, "Memory pressure";
systemd's "Memory Pressure Handling" for the environment variables; the kernel's accounting/psi for triggers): what
``$MEMORY_PRESSURE_WATCH`` names, the process's own control group, the whole machine. Where there is none, figures are
asked for each second: the kernel's pressure averages, macOS's own level, or the share of memory that is available.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import errno
import os
import select
import socket
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec
import trio

from superfluidd.engine.memory import available_share
from superfluidd.scheduling.pressure import Reading

STALLED, WINDOW = 150_000, 2_000_000
"""Microseconds: a trigger fires when some task has stalled for so long in a window. Whoever is not root may only have
windows of whole two seconds."""

TRIGGER = f"some {STALLED} {WINDOW}\0".encode()

SYSCTL = "kern.memorystatus_vm_pressure_level"

DRAIN = 4096


class SourceLost(Exception):
    """A trigger that will not fire any more."""


class Trigger(Protocol):
    """Something that says so when memory is short.

    Attributes:
        name: for people.
    """

    name: str

    async def wait(self) -> bool:
        """Return when it has fired; False if it was a false alarm. Raises :class:`SourceLost`."""

    def close(self) -> None:
        """Give it up."""


class Armed(msgspec.Struct, frozen=True):
    """What was found to listen to.

    Attributes:
        trigger: fires by itself; None where figures must be asked for.
        figures: ask for figures; None in them is what is not measured here.
        name: what is armed, for people; ``refused``: what was tried before it, and why it is not used.
    """

    trigger: Trigger | None
    figures: Callable[[float], Reading]
    name: str
    refused: tuple[str, ...] = ()


def arm(root: Path = Path("/"), environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Armed | None:
    """The best source there is; None if the service manager wants memory not to be watched.

    Args:
        root: where ``proc`` and ``sys`` are.
        environ: for systemd's two variables.
        platform: as in ``sys.platform``.
    """
    if platform == "darwin":
        return Armed(None, Sysctl(), f"polling {SYSCTL}")
    refused: list[str] = []
    group = control_group(root)
    watch = environ.get("MEMORY_PRESSURE_WATCH", "")
    if watch == "/dev/null":
        return None
    averages = [path for path in (group, root / "proc/pressure/memory") if path is not None]
    candidates: list[tuple[str, Callable[[], Trigger]]] = []
    if watch:
        data = environ.get("MEMORY_PRESSURE_WRITE", "")
        candidates.append(("$MEMORY_PRESSURE_WATCH", lambda: named(Path(watch), data)))
    for path in averages:
        candidates.append((f"{path} trigger", lambda path=path: PsiTrigger(path)))  # type: ignore[misc]
    figures, kind = _figures(averages, root)
    for name, make in candidates:
        try:
            trigger = make()
        except OSError as error:
            refused.append(f"{name}: {error.strerror or error}")
            continue
        return Armed(trigger, figures, trigger.name, tuple(refused))
    return Armed(None, figures, f"polling {kind}", tuple(refused))


def control_group(root: Path) -> Path | None:
    """The ``memory.pressure`` file of the process's own control group, version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::"):
            group = PurePosixPath(line[3:].lstrip("/"))
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):  # the second where version 1 is mounted, too
                path = root / mount / group / "memory.pressure"
                if ".." not in group.parts and path.is_file():
                    return path
    return None


def _figures(averages: list[Path], root: Path) -> tuple[Callable[[float], Reading], str]:
    for path in averages:
        if parse(_read(path)) is not None:
            return Averages(path), str(path)
    return lambda now: Reading(now, available=available_share(root)), "available memory"


class Psi(msgspec.Struct, frozen=True):
    """A pressure file: percent of the last ten seconds for ``some`` and ``full``, and microseconds stalled ever."""

    some: float
    full: float
    total: int


def parse(text: str) -> Psi | None:
    """A pressure file's text; None if it is not one."""
    lines: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        lines[kind] = dict(pair.split("=", 1) for pair in rest.split() if "=" in pair)
    try:
        some = lines["some"]
        full = lines.get("full", {"avg10": "0"})
        return Psi(float(some["avg10"]), float(full["avg10"]), int(some["total"]))
    except (KeyError, ValueError):
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


class Averages:
    """Figures from a pressure file.

    A file that goes on saying that tasks stall while the time they have stalled for does not grow is not believed: its
    reading stays as old as it is, until it is stale.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._psi: Psi | None = None
        self._since = 0.0

    def __call__(self, now: float) -> Reading:
        """The present figures."""
        psi = parse(_read(self._path))
        if psi is None:
            return Reading(now)
        if psi != self._psi or not psi.some:
            self._psi, self._since = psi, now
        return Reading(self._since, some=psi.some, full=psi.full)


class PsiTrigger:
    """A trigger of the kernel's on a pressure file.

    The first event of a trigger can be false, since the kernel may count what stalled before it was armed; and so every
    event must be confirmed by growth of the file's total.

    Raises:
        OSError: it cannot be armed.
    """

    def __init__(self, path: Path, data: bytes = TRIGGER) -> None:
        self.name = f"{path} trigger"
        self._path = path
        self._total = self._stalled()
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(self._fd, data)
            # Trio waits for readable descriptors, and this one has urgent data; a second epoll stands for it.
            self._epoll = select.epoll()
            try:
                self._epoll.register(self._fd, select.EPOLLPRI)
            except OSError:
                self._epoll.close()
                raise
        except OSError:
            os.close(self._fd)
            raise

    def _stalled(self) -> int:
        psi = parse(_read(self._path))
        return 0 if psi is None else psi.total

    async def wait(self) -> bool:
        """Return when some task has stalled for long enough."""
        await trio.lowlevel.wait_readable(self._epoll.fileno())
        # Asking whether there is an event takes it, so nothing may be found here after all; the wake-up was one.
        if any(events & select.EPOLLERR for _, events in self._epoll.poll(0)):
            raise SourceLost(f"{self._path} has gone")
        before, self._total = self._total, self._stalled()
        return self._total > before

    def close(self) -> None:
        """Disarm it."""
        self._epoll.close()
        os.close(self._fd)


def named(path: Path, data: str = "") -> Trigger:
    """The trigger that systemd's variables describe: a pressure file, a FIFO or a Unix socket.

    Args:
        path: ``$MEMORY_PRESSURE_WATCH``; ``data``: ``$MEMORY_PRESSURE_WRITE``, base64.

    Raises:
        OSError: it cannot be armed.
    """
    try:
        written = base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise OSError(errno.EINVAL, "$MEMORY_PRESSURE_WRITE is not base64") from error
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return PsiTrigger(path, written or TRIGGER)
    if stat.S_ISFIFO(mode):
        # Open for writing, too: there is always a writer then, and no end of file when one goes away. That is also why
        # nothing is written to it: it would come back.
        return Told(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC), f"{path} (FIFO)")
    if stat.S_ISSOCK(mode):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(str(path))
            if written:
                sock.send(written)
        except OSError:
            sock.close()
            raise
        return Told(sock.detach(), f"{path} (socket)")
    raise OSError(errno.EINVAL, "is no pressure file, FIFO or socket")


class Told:
    """A FIFO or socket through which somebody else tells of pressure; what is written does not matter."""

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self._fd = fd

    async def wait(self) -> bool:
        """Return when something was written."""
        await trio.lowlevel.wait_readable(self._fd)
        self._drain()
        return True

    def _drain(self) -> None:
        try:
            while os.read(self._fd, DRAIN):
                pass
        except BlockingIOError:
            return
        except OSError as error:
            raise SourceLost(f"{self.name}: {error.strerror}") from error
        raise SourceLost(f"{self.name} was closed at the other end")

    def close(self) -> None:
        """Stop listening."""
        os.close(self._fd)


def sysctl_level() -> int | None:
    """macOS's own level: 1, 2 or 4; None if it cannot be read."""
    try:
        call = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError):
        return None
    value, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed: int = call(SYSCTL.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.value


class Sysctl:
    """Figures from macOS."""

    def __init__(self, read: Callable[[], int | None] = sysctl_level) -> None:
        self._read_level = read

    def __call__(self, now: float) -> Reading:
        """The present level."""
        return Reading(now, kernel=self._read_level())

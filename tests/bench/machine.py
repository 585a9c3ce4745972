"""What the machine does during a measurement: CPU seconds by who spent them, memory, and a busy neighbour on demand."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

MAX_FOREIGN = 0.12
"""Cores that processes outside the measurement may take before it is void: two compute threads meet at a barrier per
operation, so a small neighbour costs far more than its share."""


class Window(msgspec.Struct, frozen=True):
    """One measured stretch of time.

    Attributes:
        wall: seconds.
        cpu: CPU seconds by group.
        foreign: cores taken by everything that is in no group, steal included.
    """

    wall: float
    cpu: dict[str, float]
    foreign: float

    @property
    def void(self) -> bool:
        """Somebody else was busy; the figures say nothing."""
        return self.foreign >= MAX_FOREIGN


class Meter:
    """Measures from its creation to :meth:`stop`. The running process itself is counted as group ``client``."""

    def __init__(self, groups: Mapping[str, Sequence[psutil.Process]]) -> None:
        self._groups = {"client": [psutil.Process()], **groups}
        self._before = {name: cpu_seconds(processes) for name, processes in self._groups.items()}
        self._busy = busy_seconds()
        self._started = time.monotonic()

    def stop(self) -> Window:
        """The window so far."""
        wall = time.monotonic() - self._started
        busy = busy_seconds() - self._busy
        cpu = {name: cpu_seconds(found) - self._before[name] for name, found in self._groups.items()}
        return Window(wall, cpu, foreign_cores(busy, cpu, wall))


def foreign_cores(busy: float, cpu: Mapping[str, float], wall: float) -> float:
    """Cores used outside the groups.

    Args:
        busy: CPU seconds that the whole machine spent.
        cpu: CPU seconds by group.
        wall: seconds.
    """
    # The kernel counts both in ticks of 10 ms, so a small negative difference is noise.
    return max(0.0, (busy - sum(cpu.values())) / wall) if wall > 0 else 0.0


def busy_seconds() -> float:
    """CPU seconds that the machine has spent since it started."""
    times = psutil.cpu_times()
    fields = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(float(getattr(times, field, 0.0)) for field in fields)


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds of some processes; one that has ended counts nothing."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def rss_bytes(processes: Sequence[psutil.Process]) -> int:
    """Resident bytes of some processes."""
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


@contextmanager
def busy_neighbour() -> Iterator[psutil.Process]:
    """A process that would keep one core busy for itself, and watches that we are still there to stop it."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))\n"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def describe() -> dict[str, str]:
    """The machine, for the record."""
    model = platform.processor() or "unknown"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": str(os.cpu_count()),
        "memory_gb": f"{psutil.virtual_memory().total / 1e9:.0f}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }

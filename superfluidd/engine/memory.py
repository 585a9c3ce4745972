"""How much memory there is for models: the machine's, or less where a control group allows less."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

import psutil


def available_memory(root: Path = Path("/"), system: Callable[[], int] | None = None) -> int:
    """Bytes that can be used without swapping, the kernel's own reclaimable caches included.

    Args:
        root: where ``proc`` and ``sys`` are.
        system: what the machine has, without regard to control groups; by default psutil's answer.
    """
    machine = psutil.virtual_memory().available if system is None else system()
    limit = control_group_headroom(root)
    return machine if limit is None else min(machine, limit)


def available_share(root: Path = Path("/"), machine: Callable[[], tuple[int, int]] | None = None) -> float:
    """The share of the memory that can be used without swapping: of the machine's, or of a control group's limit.

    Args:
        root: where ``proc`` and ``sys`` are.
        machine: bytes available and in all, without regard to control groups; by default psutil's answer.
    """
    if machine is None:
        memory = psutil.virtual_memory()
        available, total = memory.available, memory.total
    else:
        available, total = machine()
    limits = [(headroom, limit) for headroom, limit in _control_groups(root) if limit < total]
    return min(part / whole for part, whole in [(available, total), *limits] if whole)


def total_memory(root: Path = Path("/")) -> int:
    """The machine's memory, or the smallest limit of this process's control groups, bytes."""
    machine: int = psutil.virtual_memory().total
    return min([machine, *(limit for _, limit in _control_groups(root))])


def control_group_headroom(root: Path) -> int | None:
    """Bytes this process's control groups still allow; None where nothing limits it."""
    return min((headroom for headroom, _ in _control_groups(root)), default=None)


def _control_groups(root: Path) -> list[tuple[int, int]]:
    """Headroom and limit, bytes, of every control group with a limit that this process is in.

    Limits hold for all that is below them, so every group up to the root counts. Inside a container the path in
    ``/proc/self/cgroup`` may be the host's; the groups that can be seen from here are then the ones above it.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    found: list[tuple[int, int]] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            files = ("memory.max", "memory.current", "inactive_file")
            top = mount
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = mount / "memory"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        if ".." in group.parts:
            group = PurePosixPath()
        for level in (group, *group.parents):
            group_found = _headroom(top / level, *files)
            if group_found is not None:
                found.append(group_found)
    return found


def _headroom(group: Path, limit_file: str, usage_file: str, cache: str) -> tuple[int, int] | None:
    try:
        # "max" means no limit; the first version writes a number no machine reaches.
        limit = int((group / limit_file).read_text())
        usage = int((group / usage_file).read_text())
    except (OSError, ValueError):
        return None
    return max(0, limit - usage + _statistic(group / "memory.stat", cache)), limit


def _statistic(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0

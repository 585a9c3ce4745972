"""Control-group limits, read from a tree of files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from superfluidd.engine.memory import available_memory, control_group_headroom

MIB = 1 << 20


def tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, content in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def second(group: str, limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    top = f"sys/fs/cgroup/{group}".rstrip("/")
    return {
        f"{top}/memory.max": f"{limit}\n",
        f"{top}/memory.current": f"{usage}\n",
        f"{top}/memory.stat": f"anon 5\ninactive_file {cache}\n",
    }


def first(group: str, limit: int, usage: int, cache: int = 0) -> dict[str, str]:
    top = f"sys/fs/cgroup/memory/{group}".rstrip("/")
    return {
        f"{top}/memory.limit_in_bytes": f"{limit}\n",
        f"{top}/memory.usage_in_bytes": f"{usage}\n",
        f"{top}/memory.stat": f"inactive_file 7\ntotal_inactive_file {cache}\n",
    }


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    assert control_group_headroom(tmp_path) is None
    assert available_memory(tmp_path, lambda: 5 * MIB) == 5 * MIB


def test_the_smaller_one_counts(tmp_path: Path) -> None:
    tree(tmp_path, "0::/app\n", second("app", str(100 * MIB), 30 * MIB))
    assert available_memory(tmp_path, lambda: 90 * MIB) == 70 * MIB
    assert available_memory(tmp_path, lambda: 50 * MIB) == 50 * MIB


def test_cache_that_can_be_dropped_is_available(tmp_path: Path) -> None:
    tree(tmp_path, "0::/app\n", second("app", str(100 * MIB), 90 * MIB, 40 * MIB))
    assert control_group_headroom(tmp_path) == 50 * MIB


def test_every_group_above_counts(tmp_path: Path) -> None:
    files = {**second("a/b", "max", 10), **second("a", str(20 * MIB), 5 * MIB), **second("", str(99 * MIB), 0)}
    tree(tmp_path, "0::/a/b\n", files)
    assert control_group_headroom(tmp_path) == 15 * MIB


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert control_group_headroom(tree(tmp_path, "0::/a\n", second("a", "max", 10))) is None


def test_over_the_limit_nothing_is_left(tmp_path: Path) -> None:
    assert control_group_headroom(tree(tmp_path, "0::/a\n", second("a", "100", 300))) == 0


def test_the_first_version_beside_other_controllers(tmp_path: Path) -> None:
    cgroup = "5:cpu,cpuacct:/x\n4:memory:/app\n0::/\n"
    tree(tmp_path, cgroup, first("app", 64 * MIB, 20 * MIB, 4 * MIB))
    assert control_group_headroom(tmp_path) == 48 * MIB


@pytest.mark.parametrize("cgroup", ["4:memory:/docker/0123\n", "4:memory:/../outside\n"])
def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path, cgroup: str) -> None:
    tree(tmp_path, cgroup, first("", 64 * MIB, 20 * MIB))
    assert control_group_headroom(tmp_path) == 44 * MIB


def test_files_that_make_no_sense_are_ignored(tmp_path: Path) -> None:
    tree(tmp_path, "nonsense\n0::/a\n", {**second("a", "many", 10), "sys/fs/cgroup/memory.max": ""})
    assert control_group_headroom(tmp_path) is None


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total

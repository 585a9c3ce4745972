"""Who may import whom: each package is imported in a fresh interpreter, and what that loaded is looked at.

The table in docs/architecture.md in executable form. A row fails with the reason for the rule.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[1]

ASYNC = ("trio", "asyncio", "quart", "quart_trio", "hypercorn")
NATIVE = ("llama_cpp", "numpy", "mlx")
EDGES = ("superfluidd.http", "superfluidd.control.server", "superfluidd.daemon")


class Row(msgspec.Struct, frozen=True):
    """What importing ``modules`` must not load, and why.

    Attributes:
        forbidden: names of modules; a name stands for everything below it too.
        ours: where given, the only modules of this project that may be loaded beside ``modules`` and their packages.
    """

    modules: tuple[str, ...]
    forbidden: tuple[str, ...]
    why: str
    ours: tuple[str, ...] | None = None


ROWS = (
    Row(
        ("superfluidd.types", "superfluidd.errors"),
        (*ASYNC, *NATIVE, "psutil"),
        "everybody imports these, so they import nobody",
        ours=(),
    ),
    Row(
        ("superfluidd.config",),
        (*ASYNC, *NATIVE, "psutil"),
        "the command line must answer --help and refuse a wrong flag at once",
        ours=(
            "superfluidd.errors",
            "superfluidd.types",
            "superfluidd.scheduling",
            "superfluidd.scheduling.policy",
            "superfluidd.scheduling.qos",
        ),
    ),
    Row(
        ("superfluidd.scheduling", "superfluidd.scheduling.scheduler"),
        (*ASYNC, *NATIVE, "psutil", "socket", "subprocess", "superfluidd.engine", *EDGES),
        "policy is a pure function of its arguments: time and memory come in, plans go out",
    ),
    Row(
        ("superfluidd.simulate.world", "superfluidd.simulate.trace", "superfluidd.simulate.report"),
        (*ASYNC, *NATIVE, "matplotlib", "psutil", "socket", *EDGES),
        "a simulation is the scheduler and a loop around it; a picture is drawn where one is asked for",
    ),
    Row(
        ("superfluidd.engine.port", "superfluidd.engine.wire", "superfluidd.engine.framing"),
        (*ASYNC, *NATIVE, "psutil", *EDGES),
        "both ends of the link share these, and neither may be dragged to the other's side",
    ),
    Row(
        ("superfluidd.engine.worker",),
        (*ASYNC, *NATIVE, "jinja2", *EDGES),
        "the worker is a plain blocking loop; its runtime, and the library under it, is loaded on demand only",
    ),
    Row(
        ("superfluidd.engine.client",),
        (*NATIVE, "superfluidd.engine.runtimes", "superfluidd.engine.executor", *EDGES),
        "the daemon's side of the link knows messages, not engines",
    ),
    Row(
        ("superfluidd.text.assembler", "superfluidd.text.stops", "superfluidd.text.template", "superfluidd.text.utf8"),
        ("trio", "quart", "hypercorn", *NATIVE, "superfluidd.scheduling", *EDGES),
        "text is made of pure state machines that tests drive without an event loop",
    ),
    Row(
        ("superfluidd.daemon.main", "superfluidd.http.app", "superfluidd.control.server"),
        (*NATIVE, "superfluidd.engine.runtimes", "superfluidd.engine.worker", "sfctl"),
        "a fault in native code must end a worker, never the daemon",
    ),
    Row(
        ("superfluidd.daemon.model", "superfluidd.daemon.service", "superfluidd.daemon.streams"),
        (*NATIVE, "quart", "quart_trio", "hypercorn", "superfluidd.http", "superfluidd.control.server"),
        "the edges call the daemon's core; it knows neither of them",
    ),
    Row(
        ("superfluidd.control.server", "superfluidd.control.listener"),
        ("quart", "quart_trio", "hypercorn", "superfluidd.http", "sfctl"),
        "the control plane must work whatever becomes of HTTP",
    ),
    Row(
        ("superfluidd.control.protocol",),
        (*ASYNC, *NATIVE, "psutil", "socket"),
        "the protocol is shared with sfctl and does no I/O",
        ours=("superfluidd.types",),
    ),
    Row(
        ("sfctl.__main__",),
        (*ASYNC, *NATIVE, "psutil", "jinja2", "prometheus_client", "logging", "subprocess", "tempfile"),
        "sfctl must start in a tenth of a second, also on a machine that is in trouble",
        ours=("superfluidd.control.protocol", "superfluidd.control.paths", "superfluidd.control.peer", "sfctl"),
    ),
    Row(
        ("superfluidd.cli",),
        (
            *ASYNC,
            *NATIVE,
            "psutil",
            "matplotlib",
            "superfluidd.daemon",
            "superfluidd.http",
            "superfluidd.simulate.world",
        ),
        "--help, --version and usage errors answer before anything heavy is loaded",
    ),
)


def loaded_by(modules: Sequence[str]) -> set[str]:
    """Names of all modules that a fresh interpreter has loaded after importing these."""
    code = f"import sys\nfor name in {list(modules)!r}: __import__(name)\nprint(*sys.modules, sep='\\n')"
    path = os.pathsep.join((str(ROOT), str(ROOT / "ctl")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def below(name: str, packages: Sequence[str]) -> bool:
    """Whether a module is one of these or inside one of them."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def packages_of(module: str) -> set[str]:
    """The module and the packages it lies in."""
    parts = module.split(".")
    return {".".join(parts[: count + 1]) for count in range(len(parts))}


@pytest.mark.process
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.modules[0])
def test_importing_it_does_not_load(row: Row) -> None:
    loaded = loaded_by(row.modules)
    bare = loaded_by(())
    wrong = sorted(name for name in loaded - bare if below(name, row.forbidden))
    assert not wrong, f"importing {', '.join(row.modules)} loads {', '.join(wrong)}; but {row.why}"
    if row.ours is not None:
        allowed = set().union(*(packages_of(module) for module in (*row.modules, *row.ours)))
        foreign = sorted(
            name
            for name in loaded
            if below(name, ("superfluidd", "sfctl")) and name not in allowed and not below(name, row.ours)
        )
        assert not foreign, f"importing {', '.join(row.modules)} loads {', '.join(foreign)}; but {row.why}"


@pytest.mark.process
def test_what_is_loaded_is_seen() -> None:
    assert {"superfluidd.daemon.main", "trio", "quart_trio"} <= loaded_by(["superfluidd.daemon.main"])


PURE = {
    *("__future__", "array", "bisect", "collections", "collections.abc", "dataclasses", "enum", "functools", "hashlib"),
    "heapq",
    *("itertools", "math", "operator", "types", "typing", "msgspec"),
    *("superfluidd.types", "superfluidd.errors"),
}
"""What the scheduler's source may import besides itself: nothing that knows the time, the machine or chance."""


def imports(source: str) -> set[str]:
    """Modules named in import statements anywhere in a source."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "superfluidd/scheduling").glob("*.py")), ids=lambda path: path.stem)
def test_scheduling_knows_no_clock_no_machine_and_no_chance(path: Path) -> None:
    # sys.modules cannot show this one: msgspec itself loads datetime, and every interpreter loads time.
    wrong = {
        name for name in imports(path.read_text()) if name not in PURE and not below(name, ["superfluidd.scheduling"])
    }
    assert not wrong, f"{path.name} imports {', '.join(sorted(wrong))}; but a plan must be a function of its arguments"


def test_scheduling_has_no_coroutines() -> None:
    for path in sorted((ROOT / "superfluidd/scheduling").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith), (
                f"{path.name}:{node.lineno} is asynchronous; at an await the state changes under the planner"
            )

"""Make sure llama-cpp-python is installed, compiling llama.cpp at most once per machine and saying so while it does.

Run by the Makefile with the environment's own Python, before the project is installed. PyPI has llama-cpp-python as
source only, and a silent eight minutes looks like a hang, so pip's output is read here and shown as progress. The wheel
is kept in a cache of ours: pip's own is thrown away with ``pip cache purge``, differs between pip versions and does not
know that the wheel was compiled for one CPU.

Only the standard library: nothing is installed yet when this runs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "packaging" / "constraints.txt"
DISTRIBUTION = "llama-cpp-python"
REPORT_EVERY = 30.0
"""Seconds between progress lines where there is no terminal to redraw."""

LOG_TAIL = 40
"""Lines of the build log shown after a failure."""

_STEP = re.compile(r"^\s*\[\s*(\d+)/(\d+)\]")

_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"No CMAKE_C(XX)?_COMPILER|CMAKE_C(XX)?_COMPILER.*(not set|NOTFOUND)|not able to compile a simple test program",
        "There is no working C/C++ compiler. Debian: apt-get install build-essential. macOS: xcode-select --install.",
    ),
    (r"No space left on device", "The disk is full: the build needs about 2 GB in the temporary folder (TMPDIR)."),
    (
        r"Killed signal terminated program|out of memory|Cannot allocate memory",
        "The compiler ran out of memory. Try again with fewer jobs: CMAKE_BUILD_PARALLEL_LEVEL=1 make serve.",
    ),
    (
        r"name resolution|Network is unreachable|Connection refused|Read timed out|ConnectTimeout|"
        r"No matching distribution found|Could not fetch URL",
        "The package index could not be reached. Check the network or pip's index settings, then run make again.",
    ),
)
_UNKNOWN_CAUSE = (
    "If the log above does not say why: it needs a C++17 compiler (Debian: apt-get install build-essential; "
    "macOS: xcode-select --install). CMake and Ninja are fetched by pip."
)


class Progress:
    """What a build's output says about how far it is. Time is an argument.

    Attributes:
        done: compile steps finished.
        total: compile steps in all; 0 until the compiler has started.
        compiling: the source is being built, so no ready wheel was found.
    """

    def __init__(self, started: float) -> None:
        self.done = 0
        self.total = 0
        self.compiling = False
        self._started = started
        self._first_step = started
        self._reported = started

    def feed(self, line: str, now: float) -> bool:
        """Take one line of output; true if it counted a step."""
        if "Building wheel for llama" in line:
            self.compiling = True
        match = _STEP.match(line)
        if match is None or int(match[2]) == 0:
            return False
        if not self.total:
            self._first_step = now
        self.compiling = True
        self.done, self.total = int(match[1]), int(match[2])
        return True

    def due(self, now: float, every: float = REPORT_EVERY) -> bool:
        """Whether a line should be printed now; counts it as printed."""
        if now - self._reported < every:
            return False
        self._reported = now
        return True

    def text(self, now: float) -> str:
        """Steps, time so far and, once that means something, a guess at the rest."""
        words = f"{self.done} of {self.total} steps, {duration(now - self._started)}"
        share = self.done / self.total if self.total else 0.0
        if 0.1 <= share < 1.0:
            words += f", about {duration((now - self._first_step) * (1 - share) / share)} left"
        return words

    def bar(self, now: float, width: int = 30) -> str:
        """The same for a terminal line that is drawn over."""
        filled = width * self.done // self.total if self.total else 0
        return f"[{'#' * filled}{'.' * (width - filled)}] {self.text(now)}"


def duration(seconds: float) -> str:
    """``95`` as ``1 min 35 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def pinned_version(pyproject: str) -> str:
    """The one version that the text of pyproject.toml asks for.

    Raises:
        ValueError: it does not pin llama-cpp-python exactly.
    """
    for requirement in tomllib.loads(pyproject)["project"]["dependencies"]:
        name, _, version = str(requirement).partition("==")
        if name.strip() == DISTRIBUTION and version:
            return version.strip()
    raise ValueError(f"pyproject.toml does not pin {DISTRIBUTION} with ==")


def cpu_features(cpuinfo: str) -> list[str]:
    """Instruction-set flags of the first processor in the text of /proc/cpuinfo, sorted."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(set(value.split()))
    return []


def read_cpu() -> list[str]:
    """This machine's instruction-set flags, or what identifies its CPU where there are none to read."""
    try:
        return cpu_features(Path("/proc/cpuinfo").read_text())
    except OSError:
        names = ["machdep.cpu.brand_string", "machdep.cpu.features", "machdep.cpu.leaf7_features", "hw.optional"]
        found = subprocess.run(["sysctl", *names], capture_output=True, text=True, check=False)
        return sorted(set(found.stdout.split()))


def cache_key(version: str, system: str, machine: str, features: Iterable[str]) -> str:
    """Folder name of a wheel: it was compiled for these instructions and may crash without one of them."""
    digest = hashlib.sha256(" ".join(sorted(set(features))).encode()).hexdigest()
    return f"{version}-{system.lower()}-{machine}-{digest[:12]}"


def cache_root(environ: dict[str, str]) -> Path:
    """Where our wheels are kept."""
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or str(Path.home()), ".cache")
    return Path(base) / "superfluidd" / "wheels"


def cached_wheel(folder: Path) -> Path | None:
    """The wheel in a cache folder, if one was kept."""
    return next(iter(sorted(folder.glob("llama_cpp_python-*.whl"))), None)


def decide(installed: str | None, loads: bool, wanted: str, cached: Path | None) -> Literal["keep", "install", "build"]:
    """What to do.

    Args:
        installed: version in this environment, if any.
        loads: the installed one can be loaded on this machine.
        wanted: the pinned version.
        cached: a wheel kept for this CPU.
    """
    if installed == wanted and loads:
        return "keep"
    return "install" if cached is not None else "build"


def cause(log: str) -> str:
    """What to do about a failed build, from its log."""
    for pattern, advice in _CAUSES:
        if re.search(pattern, log, re.IGNORECASE):
            return advice
    return _UNKNOWN_CAUSE


def installed_version() -> str | None:
    """The version in this environment."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def loads() -> bool:
    """Whether the installed library starts; a child tries it, because a wrong CPU ends the process."""
    code = "import llama_cpp; llama_cpp.llama_backend_init(); llama_cpp.llama_print_system_info()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def install(wheel: Path) -> None:
    """Install a wheel and what it needs.

    Raises:
        subprocess.CalledProcessError: pip failed; it has said why.
    """
    command = [sys.executable, "-m", "pip", "install", "-q", "--force-reinstall", "-c", str(CONSTRAINTS), str(wheel)]
    subprocess.run(command, check=True)


def build(version: str, folder: Path, *, pip_cache: bool, say: Callable[[str], None]) -> tuple[Path | None, bool]:
    """Have pip make the wheel, or find it in pip's own cache, and keep it.

    Args:
        version: what to build.
        folder: where the wheel and the log go.
        pip_cache: pip may use a wheel that it kept itself.
        say: prints a line.

    Returns:
        The wheel, or None after a failure that has been explained; and whether anything was compiled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / "build.log"
    started = time.monotonic()
    progress = Progress(started)
    tail: deque[str] = deque(maxlen=2000)
    announced = False
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--progress-bar", "off", "-w", scratch]
        command += ([] if pip_cache else ["--no-cache-dir"]) + [f"{DISTRIBUTION}=={version}"]
        say(f"getting {DISTRIBUTION} {version} (a wheel kept by pip, or 77 MB of source)")
        # Unasked, scikit-build-core falls back to make, which prints no step counts and uses one core.
        environ = {**os.environ, "SKBUILD_NINJA_MAKE_FALLBACK": "0"}
        with (
            log_path.open("w") as log,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environ
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                tail.append(line)
                now = time.monotonic()
                stepped = progress.feed(line, now)
                if progress.compiling and not announced:
                    announced = True
                    say("compiling llama.cpp for this machine: done once, 7-8 minutes on two cores")
                if stepped:
                    _show(progress, now, say)
        if sys.stdout.isatty() and progress.total:
            print()
        elapsed = duration(time.monotonic() - started)
        built = cached_wheel(Path(scratch))
        if process.returncode or built is None:
            text = "".join(tail)
            say(f"building {DISTRIBUTION} failed after {elapsed}; the end of {log_path}:")
            print("".join(f"    {line[:300].rstrip()}\n" for line in list(tail)[-LOG_TAIL:]), end="")
            say(cause(text))
            return None, progress.compiling
        wheel = folder / built.name
        os.replace(built, wheel)
    say(f"{'compiled' if progress.compiling else 'ready'} in {elapsed}; kept as {wheel}")
    return wheel, progress.compiling


def _show(progress: Progress, now: float, say: Callable[[str], None]) -> None:
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print("\r" + progress.bar(now)[:width].ljust(width), end="", flush=True)
    elif progress.due(now):
        say(progress.text(now))


def _say(text: str) -> None:
    print(f"engine: {text}", flush=True)


def main(argv: list[str]) -> int:
    """Make sure the engine is there; 0 if it is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=Path, default=None, help="folder of kept wheels")
    args = parser.parse_args(argv)
    version = pinned_version((ROOT / "pyproject.toml").read_text())
    root = args.cache or cache_root(dict(os.environ))
    folder = root / cache_key(version, platform.system(), platform.machine(), read_cpu())
    installed, kept = installed_version(), cached_wheel(folder)
    choice = decide(installed, installed == version and loads(), version, kept)
    if choice == "keep":
        return 0
    if choice == "install":
        assert kept is not None
        _say(f"installing {kept}")
        install(kept)
        if loads():
            return 0
        _say("the kept wheel does not load here; building again")
    for pip_cache in (True, False):
        wheel, compiled = build(version, folder, pip_cache=pip_cache, say=_say)
        if wheel is None:
            return 1
        install(wheel)
        if loads():
            return 0
        wheel.unlink()
        if compiled:
            break
        _say("the wheel that pip had kept does not load here; building again")
    _say(f"the library was built but does not load; the log is {folder / 'build.log'}, and this shows the error:")
    _say(f"{sys.executable} -c 'import llama_cpp'")
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        _say("interrupted; nothing was kept. Run make again to go on")
        sys.exit(130)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)

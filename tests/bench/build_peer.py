"""Build llama-server from the llama.cpp source inside the llama-cpp-python sdist that our engine is built from.

So both sides run the same llama.cpp. It is a tool of the benchmarks and never a dependency. ``make bench-peer`` runs
this; it takes about 8 minutes on two cores, once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

from tests.bench.harness import peer_version
from tests.bench.prepare_model import ROOT, WORK

FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
PIP = (sys.executable, "-m", "pip")
CONSTRAINTS = ROOT / "packaging" / "constraints.txt"


def pinned() -> str:
    """``llama-cpp-python==VERSION`` as pyproject.toml asks for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(str(one) for one in project["dependencies"] if str(one).startswith("llama-cpp-python=="))


def download(folder: Path) -> Path:
    """The sdist, from the package index."""
    folder.mkdir(parents=True, exist_ok=True)
    requirement = pinned()
    wanted = f"llama_cpp_python-{requirement.partition('==')[2]}.tar.gz"
    if not (folder / wanted).exists():
        command = [*PIP, "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(folder)]
        subprocess.run([*command, requirement], check=True)
    return folder / wanted


def extract(sdist: Path, folder: Path) -> Path:
    """The llama.cpp source tree of an sdist.

    Raises:
        SystemExit: it has none where it should be.
    """
    root = folder / sdist.name.removesuffix(".tar.gz")
    source = root / "vendor" / "llama.cpp"
    if not (source / "CMakeLists.txt").exists():
        print(f"extracting {sdist.name}", flush=True)
        with tarfile.open(sdist) as archive:
            # Python 3.11 has filters only from 3.11.4 on.
            if hasattr(tarfile, "data_filter"):
                archive.extractall(folder, filter="data")
            else:
                archive.extractall(folder)
    if not (source / "CMakeLists.txt").exists():
        sys.exit(f"{sdist} has no vendor/llama.cpp")
    return source


def tool(name: str) -> str:
    """A build tool's path: the machine's, or else one from the package index."""
    found = shutil.which(name)
    if found is None:
        subprocess.run([*PIP, "install", "-q", "-c", str(CONSTRAINTS), name], check=True)
        found = str(Path(sys.executable).parent / name)
    return found


def build(source: Path, folder: Path, jobs: int) -> Path:
    """Configure and build; returns the program."""
    cmake, ninja = tool("cmake"), tool("ninja")
    environ = {**os.environ, "CMAKE_MAKE_PROGRAM": ninja}
    configure = [cmake, "-S", str(source), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *FLAGS]
    subprocess.run(configure, check=True, env=environ, stdout=subprocess.DEVNULL)
    compile_it = [cmake, "--build", str(folder), "--target", "llama-server", "-j", str(jobs)]
    subprocess.run(compile_it, check=True, env=environ)
    return folder / "bin" / "llama-server"


def main() -> None:
    """Build it, unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sdist", type=Path, help="a llama-cpp-python sdist at hand (default: downloaded)")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once (default: %(default)s)")
    args = parser.parse_args()
    sdist = args.sdist or download(WORK / "src")
    source = extract(sdist, WORK / "src")
    started = time.monotonic()
    print("building llama-server: about 8 minutes on two cores, once", flush=True)
    try:
        program = build(source, WORK / "peer", args.jobs)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{Path(error.cmd[0]).name} failed with code {error.returncode}; its messages are above")
    print(f"built in {time.monotonic() - started:.0f} s: {program}, {peer_version(program)}")


if __name__ == "__main__":
    main()

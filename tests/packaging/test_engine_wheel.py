"""The pure parts of packaging/engine_wheel.py: reading progress, naming the cache, deciding, explaining failures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load() -> ModuleType:
    # By path: `import packaging` means the library of that name.
    spec = importlib.util.spec_from_file_location("engine_wheel", ROOT / "packaging" / "engine_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine_wheel"] = module
    spec.loader.exec_module(module)
    return module


engine_wheel = _load()


def test_progress_counts_ninja_steps_and_ignores_other_lines() -> None:
    progress = engine_wheel.Progress(100.0)
    assert not progress.feed("  -- Detecting CXX compiler ABI info\n", 101.0)
    assert not progress.feed("Collecting llama-cpp-python==0.3.36\n", 101.0)
    assert not progress.feed("  see [1/2] in the middle of a line\n", 101.0)
    assert not progress.compiling
    assert progress.feed("  [57/193] /usr/bin/g++ -DGGML_BUILD [1/2]\n", 130.0)
    assert (progress.done, progress.total, progress.compiling) == (57, 193, True)


def test_a_wheel_from_pips_cache_is_not_announced_as_a_build() -> None:
    progress = engine_wheel.Progress(0.0)
    for line in ("Collecting llama-cpp-python==0.3.36", "  Using cached llama_cpp_python-0.3.36-py3-none-any.whl"):
        progress.feed(line, 1.0)
    assert not progress.compiling
    progress.feed("  Building wheel for llama-cpp-python (pyproject.toml): started", 2.0)
    assert progress.compiling
    assert progress.total == 0


def test_progress_guesses_the_rest_from_the_first_step_on() -> None:
    progress = engine_wheel.Progress(0.0)
    progress.feed("[1/200] cc", 60.0)
    assert progress.text(60.0) == "1 of 200 steps, 1 min 00 s"
    progress.feed("[50/200] cc", 160.0)
    assert progress.text(160.0) == "50 of 200 steps, 2 min 40 s, about 5 min 00 s left"
    progress.feed("[200/200] cc", 460.0)
    assert progress.text(460.0) == "200 of 200 steps, 7 min 40 s"


def test_progress_is_reported_sparingly() -> None:
    progress = engine_wheel.Progress(0.0)
    due = [second for second in range(121) if progress.due(float(second), 30.0)]
    assert due == [30, 60, 90, 120]


def test_the_bar_is_full_only_at_the_end() -> None:
    progress = engine_wheel.Progress(0.0)
    assert progress.bar(0.0, 10).startswith("[..........]")
    progress.feed("[199/200] cc", 1.0)
    assert progress.bar(1.0, 10).startswith("[#########.]")
    progress.feed("[200/200] cc", 1.0)
    assert progress.bar(1.0, 10).startswith("[##########]")


def test_cpu_features_come_from_the_first_processor() -> None:
    x86 = "processor\t: 0\nflags\t\t: sse4_2 avx2 fma avx2\nbugs\t\t: spectre_v1\n\nprocessor\t: 1\nflags\t\t: other\n"
    assert engine_wheel.cpu_features(x86) == ["avx2", "fma", "sse4_2"]
    assert engine_wheel.cpu_features("processor\t: 0\nFeatures\t: fp asimd dotprod\n") == ["asimd", "dotprod", "fp"]
    assert engine_wheel.cpu_features("processor : 0\n") == []


def test_the_key_names_version_and_machine_and_changes_with_the_cpu() -> None:
    def key(*features: str) -> str:
        return str(engine_wheel.cache_key("1.2", "Linux", "x86_64", features))

    assert key("avx2", "fma").startswith("1.2-linux-x86_64-")
    assert key("avx2", "fma") == key("fma", "avx2", "fma")
    assert key("avx2", "fma") != key("avx2", "fma", "avx512f")


def test_cache_root_follows_xdg() -> None:
    assert engine_wheel.cache_root({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/superfluidd/wheels")
    assert engine_wheel.cache_root({"XDG_CACHE_HOME": "", "HOME": "/h"}) == Path("/h/.cache/superfluidd/wheels")


def test_only_the_wheel_counts_as_cached(tmp_path: Path) -> None:
    assert engine_wheel.cached_wheel(tmp_path / "absent") is None
    (tmp_path / "build.log").write_text("")
    assert engine_wheel.cached_wheel(tmp_path) is None
    wheel = tmp_path / "llama_cpp_python-0.3.36-py3-none-linux_x86_64.whl"
    wheel.write_bytes(b"")
    assert engine_wheel.cached_wheel(tmp_path) == wheel


@pytest.mark.parametrize(
    "installed, loads, cached, expected",
    [
        ("2", True, None, "keep"),
        ("2", True, Path("w"), "keep"),
        ("2", False, None, "build"),
        ("2", False, Path("w"), "install"),
        ("1", True, Path("w"), "install"),
        (None, False, None, "build"),
        (None, False, Path("w"), "install"),
    ],
)
def test_decide(installed: str | None, loads: bool, cached: Path | None, expected: str) -> None:
    assert engine_wheel.decide(installed, loads, "2", cached) == expected


def test_the_pin_is_read_from_pyproject() -> None:
    text = '[project]\ndependencies = ["trio>=0.30,<1", "llama-cpp-python==0.3.36"]\n'
    assert engine_wheel.pinned_version(text) == "0.3.36"
    with pytest.raises(ValueError) as caught:
        engine_wheel.pinned_version('[project]\ndependencies = ["llama-cpp-python>=0.3"]\n')
    assert "does not pin" in str(caught.value)


def test_the_constraints_agree_with_the_pin() -> None:
    version = engine_wheel.pinned_version((ROOT / "pyproject.toml").read_text())
    assert f"llama-cpp-python=={version}" in engine_wheel.CONSTRAINTS.read_text().splitlines()


@pytest.mark.parametrize(
    "log, advice",
    [
        ("CMake Error: CMAKE_CXX_COMPILER not set, after EnableLanguage", "build-essential"),
        ("  No CMAKE_CXX_COMPILER could be found.", "xcode-select --install"),
        ("fatal error: error writing to /tmp/x.s: No space left on device", "disk is full"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "CMAKE_BUILD_PARALLEL_LEVEL=1"),
        ("ERROR: No matching distribution found for llama-cpp-python==0.3.36", "package index"),
        ("something nobody has seen", "C++17 compiler"),
    ],
)
def test_a_failed_build_says_what_to_do(log: str, advice: str) -> None:
    assert advice in engine_wheel.cause(log)

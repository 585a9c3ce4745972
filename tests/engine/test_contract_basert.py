"""The contract on baseRT, against a stand-in library that is compiled here from the same C declarations."""

from __future__ import annotations

import ctypes
import ctypes.util
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from superfluidd.engine.client import LoadRefused, WorkerEngine, worker_starter
from superfluidd.engine.port import Feed, LoadFailed, OutOfCells, Runtime, StepFailed
from superfluidd.engine.runtimes import basert
from superfluidd.engine.runtimes.basert import BasertRuntime
from superfluidd.engine.runtimes.basert_library import NAMES, Library, find
from superfluidd.engine.wire import LoadSpec
from tests.engine import basert_toy, contract
from tests.engine.contract import Driver, Local


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled stand-in."""
    return basert_toy.compiled(tmp_path_factory.mktemp("basert"))


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return basert_toy.bundle(tmp_path_factory.mktemp("model") / "toy.base")


@pytest.fixture
def spec(standin: Path, bundle: Path) -> LoadSpec:
    return LoadSpec("basert", str(bundle), 4, 256, "shared", 1024, spare=2, library=str(standin))


@pytest.fixture
def runtime(spec: LoadSpec) -> Iterator[BasertRuntime]:
    loaded = BasertRuntime(spec, lambda share: None)
    yield loaded
    loaded.close()
    loaded.close()


def native(runtime: BasertRuntime) -> Any:
    """The stand-in's own functions."""
    return runtime._library._native


class TestInProcess(contract.Contract):
    @pytest.fixture
    async def driver(self, runtime: Runtime) -> Driver:
        return Local(runtime)


class TestFaults(contract.FaultContract):
    @pytest.fixture
    async def broken(self, runtime: Runtime) -> Driver:
        return Local(contract.Faulty(runtime, 1))


@pytest.mark.process
class TestWorker(contract.Contract):
    slow = False

    @pytest.fixture
    async def driver(self, spec: LoadSpec, nursery: trio.Nursery) -> AsyncIterator[Driver]:
        engine = await worker_starter(spec)(nursery, lambda: None, lambda share: None)
        assert isinstance(engine, WorkerEngine), engine
        yield contract.Remote(engine)
        await engine.close(5.0)


def test_what_it_says_about_itself(runtime: BasertRuntime) -> None:
    info = runtime.info
    assert (info.runtime, info.version, info.architecture, info.layout) == ("basert", "0.1.6", "toy", "shared")
    assert (info.lanes, info.sequences, info.window, info.cells) == (4, 6, 256, 1024 - 6 * 15)
    assert not info.round_granular, "native: a tick finishes"
    assert not info.saves
    assert (info.bos, info.eos, info.end_tokens) == (257, 258, (256, 258))
    assert (info.bytes_per_cell, info.weights_bytes) == (2 * 2 * 32 * 2, 3 << 20)
    assert info.chat_template.startswith("{% for message")


def test_text(runtime: BasertRuntime) -> None:
    pieces = runtime.pieces()
    for text in ("Hello, world!", "Zürich 日本 😀", "", "<|im_start|>", "<|im_start|><|im_end|>x<|im_", "[INST] <b>"):
        tokens = runtime.tokenize(text, add_bos=False, parse_special=False)
        assert b"".join(pieces[token] for token in tokens).decode() == text
    assert runtime.tokenize("<|im_start|>a", add_bos=False, parse_special=True) == [257, 97]
    assert runtime.tokenize("a", add_bos=True, parse_special=False) == [257, 97]
    with pytest.raises(StepFailed, match="zero byte"):
        runtime.tokenize("a\0b", add_bos=False, parse_special=False)


def feed(runtime: BasertRuntime, sequence: int, tokens: list[int]) -> None:
    runtime.step([Feed(sequence, runtime.length(sequence), tokens, True)])


def logits(runtime: BasertRuntime, sequence: int, token: int) -> bytes:
    feed(runtime, sequence, [token])
    assert runtime._logits is not None
    return runtime._logits.tobytes()


LONG = [65 + index % 26 for index in range(100)]


def test_cuts_and_copies_begin_from_blocks_and_feed_only_what_is_left(runtime: BasertRuntime) -> None:
    feed(runtime, 0, LONG)
    before = runtime.computed()
    runtime.copy(0, 1, 70)
    assert runtime.cut(0, 50)
    assert (runtime.length(0), runtime.length(1)) == (50, 70)
    assert runtime.computed() - before == 70 % 16 + 50 % 16
    feed(runtime, 2, LONG[:70])
    feed(runtime, 3, LONG[:50])
    assert logits(runtime, 1, 7) == logits(runtime, 2, 7)
    assert logits(runtime, 0, 7) == logits(runtime, 3, 7)
    assert not runtime.cut(0, 99), "nothing can be lengthened"
    with pytest.raises(StepFailed, match="cannot be copied"):
        runtime.copy(1, 4, 90)
    state = runtime.export(2)
    runtime.free(2)
    runtime.restore(2, state, 71)
    assert logits(runtime, 2, 9) == logits(runtime, 1, 9)
    for bad in (b"", b"\xc1", state[:-2]):
        with pytest.raises(StepFailed):
            runtime.restore(4, bad, 5)
    with pytest.raises(StepFailed, match="72 tokens are wanted of 71"):
        runtime.restore(4, state, 72)


def test_what_the_engine_has_given_away_is_not_fed_again_in_one_go(runtime: BasertRuntime) -> None:
    feed(runtime, 0, LONG)
    state = runtime.export(0)
    runtime.free(0)
    native(runtime).baseRT_prefix_evict(ctypes.c_void_p(runtime._model), 1000)
    with pytest.raises(StepFailed, match="only 0 of 100 tokens are cached"):
        runtime.restore(0, state, 100)
    assert runtime.length(0) == 0
    assert native(runtime).standin_blocks(ctypes.c_void_p(runtime._model)) == 0


def test_a_full_pool_gives_up_cached_prefixes_first(spec: LoadSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_BLOCKS", "10")
    runtime = BasertRuntime(spec, lambda share: None)
    feed(runtime, 0, LONG)
    runtime.export(0)
    runtime.free(0)
    feed(runtime, 1, LONG[::-1])
    with pytest.raises(OutOfCells, match="the pool is full"):
        feed(runtime, 2, LONG)
    assert runtime.length(2) == 0
    assert runtime.length(1) == 100
    feed(runtime, 2, LONG[:40])
    runtime.close()


@pytest.mark.parametrize("code", [6, 8])
def test_a_call_that_fails_half_way_leaves_every_sequence_as_it_was(runtime: BasertRuntime, code: int) -> None:
    feed(runtime, 0, LONG)
    feed(runtime, 1, LONG[:30])
    fork = {0: LONG, 1: LONG[:30]}
    for after in (0, 1, 2):
        feeds = [Feed(0, 100, [1], True), Feed(1, 30, [2, 3], True), Feed(2, 0, [4], True)]
        native(runtime).standin_fail(code, after)
        if code == 6:
            # There is nothing to evict that is not locked, so it is not tried again.
            native(runtime).baseRT_prefix_evict(ctypes.c_void_p(runtime._model), 1000)
        with pytest.raises(OutOfCells if code == 6 else StepFailed, match="it was told to fail"):
            runtime.step(feeds)
        assert [runtime.length(sequence) for sequence in (0, 1, 2)] == [100, 30, 0]
    for sequence, tokens in fork.items():
        feed(runtime, 3, tokens)
        assert logits(runtime, 3, 9) == logits(runtime, sequence, 9)
        runtime.free(3)


def test_texts_wait_for_a_step_instead_of_meeting_it(runtime: BasertRuntime) -> None:
    """The stand-in ends the process if two threads are in one handle."""
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            runtime.tokenize("some text to tokenize " * 20, add_bos=False, parse_special=False)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(200):
        runtime.free(0)
        feed(runtime, 0, LONG)
        runtime.copy(0, 1, 60)
        runtime.free(1)
    ended.set()
    reader.join(30)


def test_a_sliding_window_shares_only_whole_sequences(spec: LoadSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_WINDOW", "1")
    runtime = BasertRuntime(spec, lambda share: None)
    assert runtime.info.cut == "head"
    feed(runtime, 0, LONG)
    assert not runtime.cut(0, 50)
    with pytest.raises(StepFailed):
        runtime.copy(0, 1, 50)
    runtime.copy(0, 1, 100)
    assert logits(runtime, 1, 7) == logits(runtime, 0, 7)
    runtime.close()


# -- loading ------------------------------------------------------------------------------------------------------


def test_where_the_library_is_looked_for(tmp_path: Path) -> None:
    file = tmp_path / NAMES[0]
    file.touch()
    other = tmp_path / "other.so"
    other.touch()
    assert find(str(other), {"BASERT_LIB": str(file)}, []) == other
    assert find("", {"BASERT_LIB": str(other)}, [str(tmp_path)]) == other
    assert find("", {}, ["/nowhere", str(tmp_path)]) == file
    with pytest.raises(LoadFailed, match="libbaseRT is not in /nowhere; name it with --basert-lib or BASERT_LIB"):
        find("", {}, ["/nowhere"])
    for named, environ, who in (("/x.so", {}, "--basert-lib"), ("", {"BASERT_LIB": "/x.so"}, "BASERT_LIB")):
        with pytest.raises(LoadFailed, match=f"{who} names /x.so, where there is no file"):
            find(named, environ, [])


def test_a_library_that_does_not_fit_is_refused(
    spec: LoadSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage = tmp_path / "garbage.so"
    garbage.write_bytes(b"no library")
    with pytest.raises(LoadFailed, match="cannot be loaded"):
        Library(garbage)
    libc = next(
        Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line
    )
    with pytest.raises(LoadFailed, match=r"has no baseRT_version_string: it is no libbaseRT 0\.1"):
        Library(libc)
    monkeypatch.setenv("STANDIN_VERSION", "0.2.0")
    with pytest.raises(LoadFailed, match=r"is of version 0\.2\.0; this program speaks 0\.1\.x"):
        BasertRuntime(spec, lambda share: None)
    monkeypatch.setenv("STANDIN_VERSION", "0.1.9")
    monkeypatch.setenv("STANDIN_SMALL", "1")
    with pytest.raises(LoadFailed, match="a configuration has 8 bytes"):
        BasertRuntime(spec, lambda share: None)


def test_a_model_that_cannot_be_served_is_refused(
    spec: LoadSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LoadFailed, match="no such model"):
        BasertRuntime(replace(spec, path=str(tmp_path / "none")), lambda share: None)
    other = tmp_path / "other.base"
    other.write_bytes(b"GGUF")
    with pytest.raises(LoadFailed, match=r"this is no \.base bundle"):
        BasertRuntime(replace(spec, path=str(other)), lambda share: None)
    monkeypatch.setenv("STANDIN_UNSUPPORTED", "1")
    monkeypatch.setenv("STANDIN_ARCH", "bert")
    before = Library(Path(spec.library))._native.standin_models()
    with pytest.raises(LoadFailed, match="no batched step for architecture 'bert'"):
        BasertRuntime(spec, lambda share: None)
    assert Library(Path(spec.library))._native.standin_models() == before, "nothing is left loaded"
    assert basert.FEW > 16


@pytest.mark.process
async def test_without_the_library_the_worker_says_how_to_name_it(spec: LoadSpec, nursery: trio.Nursery) -> None:
    missing = replace(spec, library="/nowhere/libbaseRT.so")
    answer = await worker_starter(missing, log_level="critical")(nursery, lambda: None, lambda share: None)
    assert isinstance(answer, LoadRefused), answer
    assert "--basert-lib names /nowhere/libbaseRT.so" in answer.message

"""Artifacts on disk: written whole or not at all, believed only if everything fits."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from superfluidd.engine import parking
from superfluidd.engine.executor import Executor
from superfluidd.engine.parking import Damaged, Identity, Parked, Store, fingerprint, identity
from superfluidd.engine.runtimes.simulated import SimulatedRuntime
from superfluidd.scheduling.entries import key_of, pack
from superfluidd.scheduling.plan import Admit, Forget, Free, Park, Plan, Prefill, Recall
from superfluidd.types import SamplingParams
from tests.conftest import simulated_spec

KNOWN = Identity("model", "simulated", "1", "f16 shared")
TOKENS = pack(range(100))
KEY = key_of(TOKENS)
STATE = bytes(range(256)) * 40


class Shelf:
    """A store that writes at once, and what it told."""

    def __init__(self, directory: Path, known: Identity = KNOWN) -> None:
        self.told: list[tuple[str, int]] = []
        self.store = Store(directory, known, lambda key, size: self.told.append((key, size)), threaded=False)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path / "model")
    yield shelf
    shelf.store.close()


def artifact(shelf: Shelf, directory: Path) -> Path:
    shelf.store.seal(KEY, TOKENS, STATE)
    path = directory / "model" / f"{KEY}.kv"
    assert shelf.told == [(KEY, path.stat().st_size)]
    return path


def test_what_is_sealed_comes_back_in_another_process(shelf: Shelf, tmp_path: Path) -> None:
    path = artifact(shelf, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    shelf.store.close()
    again = Shelf(tmp_path / "model")
    assert again.store.scan() == (Parked(KEY, TOKENS, path.stat().st_size),)
    assert again.store.recall(KEY, 100) == STATE
    assert again.store.recall(KEY, 1) == STATE
    again.store.close()


def test_what_is_found_is_listed_longest_unused_first(shelf: Shelf, tmp_path: Path) -> None:
    keys = []
    for number in range(3):
        tokens = pack(range(number, number + 80))
        keys.append(key_of(tokens))
        shelf.store.seal(keys[-1], tokens, STATE)
        os.utime(tmp_path / "model" / f"{keys[-1]}.kv", (100 + number, 100 + number))
    assert [parked.key for parked in shelf.store.scan()] == keys
    shelf.store.recall(keys[0], 80)
    assert [parked.key for parked in shelf.store.scan()] == [keys[1], keys[2], keys[0]]


def test_a_flipped_byte_anywhere_is_never_a_state(shelf: Shelf, tmp_path: Path) -> None:
    whole = artifact(shelf, tmp_path).read_bytes()
    path = tmp_path / "model" / f"{KEY}.kv"
    places = [*range(420), len(whole) - len(STATE) - 1, len(whole) - len(STATE), len(whole) // 2, len(whole) - 1]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(Damaged):
            shelf.store.recall(KEY, 100)
        assert not path.exists(), "nobody is to try again"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: whole[:-1], "it is not whole"),
        (lambda whole: whole + b"x", "it is not whole"),
        (lambda whole: whole[:300], "it is not whole"),
        (lambda whole: whole[:20], "its manifest cannot be read"),
        (lambda whole: b"", "it is no parked KV of this version"),
        (lambda whole: b"SFPARK99" + whole[8:], "it is no parked KV of this version"),
        (lambda whole: whole[:12] + b"\xff" * 50 + whole[62:], "its manifest cannot be read"),
        (lambda whole: whole[:8] + b"\xff\xff\xff\xff" + whole[12:], "its manifest cannot be read"),
    ],
)
@pytest.mark.parametrize("when", ["scan", "recall"])
def test_a_damaged_artifact_is_removed_with_one_line(
    shelf: Shelf,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
    words: str,
    when: str,
) -> None:
    path = artifact(shelf, tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    if when == "scan":
        assert shelf.store.scan() == ()
    else:
        with pytest.raises(Damaged, match=words):
            shelf.store.recall(KEY, 100)
    [line] = caplog.messages
    assert line == f"{path}: {words}; removed, its tokens are computed again"
    assert not path.exists()


@pytest.mark.parametrize("field", ["model", "runtime", "version", "encoding"])
def test_what_something_else_computed_is_foreign(
    shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    artifact(shelf, tmp_path)
    shelf.store.close()
    other = Shelf(tmp_path / "model", msgspec.structs.replace(KNOWN, **{field: "other"}))
    assert other.store.scan() == ()
    assert len(caplog.messages) == 1
    assert "made by another model, runtime or version" in caplog.messages[0]
    other.store.close()


def test_an_artifact_under_another_name_is_not_believed(shelf: Shelf, tmp_path: Path) -> None:
    path = artifact(shelf, tmp_path)
    other = key_of(pack(range(5)))
    path.rename(path.with_name(f"{other}.kv"))
    with pytest.raises(Damaged, match="its name is not its key"):
        shelf.store.recall(other, 5)
    with pytest.raises(Damaged, match="No such file"):
        shelf.store.recall(KEY, 100)


def test_more_than_there_is_cannot_be_had(shelf: Shelf, tmp_path: Path) -> None:
    artifact(shelf, tmp_path)
    with pytest.raises(Damaged):
        shelf.store.recall(KEY, 101)


def test_what_was_being_written_when_the_worker_died_is_swept_up(shelf: Shelf, tmp_path: Path) -> None:
    path = artifact(shelf, tmp_path)
    (path.parent / "half.tmp").write_bytes(b"half")
    (path.parent / "README").write_text("not ours")
    assert len(shelf.store.scan()) == 1
    assert sorted(one.name for one in path.parent.iterdir()) == ["README", f"{KEY}.kv", "lock"]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "write":
        real = os.fdopen

        def full(fd: Any, mode: str = "r") -> Any:
            if mode != "wb":
                return real(fd, mode)
            os.close(fd)
            return open("/dev/full", "wb")

        monkeypatch.setattr(parking, "open", full, raising=False)
    else:
        monkeypatch.setattr(parking.os, call, fail)
    for _ in range(3):
        shelf.store.seal(KEY, TOKENS, STATE)
    assert shelf.told == [(KEY, 0)] * 3
    assert [name for name in os.listdir(tmp_path / "model") if name != "lock"] == []
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.endswith("KV cannot be parked: No space left on device; what leaves memory is computed again")
    monkeypatch.undo()
    shelf.store.seal(KEY, TOKENS, STATE)
    assert shelf.told[-1][1] > 0


def test_a_directory_is_one_processs(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError):
        Shelf(tmp_path / "model")
    shelf.store.close()
    Shelf(tmp_path / "model").store.close()


def test_what_is_still_being_written_can_be_had_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, entered = threading.Event(), threading.Event()
    real, told = os.fsync, list[tuple[str, int]]()

    def slow(fd: int) -> None:
        entered.set()
        assert go.wait(10)
        real(fd)

    monkeypatch.setattr(parking.os, "fsync", slow)
    store = Store(tmp_path / "model", KNOWN, lambda key, size: told.append((key, size)))
    other = pack(range(50))
    store.seal(KEY, TOKENS, STATE)
    store.seal(key_of(other), other, b"other")
    assert entered.wait(10)
    assert store.recall(KEY, 100) == STATE
    store.forget(KEY)
    go.set()
    store.close()
    assert [key for key, _ in told] == [key_of(other)], "nobody is told of what was forgotten"
    assert sorted(os.listdir(tmp_path / "model")) == sorted([f"{key_of(other)}.kv", "lock"])


def test_forgetting_what_is_not_there_is_no_fault(shelf: Shelf) -> None:
    shelf.store.forget(KEY)


def test_a_model_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(parking.BEGINNING) + bytes(parking.BEGINNING))
    first = fingerprint(path)
    assert fingerprint(path) == first
    with open(path, "r+b") as file:
        file.seek(parking.BEGINNING * 2 * 50 // parking.SAMPLES)
        file.write(b"x")
    changed = fingerprint(path)
    assert changed != first
    with open(path, "ab") as file:
        file.write(b"\0")
    assert fingerprint(path) not in (first, changed)
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "gone")


# -- through the executor -------------------------------------------------------------------------------------------


def run(executor: Executor, plan: Plan) -> Any:
    steps = executor.run(plan, lambda: False)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def seat(request: int, tokens: range, cached: int = 0) -> Admit:
    return Admit(request, 0, tuple(tokens), len(tokens), SamplingParams(temperature=0.0), cached)


def test_a_lane_goes_on_from_the_disk_and_says_the_same(tmp_path: Path) -> None:
    runtime = SimulatedRuntime(simulated_spec(lanes=2))
    shelf = Shelf(tmp_path / "model", identity(Path(), runtime.info))
    executor = Executor(runtime, store=shelf.store)
    tokens = range(40, 100)
    run(executor, Plan(1, admit=(seat(1, tokens),), prefill=(Prefill(1, 60),)))
    expected = executor._lanes[1].tokens[-1]
    packed = pack(tokens)
    run(executor, Plan(2, retire=(1,), kv=(Park(key_of(packed), packed, sequence=0), Free(0))))
    assert [key for key, size in shelf.told if size] == [key_of(packed)]
    plan = Plan(3, kv=(Recall(key_of(packed), 0, 59),), admit=(seat(2, tokens, 59),), prefill=(Prefill(2, 1),))
    assert run(executor, plan).emptied == ()
    assert executor._lanes[2].tokens[-1] == expected
    run(executor, Plan(4, retire=(2,), kv=(Free(0), Forget(key_of(packed)))))
    plan = Plan(5, kv=(Recall(key_of(packed), 0, 59),), admit=(seat(3, tokens, 59),), prefill=(Prefill(3, 1),))
    assert run(executor, plan).emptied == (0,), "its lane has to be fed everything"
    shelf.store.close()


def test_without_a_store_nothing_is_parked_and_nothing_breaks() -> None:
    executor = Executor(SimulatedRuntime(simulated_spec(lanes=2)))
    packed = pack([1])
    report = run(executor, Plan(1, kv=(Park("x", packed, sequence=0), Recall("x", 1, 1), Forget("x"))))
    assert report.emptied == (1,)


def test_an_export_that_fails_is_told(tmp_path: Path) -> None:
    runtime = SimulatedRuntime(simulated_spec(lanes=2))
    shelf = Shelf(tmp_path / "model", identity(Path(), runtime.info))
    executor = Executor(runtime, store=shelf.store)
    run(executor, Plan(1, kv=(Park("x", pack([1]), blob=77),)))
    assert shelf.told == [("x", 0)]
    shelf.store.close()

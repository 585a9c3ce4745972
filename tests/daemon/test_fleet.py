"""Models that are added while the daemon runs: by path, not by a name that nobody has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from superfluidd.config import Settings
from superfluidd.daemon.fleet import Fleet
from superfluidd.daemon.loading import examine
from superfluidd.errors import ModelFileError, UnknownModel, UsageError

SIMULATED = Settings(engine="simulated")


async def test_what_is_no_path_is_a_name_that_is_not_served(autojump_clock: MockClock) -> None:
    fleet = Fleet(Settings(), examine(SIMULATED))
    for name in ("nobody", "./here.gguf"):
        with pytest.raises(UnknownModel, match="is not served here; served: simulated"):
            await fleet.add(name)


async def test_nothing_is_added_while_the_daemon_starts(autojump_clock: MockClock) -> None:
    with pytest.raises(UsageError, match="try again when it is ready"):
        await Fleet(Settings(), examine(SIMULATED)).add("/models/one.gguf")


async def test_a_file_that_cannot_be_served_adds_nothing(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path
) -> None:
    fleet = Fleet(Settings(), examine(SIMULATED))
    fleet._engines = nursery
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    for name in ("none.gguf", "bad.gguf"):
        with pytest.raises(ModelFileError):
            await fleet.add(str(tmp_path / name))
    assert list(fleet.models) == ["simulated"]


async def test_a_file_that_is_served_already_is_that_model_however_its_path_is_written(
    autojump_clock: MockClock, nursery: trio.Nursery, tmp_path: Path, bundled_model: Path
) -> None:
    (tmp_path / "link.gguf").symlink_to(bundled_model)
    fleet = Fleet(Settings(), examine(Settings(models=(str(bundled_model),), max_context=512)))
    fleet._engines = nursery
    [served] = fleet.models.values()
    assert await fleet.add(str(tmp_path / "link.gguf")) is served
    assert await fleet.add(f"{bundled_model.parent}/../{bundled_model.parent.name}/{bundled_model.name}") is served
    other = tmp_path / bundled_model.name
    other.write_bytes(b"another file of that name")
    with pytest.raises(ModelFileError):
        await fleet.add(str(other))
    other.unlink()
    shutil.copy(bundled_model, other)
    with pytest.raises(UsageError, match="already; rename one of the files"):
        await fleet.add(str(other))


async def test_what_a_loading_model_was_promised_is_not_promised_again(
    autojump_clock: MockClock, nursery: trio.Nursery, bundled_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = examine(Settings(models=(str(bundled_model),), max_context=512))
    fleet = Fleet(Settings(), one)
    [served] = fleet.models.values()
    assert one[0].fit is not None
    promised = one[0].fit.weights_bytes + one[0].fit.kv_bytes
    asked: list[int] = []
    monkeypatch.setattr("superfluidd.daemon.fleet.examine_one", lambda *args: asked.append(args[2]))
    await fleet._examine("/models/other.gguf")
    served.state = "unloaded"
    await fleet._examine("/models/other.gguf")
    served.state = "loading"
    await fleet._examine(served.path)
    assert asked == [promised, 0, 0], "nobody is in their own way"

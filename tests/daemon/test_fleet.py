"""Models that are added while the daemon runs: by path, not by a name that nobody has."""

from __future__ import annotations

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

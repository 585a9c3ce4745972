"""What the options come to before a model is loaded: how host memory and disk are shared out, where KV is parked."""

from __future__ import annotations

from pathlib import Path

import pytest

from superfluidd.config import Settings
from superfluidd.daemon import loading
from superfluidd.errors import UsageError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("given", "free", "expected"),
    [
        (None, 8 * GIB, 2 * GIB),
        (1.0, 8 * GIB, GIB),
        (100.0, 10 * GIB, 6 * GIB),
        (0.0, 8 * GIB, 0),
        (None, -5, 0),
    ],
    ids=["a quarter of what is free", "as told", "never more than 60 %", "none", "nothing free"],
)
def test_host_memory(given: float | None, free: int, expected: int) -> None:
    assert loading.host_cache(Settings(host_cache_gb=given), free) == expected


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ("/srv/kv", {"STATE_DIRECTORY": "/var/lib/superfluidd"}, "/srv/kv"),
        (None, {"STATE_DIRECTORY": "/var/lib/superfluidd:/var/lib/other", "HOME": "/root"}, None),
        (None, {"XDG_STATE_HOME": "/home/ann/state", "HOME": "/home/ann"}, "/home/ann/state/superfluidd/parked"),
        (None, {"XDG_STATE_HOME": "relative", "HOME": "/home/ann"}, "/home/ann/.local/state/superfluidd/parked"),
        (None, {"HOME": "/home/ann"}, "/home/ann/.local/state/superfluidd/parked"),
    ],
)
def test_where_kv_is_parked(given: str | None, environ: dict[str, str], expected: str | None) -> None:
    found = loading.park_directory(Settings(park=True, park_dir=given), environ)
    assert found == Path(expected or "/var/lib/superfluidd/parked")


def test_nowhere_to_park_is_said() -> None:
    with pytest.raises(UsageError, match="give --park-dir"):
        loading.park_directory(Settings(park=True), {})


def test_every_model_has_its_own_directory_and_all_share_the_disk(tmp_path: Path) -> None:
    settings = Settings(
        engine="simulated", models=("org/one", "two"), park=True, park_dir=str(tmp_path), park_budget_gb=4.0
    )
    one, two = loading.examine(settings)
    assert (one.spec.park, two.spec.park) == (str(tmp_path / "org_one"), str(tmp_path / "two"))
    assert one.cache.park_bytes == two.cache.park_bytes == 4 * GIB


def test_nothing_is_parked_unless_told() -> None:
    [one] = loading.examine(Settings(engine="simulated"))
    assert one.spec.park == ""
    assert one.cache.park_bytes == 0

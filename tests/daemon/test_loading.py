"""What the options come to before a model is loaded: how host memory and disk are shared out, where KV is parked."""

from __future__ import annotations

from pathlib import Path

import pytest

from superfluidd.config import Settings
from superfluidd.daemon import loading
from superfluidd.engine import blas, memory
from superfluidd.errors import ModelFileError, UsageError
from tests.engine import gguf_writer, tiny_mlx

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


# -- which engine -------------------------------------------------------------------------------------------------


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A GGUF file and an MLX directory, on a machine with 16 GiB to spare."""
    monkeypatch.setattr(memory, "available_memory", lambda: 16 * GIB)
    file = gguf_writer.write(tmp_path / "one.gguf", gguf_writer.model())
    return str(file), str(tiny_mlx.write(tmp_path / "two.v1"))


def test_the_format_chooses_the_engine(both: tuple[str, str]) -> None:
    one, two = loading.examine(Settings(models=both, max_batch=3))
    assert (one.name, one.spec.runtime) == ("one", "llamacpp")
    assert (two.name, two.spec.runtime, two.spec.layout) == ("two.v1", "mlx", "per-sequence")
    assert (two.spec.window, two.spec.lanes, two.spec.spare) == (2048, 3, 2)
    assert two.spec.path == str(Path(both[1]).resolve())
    assert two.fit is not None
    assert (two.fit.cells, two.fit.bytes_per_cell) == (5 * 2048, 512)
    assert "F32, 3 lanes of 2048 tokens" in two.summary
    assert "engine     mlx" in loading.report(two)


@pytest.mark.parametrize(
    ("settings", "which", "words"),
    [
        ({"engine": "mlx"}, 0, "MLX serves directories; convert it with `superfluidd convert .*one.gguf DIR`"),
        ({"engine": "llamacpp"}, 1, "is a directory; give the path of the .gguf file"),
        ({"engine": "mlx", "kv_layout": "shared"}, 1, "MLX keeps KV per sequence; leave --pool-tokens and"),
        ({"pool_tokens": 4096}, 1, "MLX keeps KV per sequence"),
        ({"max_context": 4096}, 1, "was trained for 2048 tokens of context, but --max-context asks for 4096"),
    ],
)
def test_an_engine_that_cannot_serve_a_format_says_what_can(
    both: tuple[str, str], settings: dict[str, str | int], which: int, words: str
) -> None:
    with pytest.raises((ModelFileError, UsageError), match=words):
        loading.examine(Settings(models=(both[which],), **settings))  # type: ignore[arg-type]


def test_mlx_has_no_bundled_model_until_one_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="superfluidd convert - DIR"):
        loading.examine(Settings(engine="mlx"))
    with pytest.raises(ModelFileError, match="no such directory"):
        loading.examine(Settings(engine="mlx", models=(str(tmp_path / "none"),)))


def test_code_that_a_model_brings_must_be_trusted(both: tuple[str, str]) -> None:
    tiny_mlx.write(Path(both[1]), {"model_file": "mine.py"})
    with pytest.raises(ModelFileError, match="--trust-model-code"):
        loading.examine(Settings(models=both[1:]))
    [one] = loading.examine(Settings(models=both[1:], trust_model_code=True))
    assert one.spec.trust_code


@pytest.mark.parametrize(
    ("installed", "available", "dense"),
    [(True, 16 * GIB, True), (False, 16 * GIB, False), (True, 600_000, False)],
    ids=["a BLAS and room", "no BLAS", "no room"],
)
def test_quantized_weights_are_unpacked_where_that_is_faster_and_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool, available: int, dense: bool
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: available)
    monkeypatch.setattr(blas, "installed", lambda: installed)
    path = tiny_mlx.build(tmp_path / "q4", tiny_mlx.CONFIG, bits=4)
    [one] = loading.examine(Settings(models=(str(path),), max_batch=1, max_context=64))
    assert one.spec.dense == dense
    assert one.fit is not None
    arrays = tiny_mlx.weights()
    norms = 4 * sum(array.size for array in arrays.values() if array.ndim == 1)
    matrices = sum(array.size for array in arrays.values() if array.ndim == 2)
    # 4 bits a weight, and a scale and a bias of 4 bytes for 32 of them: 6 bits in all.
    assert one.fit.weights_bytes == norms + matrices * (4 if dense else 0.75)
    assert ("as float32" in one.summary) == dense


def test_a_model_that_does_not_fit_is_refused_with_the_sum(
    both: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 100_000)
    with pytest.raises(ModelFileError, match=r"two.v1 does not fit into memory: weights 0 MiB \+ KV .* MiB of 0 MiB"):
        loading.examine(Settings(models=both[1:]))

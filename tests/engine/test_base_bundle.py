"""``.base`` bundles: what they say, and every bad one with its own message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from superfluidd.config import Settings
from superfluidd.daemon import loading
from superfluidd.engine import memory
from superfluidd.engine.base_bundle import read_header
from superfluidd.engine.fitting import bytes_per_token
from superfluidd.errors import ModelFileError, UsageError
from tests.engine import basert_toy
from tests.engine.basert_toy import HEADER


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in HEADER.items() if name != key}


def with_config(**values: object) -> dict[str, Any]:
    return HEADER | {"config": HEADER["config"] | values}


def test_what_a_bundle_says(tmp_path: Path) -> None:
    header = read_header(basert_toy.bundle(tmp_path / "toy.base"))
    assert (header.architecture, header.quantization, header.context_length) == ("toy", "base_q4", 1024)
    assert (header.parameters, header.tensor_bytes, header.tensors) == (32, 100, 1)
    assert bytes_per_token(header) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("header", "options", "words"),
    [
        (HEADER, {"data": 99}, "is truncated: its tensors end at byte 65636 but the file has 65635 bytes"),
        (HEADER, {"version": 2}, "is a bundle of version 2; this program reads 1"),
        ([1], {}, "its header cannot be read"),
        (without("arch"), {}, "its header cannot be read"),
        (with_config(num_hidden_layers=None), {}, "does not say num_hidden_layers"),
        (with_config(hidden_size=-3), {}, "its hidden_size cannot be right"),
        (HEADER | {"metadata": {"lora.rank": 8}}, {}, "is an adapter and no model"),
    ],
)
def test_a_bad_bundle_is_refused_with_what_to_do(
    tmp_path: Path, header: object, options: dict[str, int], words: str
) -> None:
    with pytest.raises(ModelFileError, match=words):
        read_header(basert_toy.bundle(tmp_path / "bad.base", header, **options))


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.base"
    for content, words in (
        (b"GGUF", "is no .base bundle: it begins with b'GGUF'"),
        (b"", "is no .base bundle"),
        (b"BASE\x01\0\0\0", "is truncated"),
        (b"BASE\x01\0\0\0" + b"\xff" * 8, "is truncated"),
    ):
        file.write_bytes(content)
        with pytest.raises(ModelFileError, match=words):
            read_header(file)
    with pytest.raises(ModelFileError, match="no such file"):
        read_header(tmp_path / "none.base")
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_header(tmp_path)


def test_a_bundle_is_fitted_to_one_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 4 << 30)
    path = str(basert_toy.bundle(tmp_path / "toy.base"))
    [one] = loading.examine(Settings(models=(path,), max_batch=3, basert_lib="/lib/x.so"))
    spec = one.spec
    assert (one.name, spec.runtime, spec.layout, spec.window, spec.cells) == ("toy", "basert", "shared", 1024, 3072)
    assert spec.library == "/lib/x.so"
    assert "engine     basert" in loading.report(one)
    with pytest.raises(UsageError, match="baseRT keeps KV in one pool"):
        loading.examine(Settings(models=(path,), kv_layout="per-sequence"))
    with pytest.raises(UsageError, match="no MODEL was given"):
        loading.examine(Settings(engine="basert"))

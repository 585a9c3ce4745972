"""Windows from memory, in figures that can be checked by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluidd.engine.fitting import MIB, Fit, bytes_per_token, fit
from superfluidd.engine.gguf import GgufHeader
from superfluidd.errors import ModelFileError, UsageError

GIB = 1 << 30

# 16 layers of 2 KV heads, 64 + 64 elements, 2 bytes: 8 KiB a token.
HEADER = GgufHeader(
    path="m.gguf",
    file_bytes=GIB + MIB,
    version=3,
    architecture="llama",
    name="",
    context_length=32_768,
    block_count=16,
    embedding_length=1024,
    head_count=(16,) * 16,
    head_count_kv=(2,) * 16,
    key_length=64,
    value_length=64,
    sliding_window=0,
    recurrent=False,
    quantization="Q8_0",
    vocabulary=32_000,
    tokenizer_model="gpt2",
    tokenizer_pre="",
    chat_template="",
    parameters=GIB,
    tensor_bytes=GIB,
    tensors=100,
)
CELL = 8192


def fitted(header: GgufHeader = HEADER, **changed: Any) -> Fit:
    options: dict[str, Any] = {
        "lanes": 8,
        "max_context": None,
        "kv_layout": "auto",
        "pool_tokens": None,
        "available": 16 * GIB,
        "sharing": 1,
    }
    return fit(header, **{**options, **changed})


def like(**changed: Any) -> GgufHeader:
    return msgspec.structs.replace(HEADER, **changed)


def test_bytes_per_token_adds_up_layers() -> None:
    assert bytes_per_token(HEADER) == CELL
    assert bytes_per_token(like(head_count_kv=(0, 8, 1, 0), key_length=100, value_length=28)) == 9 * 128 * 2


@pytest.mark.parametrize(
    "available, window",
    [
        # 16 GiB: 0.6 * (16 - 1 - 2) GiB / 64 KiB = 127,795, more than was trained.
        (16 * GIB, 32_768),
        # 4 GiB: 0.6 * (4 - 1 - 0.5) GiB / 64 KiB = 24,576 exactly.
        (4 * GIB, 24_576),
        # 64 KiB less leaves 24,575.4: one step less.
        (4 * GIB - 65_536, 24_320),
        # 1,536 MiB leaves nothing beside weights and reserve, but the least window fits.
        (1536 * MIB, 512),
        (GIB + 32 * MIB, 512),
    ],
)
def test_an_automatic_window(available: int, window: int) -> None:
    made = fitted(available=available)
    assert (made.window, made.cells, made.layout) == (window, window * 8, "per-sequence")
    assert (made.bytes_per_cell, made.kv_bytes, made.weights_bytes) == (CELL, window * 8 * CELL, GIB)


def test_memory_that_does_not_even_hold_the_least_window_is_refused_with_the_sum() -> None:
    with pytest.raises(ModelFileError) as caught:
        fitted(available=GIB + 31 * MIB)
    message = caught.value.message
    assert "m.gguf" in message
    assert "weights 1024 MiB + KV 32 MiB (4096 cells of 8192 bytes) = 1056 MiB of 1055 MiB" in message
    assert "--max-batch" in message


def test_memory_that_does_not_hold_the_weights_asks_for_a_smaller_model() -> None:
    with pytest.raises(ModelFileError, match="smaller model"):
        fitted(available=GIB - MIB)
    with pytest.raises(ModelFileError, match=r"one of 2 parts of 2046 MiB.*fewer models"):
        fitted(available=2 * GIB - 2 * MIB, sharing=2)


def test_models_share_memory_equally() -> None:
    assert fitted(available=8 * GIB, sharing=2).window == fitted(available=4 * GIB).window == 24_576


def test_a_window_that_was_asked_for_needs_room_but_no_reserve() -> None:
    made = fitted(max_context=4096, available=GIB + 256 * MIB)
    assert (made.window, made.cells) == (4096, 32_768)
    with pytest.raises(ModelFileError, match="1280 MiB of 1279 MiB"):
        fitted(max_context=4096, available=GIB + 255 * MIB)


def test_a_window_longer_than_trained_is_refused_with_both_numbers() -> None:
    with pytest.raises(ModelFileError, match=r"32768.*32769"):
        fitted(max_context=32_769)
    assert fitted(max_context=32_768, lanes=1).window == 32_768


def test_a_short_trained_context_is_the_window() -> None:
    assert fitted(like(context_length=300)).window == 300
    assert fitted(like(context_length=300), available=GIB + 32 * MIB).window == 300


@pytest.mark.parametrize(
    "changed, kv_layout, layout",
    [
        ({}, "auto", "per-sequence"),
        ({}, "shared", "shared"),
        ({"sliding_window": 512}, "auto", "shared"),
        ({"recurrent": True}, "auto", "shared"),
        ({"sliding_window": 512}, "per-sequence", "per-sequence"),
    ],
)
def test_the_layout(changed: dict[str, Any], kv_layout: str, layout: str) -> None:
    made = fitted(like(**changed), kv_layout=kv_layout)
    assert made.layout == layout
    assert made.cells == made.window * 8


def test_a_pool_sets_the_cells_and_caps_the_window() -> None:
    made = fitted(kv_layout="shared", pool_tokens=1024, lanes=4)
    assert (made.window, made.cells, made.kv_bytes) == (1024, 1024, 1024 * CELL)
    assert "pool" in made.why
    made = fitted(kv_layout="shared", pool_tokens=1024, max_context=512)
    assert (made.window, made.cells) == (512, 1024)
    # A pool has its memory already: the window may be as long as the model can.
    made = fitted(kv_layout="shared", pool_tokens=100_000, available=2 * GIB)
    assert (made.window, made.cells) == (32_768, 100_000)


def test_asking_for_a_pool_is_asking_for_the_shared_layout() -> None:
    assert fitted(pool_tokens=1024).layout == "shared"
    with pytest.raises(UsageError, match="--kv-layout shared"):
        fitted(kv_layout="per-sequence", pool_tokens=1024)


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelFileError, match="--pool-tokens"):
        fitted(kv_layout="shared", pool_tokens=1_000_000, available=4 * GIB)


def test_a_model_without_attention_gets_all_it_was_trained_for() -> None:
    made = fitted(like(head_count_kv=(0,) * 16, recurrent=True), available=GIB + MIB)
    assert (made.window, made.kv_bytes, made.layout) == (32_768, 0, "shared")


@given(
    available=st.integers(0, 64 * GIB),
    lanes=st.integers(1, 256),
    sharing=st.integers(1, 4),
    max_context=st.none() | st.integers(64, 32_768),
    pool=st.none() | st.integers(64, 1 << 20),
)
def test_what_is_promised_fits(
    available: int, lanes: int, sharing: int, max_context: int | None, pool: int | None
) -> None:
    try:
        made = fitted(available=available, lanes=lanes, sharing=sharing, max_context=max_context, pool_tokens=pool)
    except ModelFileError:
        return
    assert made.weights_bytes + made.kv_bytes <= available // sharing
    assert made.kv_bytes == made.cells * CELL
    assert 64 <= made.window <= min(32_768, made.cells)
    if max_context is not None:
        assert made.window == min(max_context, made.cells)

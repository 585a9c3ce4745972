"""Model files: the right ones are read whole, each kind of wrong one has its own message."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from superfluidd.engine.gguf import read_header
from superfluidd.errors import ModelFileError
from tests.engine.gguf_writer import (
    ARRAY,
    BOOL,
    DATA,
    I32,
    LLAMA,
    STRING,
    TENSORS,
    U8,
    U16,
    U32,
    U64,
    Tensor,
    Value,
    head,
    model,
    string,
    write,
)


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert str(path) in caught.value.message
    assert caught.value.exit_code == 3
    return caught.value.message


def test_the_bundled_model(bundled_model: Path) -> None:
    header = read_header(bundled_model)
    assert header.architecture == "llama"
    assert header.quantization == "Q4_1"
    assert (header.context_length, header.block_count, header.embedding_length) == (8192, 30, 576)
    assert (header.head_count, header.head_count_kv) == ((9,) * 30, (3,) * 30)
    assert (header.key_length, header.value_length) == (64, 64)
    assert (header.sliding_window, header.recurrent) == (0, False)
    assert header.vocabulary == 49152
    assert header.parameters == 134_515_008
    assert header.file_bytes == bundled_model.stat().st_size
    assert 0 < header.file_bytes - header.tensor_bytes < 4_000_000
    assert "<|im_start|>" in header.chat_template


@pytest.mark.parametrize("version", [2, 3])
def test_a_small_model(tmp_path: Path, version: int) -> None:
    header = read_header(str(write(tmp_path / "m.gguf", model(version=version))))
    assert header.version == version
    assert (header.name, header.quantization, header.vocabulary) == ("Tiny", "Q4_K_M", 3)
    assert (header.head_count, header.head_count_kv) == ((8,) * 4, (2,) * 4)
    assert (header.key_length, header.value_length) == (32, 32)
    assert (header.tokenizer_model, header.tokenizer_pre) == ("gpt2", "tiny")
    assert header.chat_template == "{{ messages }}"
    assert (header.parameters, header.tensor_bytes, header.tensors) == (1124, 976, 2)


def test_what_differs_between_models(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": Value(STRING, "lfm2"),
        "general.alignment": Value(U32, 64),
        "lfm2.context_length": Value(U64, 128_000),
        "lfm2.block_count": Value(U32, 3),
        "lfm2.embedding_length": Value(U32, 64),
        "lfm2.vocab_size": Value(U32, 77),
        "lfm2.attention.head_count": Value(I32, [0, 4, 4]),
        # One entry more than layers.
        "lfm2.attention.head_count_kv": Value(U8, [0, 2, 0, 9]),
        "lfm2.attention.key_length": Value(U32, 80),
        "lfm2.attention.sliding_window": Value(U32, 512),
        "lfm2.attention.sliding_window_pattern": Value(BOOL, [True] * 3),
        "lfm2.shortconv.l_cache": Value(U32, 3),
    }
    tensors = (Tensor("a", (32, 2, 2), 8, 0), Tensor("b", (3,), 30, 192))
    header = read_header(write(tmp_path / "m.gguf", model(metadata, tensors, data=198, alignment=64)))
    assert (header.head_count, header.head_count_kv) == ((0, 4, 4), (0, 2, 0))
    assert (header.key_length, header.value_length) == (80, 16)
    assert (header.sliding_window, header.recurrent, header.vocabulary) == (512, True, 77)
    # No file type: the type that most bytes have.
    assert header.quantization == "Q8_0"
    assert (header.name, header.chat_template) == ("", "")
    assert (header.parameters, header.tensor_bytes) == (131, 142)


@pytest.mark.parametrize("architecture", ["mamba2", "rwkv7"])
def test_models_without_attention(tmp_path: Path, architecture: str) -> None:
    metadata = {
        "general.architecture": Value(STRING, architecture),
        f"{architecture}.context_length": Value(U32, 1024),
        f"{architecture}.block_count": Value(U32, 2),
        f"{architecture}.embedding_length": Value(U32, 64),
        f"{architecture}.attention.head_count": Value(U32, 0),
    }
    header = read_header(write(tmp_path / "m.gguf", model(metadata)))
    assert header.recurrent
    assert header.head_count_kv == (0, 0)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "missing.gguf")
    assert "is a directory" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "cannot be read" in refusal(loop)
    assert "cannot be read" in refusal(write(tmp_path / "f", b"x") / "below")


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", model())
    path.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        assert "permission denied" in refusal(path)
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", ["is empty"]),
        (b"GG", ["truncated", "2 bytes"]),
        (b"not a model", ["not a GGUF file", "b'not '"]),
        (struct.pack("<Q", 40) + b'{"__metadata__":{"format":"pt"}}' + bytes(40), ["not a GGUF file", "safetensors"]),
        (b"PK\x03\x04" + bytes(60), ["not a GGUF file", "PyTorch"]),
        (b"tjgg" + bytes(60), ["not a GGUF file", "GGJT"]),
        (b"lmgg" + bytes(60), ["not a GGUF file", "before GGUF"]),
        (b"version https://git-lfs.github.com/spec/v1\n", ["Git LFS", "git lfs pull"]),
        (b"<!DOCTYPE html><html>", ["web page"]),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), ["big-endian"]),
        (head(version=1), ["version 1", "convert"]),
        (head(version=9), ["version 9", "update"]),
        (b"GGUF\x03\0\0\0", ["truncated"]),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes, words: list[str]) -> None:
    message = refusal(write(tmp_path / "m.gguf", content))
    for word in words:
        assert word in message


def test_truncated_data_says_what_is_there_and_what_should_be(tmp_path: Path) -> None:
    content = model()
    message = refusal(write(tmp_path / "m.gguf", content[:-1]))
    assert "truncated" in message
    assert f"byte {len(content)} " in message
    assert f"{len(content) - 1} bytes" in message
    # Bytes after the last tensor are padding.
    read_header(write(tmp_path / "m.gguf", content + bytes(31)))


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    content = model()
    path = tmp_path / "m.gguf"
    for length in range(len(content) - DATA + 8):
        message = refusal(write(path, content[:length]))
        assert "truncated" in message or "is empty" in message


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"split.count": Value(U16, 5), "split.no": Value(U16, 0)}, ["part 1 of a model in 5 parts", "--merge"]),
        ({"split.count": Value(U16, 5), "split.no": Value(U16, 2)}, ["part 3 of a model in 5 parts"]),
        ({"general.type": Value(STRING, "adapter")}, ["'adapter'"]),
        ({"general.architecture": Value(STRING, "clip")}, ["'mmproj'"]),
        ({"general.architecture": Value(STRING, "")}, ["architecture"]),
        ({"general.architecture": Value(STRING, "other")}, ["does not say other.block_count"]),
        ({"general.architecture": Value(U32, 1)}, ["general.architecture cannot be right"]),
        ({"llama.context_length": Value(STRING, "x")}, ["does not say llama.context_length"]),
        ({"llama.context_length": Value(U32, 0)}, ["llama.context_length cannot be right"]),
        ({"llama.block_count": Value(U32, 1 << 31)}, ["llama.block_count cannot be right"]),
        ({"llama.attention.head_count_kv": Value(U32, [2, 2])}, ["head_count_kv cannot be right"]),
        ({"llama.attention.head_count_kv": Value(I32, [-1] * 4)}, ["head_count_kv cannot be right"]),
        ({"llama.attention.key_length": Value(I32, -5)}, ["key_length cannot be right"]),
        ({"general.alignment": Value(U32, 0)}, ["alignment of 0"]),
        ({"general.alignment": Value(U32, 48)}, ["alignment of 48"]),
    ],
)
def test_metadata_that_cannot_be_served(tmp_path: Path, changed: dict[str, Value], words: list[str]) -> None:
    message = refusal(write(tmp_path / "m.gguf", model({**LLAMA, **changed})))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "tensor, words",
    [
        (Tensor("t", (32,), 4, 0), ["type 4", "no longer knows"]),
        (Tensor("t", (32,), 99, 0), ["type 99", "update superfluidd"]),
        (Tensor("t", (33,), 2, 0), ["shape [33]"]),
        (Tensor("t", (32,), 2, 7), ["offset 7"]),
        (Tensor("t", (1 << 40, 1 << 40), 0, 0), ["damaged"]),
        (Tensor("t", (1, 1, 1, 1, 1), 0, 0), ["5 dimensions"]),
        (Tensor("t", (), 0, 0), ["0 dimensions"]),
        (Tensor("t", (1 << 40,), 0, 0), ["truncated"]),
    ],
)
def test_tensors_that_cannot_be(tmp_path: Path, tensor: Tensor, words: list[str]) -> None:
    message = refusal(write(tmp_path / "m.gguf", model(tensors=(*TENSORS, tensor))))
    for word in words:
        assert word in message


def test_a_vocabulary_is_no_model(tmp_path: Path) -> None:
    assert "only a vocabulary" in refusal(write(tmp_path / "m.gguf", model(tensors=())))


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    "content",
    [
        head(tensor_count=HUGE),
        head(value_count=HUGE),
        head(value_count=1 << 20),
        head({}, (), value_count=1) + struct.pack("<Q", HUGE),
        head({}, (), value_count=1) + string("k") + struct.pack("<IQ", STRING, HUGE),
        head({}, (), value_count=1) + string("k") + struct.pack("<IIQ", ARRAY, STRING, HUGE),
        head({}, (), value_count=1) + string("k") + struct.pack("<IIQ", ARRAY, U8, HUGE),
        head({}, (), value_count=1) + string("k") + struct.pack("<IIQ", ARRAY, U64, 1 << 61),
        head({}, (), value_count=1) + string("k") + struct.pack("<IIQIQ", ARRAY, ARRAY, 1, ARRAY, 1),
        head({}, (), value_count=1) + string("k") + struct.pack("<IQ", 77, 0),
        head({}, (), value_count=1) + string("general.name") + struct.pack("<IQ", STRING, 1 << 62),
    ],
    ids=range(11),
)
def test_lengths_that_lie_cost_nothing(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "m.gguf", content + bytes(1000))
    tracemalloc.start()
    try:
        refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_lengths_that_are_true_but_absurd_cost_nothing(tmp_path: Path) -> None:
    """A sparse file really has the bytes, so only the reader's own limits help."""
    for name, tail in {
        "key": struct.pack("<Q", 1 << 33),
        "name": string("general.name") + struct.pack("<IQ", STRING, 1 << 33),
        "strings": string("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 28),
    }.items():
        path = write(tmp_path / name, head({}, (), value_count=1) + tail)
        os.truncate(path, 1 << 34)
        assert "damaged or hostile" in refusal(path)


def test_large_arrays_are_not_kept(tmp_path: Path) -> None:
    metadata = {**LLAMA, "tokenizer.ggml.merges": Value(STRING, ["a b"] * 50_000), "x.y": Value(U32, [1] * 100_000)}
    path = write(tmp_path / "m.gguf", model(metadata))
    tracemalloc.start()
    try:
        read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.integers(0, len(model()) - 1), st.binary(min_size=1, max_size=12))
def test_a_damaged_header_is_read_or_refused_but_nothing_else(tmp_path: Path, at: int, noise: bytes) -> None:
    content = bytearray(model())
    content[at : at + len(noise)] = noise
    try:
        read_header(write(tmp_path / "m.gguf", bytes(content)))
    except ModelFileError:
        pass

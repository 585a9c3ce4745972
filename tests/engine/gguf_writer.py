"""Writes small GGUF files, right ones and wrong ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

U8, U16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 5, 6, 7, 8, 9, 10
FORMATS = {U8: "<B", U16: "<H", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}


class Value(NamedTuple):
    """A typed metadata value; a sequence makes it an array of that type."""

    kind: int
    value: object


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


LLAMA: dict[str, Value] = {
    "general.architecture": Value(STRING, "llama"),
    "general.name": Value(STRING, "Tiny"),
    "general.file_type": Value(U32, 15),
    "llama.context_length": Value(U32, 4096),
    "llama.block_count": Value(U32, 4),
    "llama.embedding_length": Value(U32, 256),
    "llama.attention.head_count": Value(U32, 8),
    "llama.attention.head_count_kv": Value(U32, 2),
    "tokenizer.ggml.model": Value(STRING, "gpt2"),
    "tokenizer.ggml.pre": Value(STRING, "tiny"),
    "tokenizer.ggml.tokens": Value(STRING, ["a", "é", "c" * 300]),
    "tokenizer.ggml.scores": Value(F32, [0.0, 1.0, 2.0]),
    "tokenizer.chat_template": Value(STRING, "{{ messages }}"),
}
# 256 * 4 Q4_0 elements take 4 * 8 * 18 bytes; 100 F32 take 400, from the next multiple of 32 on.
TENSORS = (Tensor("embedding", (256, 4), 2, 0), Tensor("norm", (100,), 0, 576))
DATA = 976


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def scalar(kind: int, value: object) -> bytes:
    if kind == STRING:
        assert isinstance(value, (str, bytes))
        return string(value)
    return struct.pack(FORMATS[kind], value)


def encode(value: Value) -> bytes:
    if isinstance(value.value, Sequence) and not isinstance(value.value, (str, bytes)):
        items = b"".join(scalar(value.kind, item) for item in value.value)
        return struct.pack("<IIQ", ARRAY, value.kind, len(value.value)) + items
    return struct.pack("<I", value.kind) + scalar(value.kind, value.value)


def head(
    metadata: Mapping[str, Value] = LLAMA,
    tensors: Sequence[Tensor] = TENSORS,
    *,
    version: int = 3,
    tensor_count: int | None = None,
    value_count: int | None = None,
) -> bytes:
    """Everything before the padding. The counts can be made to lie."""
    out = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(metadata) if value_count is None else value_count,
    )
    for key, value in metadata.items():
        out += string(key) + encode(value)
    for tensor in tensors:
        out += string(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape) + struct.pack("<IQ", tensor.kind, tensor.offset)
    return out


def model(
    metadata: Mapping[str, Value] = LLAMA,
    tensors: Sequence[Tensor] = TENSORS,
    *,
    data: int = DATA,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """A whole file with ``data`` bytes of tensor data."""
    out = head(metadata, tensors, version=version)
    return out + bytes(-len(out) % alignment) + bytes(data)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path

"""What a ``.base`` bundle says about its model, read without loading it.

Layout of a file, all little-endian: magic, version (32 bits), length of the header (64 bits), the header (JSON), zeros
up to a multiple of 64 KiB, tensor data.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from superfluidd.engine.header import ModelHeader, integer
from superfluidd.errors import ModelFileError

MAGIC, VERSION = b"BASE", 1
PREFIX = 16
BOUNDARY = 64 << 10
MOST_HEADER = 256 << 20
MOST_LAYERS = 4096

CONTEXT = 4096
"""The window of a model that does not say what it was trained for: what the library takes then."""


class _Tensor(msgspec.Struct, frozen=True):
    shape: list[int] = []
    offset: int = 0
    length: int = 0


class _Header(msgspec.Struct, frozen=True):
    arch: str
    config: dict[str, Any]
    quant_scheme: str = ""
    tensors: list[_Tensor] = []
    metadata: dict[str, Any] = {}


def read_header(path: str | Path) -> ModelHeader:
    """Read and check a bundle, its length included.

    Raises:
        ModelFileError: it cannot be served; the message names it and says what to do.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(PREFIX)
            if not first.startswith(MAGIC):
                raise ModelFileError(f"{path} is no .base bundle: it begins with {first[:4]!r}; convert it with basert")
            version, length = int.from_bytes(first[4:8], "little"), int.from_bytes(first[8:16], "little")
            if version != VERSION:
                raise ModelFileError(f"{path} is a bundle of version {version}; this program reads {VERSION}")
            if len(first) < PREFIX or length > size - PREFIX:
                raise ModelFileError(f"{path} is truncated: it has only {size} bytes; download it again")
            if length > MOST_HEADER:
                raise ModelFileError(f"{path} is damaged: its header cannot have {length} bytes; download it again")
            data = file.read(length)
    except FileNotFoundError:
        raise ModelFileError(f"no such file: {path}; give the path of a .base bundle") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        found = msgspec.json.decode(data, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path} is damaged: its header cannot be read ({error}); download it again") from None
    if "lora.rank" in found.metadata:
        raise ModelFileError(f"{path} is an adapter and no model; give the model it belongs to")
    start = PREFIX + length + -(PREFIX + length) % BOUNDARY
    end = max((tensor.offset + tensor.length for tensor in found.tensors), default=0)
    if start + end > size:
        raise ModelFileError(
            f"{path} is truncated: its tensors end at byte {start + end} but the file has {size} bytes; "
            "download it again"
        )
    return _header(path, size, found)


def _header(path: Path, size: int, found: _Header) -> ModelHeader:
    def number(key: str, default: int | None, most: int) -> int:
        return integer((found.config,), key, default, most, str(path))

    layers, width = number("num_hidden_layers", None, MOST_LAYERS), number("hidden_size", None, 1 << 24)
    heads = number("num_attention_heads", 1, 1 << 16) or 1
    head = number("head_dim", width // heads, 1 << 16)
    elements = 0
    for tensor in found.tensors:
        held = 1
        for extent in tensor.shape:
            held *= max(0, extent)
        elements += held
    return ModelHeader(
        path=str(path),
        file_bytes=size,
        architecture=found.arch,
        name="",
        context_length=number("max_position_embeddings", CONTEXT, 1 << 31) or CONTEXT,
        block_count=layers,
        embedding_length=width,
        head_count=(heads,) * layers,
        head_count_kv=(number("num_key_value_heads", heads, 1 << 16),) * layers,
        key_length=head,
        value_length=head,
        sliding_window=number("sliding_window", 0, 1 << 31),
        recurrent=False,
        quantization=found.quant_scheme or "unknown",
        chat_template="",
        parameters=elements,
        tensor_bytes=sum(tensor.length for tensor in found.tensors),
        tensors=len(found.tensors),
    )

"""What a GGUF file says about its model, read without loading it: every bad file is found here, with its own message.

Layout of a file, all little-endian: magic, version, number of tensors, number of metadata values; the metadata
(key, type, value); the tensors (name, dimensions, type, offset); padding; tensor data.

Rules of this reader: a length is believed only after it was compared with what is left of the file; arrays are walked
over, not built, but for a few numbers per layer; nothing recurses.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec

from superfluidd.engine.ggml_types import FILE_TYPES, GUESSED, REMOVED_TYPES, TENSOR_TYPES
from superfluidd.engine.gguf_metadata import MAX_LAYERS, Arrays, Malformed, Reader, Scalar, read_metadata
from superfluidd.engine.header import ModelHeader
from superfluidd.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS = 1 << 18
MAX_DIMENSIONS = 4

_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive, probably PyTorch weights; convert the model to GGUF or download its GGUF"),
    (b"lmgg", "in the GGML format that came before GGUF; download a GGUF of the model"),
    (b"fmgg", "in the GGMF format that came before GGUF; download a GGUF of the model"),
    (b"tjgg", "in the GGJT format that came before GGUF; download a GGUF of the model"),
    (b"algg", "a GGLA adapter; give the model it belongs to, as a GGUF"),
    (b"version https://git-lfs", "a Git LFS pointer; fetch the file itself with `git lfs pull`"),
    (b"<", "a web page, so the download went wrong; download the model again"),
    (b"\x1f\x8b", "gzip-compressed; decompress it first"),
)


class GgufHeader(ModelHeader, frozen=True, kw_only=True):
    """What a GGUF file says beside that.

    Attributes:
        version: of the format.
        vocabulary: number of tokens; ``tokenizer_model``, ``tokenizer_pre``: kind of tokenizer.
    """

    version: int
    vocabulary: int
    tokenizer_model: str
    tokenizer_pre: str


def read_header(path: str | Path) -> GgufHeader:
    """Read and check a model file, its length included.

    Raises:
        ModelFileError: the file cannot be served; the message names it and says what to do.
    """
    path = Path(path)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path} is a directory; give the path of the .gguf file in it")
        # Opening a pipe would wait for a writer.
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path} is not a regular file; give the path of a .gguf file")
        with path.open("rb") as file:
            return _read(path, file)
    except FileNotFoundError:
        raise ModelFileError(f"no such file: {path}; give the path of a GGUF model") from None
    except PermissionError:
        raise ModelFileError(f"{path} cannot be read: permission denied; let this user read it") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelFileError(f"{path} cannot be read: {why}") from error
    except Malformed as error:
        raise ModelFileError(f"{path} {error}") from None


def _read(path: Path, file: BinaryIO) -> GgufHeader:
    size = os.fstat(file.fileno()).st_size
    _check_magic(file.read(64), size)
    file.seek(len(MAGIC))
    reader = Reader(file, size)
    version = reader.u32()
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            raise Malformed("is a big-endian GGUF; convert it for little-endian machines, or download that variant")
        raise Malformed(
            f"is a GGUF of version {version}; this program reads versions 2 and 3"
            + ("; convert the model again with a current llama.cpp" if version < 2 else "; update superfluidd")
        )
    tensors, values = reader.u64(), reader.u64()
    metadata = _Metadata(*read_metadata(reader, values))
    metadata.check_kind()
    if not 0 < tensors <= MAX_TENSORS:
        if not tensors:
            raise Malformed("has no tensors: it is only a vocabulary; give the model itself")
        reader.malformed(f"{tensors} tensors")
    table = _read_tensors(reader, tensors, metadata.integer("general.alignment", 32))
    data_bytes = size - table.start
    if table.end > data_bytes:
        raise Malformed(
            f"is truncated: its tensors end at byte {table.start + table.end} but the file has {size} bytes; "
            f"download it again"
        )
    return metadata.header(path, size, version, table)


def _check_magic(first: bytes, size: int) -> None:
    if not size:
        raise Malformed("is empty; download it again")
    if first.startswith(MAGIC):
        return
    if MAGIC.startswith(first):
        raise Malformed(f"is truncated: it has only {size} bytes; download it again")
    if first[8:9] == b"{" and 2 <= int.from_bytes(first[:8], "little") <= size:
        raise Malformed(
            "is not a GGUF file but safetensors; convert the model with llama.cpp's convert_hf_to_gguf.py "
            "or download its GGUF"
        )
    for magic, what in _OTHERS:
        if first.startswith(magic):
            raise Malformed(f"is not a GGUF file: it is {what}")
    raise Malformed(f"is not a GGUF file: it begins with {first[:4]!r} instead of {MAGIC!r}")


class _Tensors(msgspec.Struct, frozen=True):
    """All tensors in sum. ``start`` is where data begins in the file, ``end`` where it must end, from there."""

    count: int
    elements: int
    size: int
    start: int
    end: int
    commonest: str


def _read_tensors(reader: Reader, count: int, alignment: int) -> _Tensors:
    if not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        reader.malformed(f"an alignment of {alignment}")
    elements = size = end = 0
    by_type: Counter[str] = Counter()
    for _ in range(count):
        name = reader.name()
        dimensions = reader.u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            reader.malformed(f"{dimensions} dimensions of tensor {name!r}")
        shape = [reader.u64() for _ in range(dimensions)]
        number, offset = reader.u32(), reader.u64()
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            raise Malformed(
                f"has tensor {name!r} of type {number}, "
                + (
                    "which llama.cpp no longer knows; convert or quantize the model again"
                    if number in REMOVED_TYPES
                    else "which this program does not know; update superfluidd, or use another quantization"
                )
            )
        held = 1
        for extent in shape:
            held *= extent
        if shape[0] % kind.elements or offset % alignment or max(held, offset) >= 1 << 63:
            reader.malformed(f"tensor {name!r} of shape {shape} and type {kind.name} at offset {offset}")
        taken = held // kind.elements * kind.size
        elements, size, end = elements + held, size + taken, max(end, offset + taken)
        by_type[kind.name] += taken
    start = reader.position + -reader.position % alignment
    return _Tensors(count, elements, size, start, end, by_type.most_common(1)[0][0])


class _Metadata:
    """The metadata of a file, looked up by key."""

    def __init__(self, values: dict[str, Scalar], arrays: Arrays) -> None:
        self._values = values
        self._arrays = arrays
        self.architecture = self.text("general.architecture")

    def check_kind(self) -> None:
        """Refuse what is a GGUF but no model that can be served."""
        parts = self.integer("split.count", 1)
        if parts > 1:
            number = self.integer("split.no", 0) + 1
            raise Malformed(
                f"is part {number} of a model in {parts} parts; join them with `llama-gguf-split --merge` "
                f"(it takes the first part and the name of the result) and give the result"
            )
        kind = self.text("general.type") or "model"
        if kind != "model" or self.architecture == "clip":
            what = kind if kind != "model" else "mmproj"
            raise Malformed(f"is no language model but a GGUF of kind {what!r}; give the model it belongs to")
        if not self.architecture:
            raise Malformed("does not name the model's architecture (general.architecture); convert the model again")

    def text(self, key: str) -> str:
        """A text, or nothing."""
        value = self._values.get(key, "")
        return value if isinstance(value, str) else self._wrong(key)

    def integer(self, key: str, default: int) -> int:
        """A number that is not negative."""
        value = self._values.get(key, default)
        return value if isinstance(value, int) and 0 <= value < 1 << 32 else self._wrong(key)

    def _own(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _positive(self, key: str, limit: int) -> int:
        key = self._own(key)
        if key not in self._values:
            raise Malformed(f"does not say {key}; convert the model again")
        value = self.integer(key, 0)
        return value if 0 < value <= limit else self._wrong(key)

    def _wrong(self, key: str) -> NoReturn:
        raise Malformed(f"is damaged or not a model: its {key} cannot be right; download it again")

    def _per_layer(self, key: str, layers: int, default: tuple[int, ...]) -> tuple[int, ...]:
        key = self._own(key)
        if key in self._arrays:
            values = self._arrays[key].values
            # Some converters write more entries than layers; those that are left over mean nothing.
            if values is None or len(values) < layers or not all(0 <= value < 1 << 20 for value in values):
                self._wrong(key)
            return values[:layers]
        if key not in self._values:
            return default
        return (self.integer(key, 0),) * layers

    def _recurrent(self) -> bool:
        marks = tuple(self._own(kind) for kind in ("ssm.", "wkv.", "shortconv.", "kda."))
        return self.architecture.startswith(("mamba", "rwkv")) or any(
            key.startswith(marks) for key in (*self._values, *self._arrays)
        )

    def _sliding_window(self) -> int:
        key = self._own("attention.sliding_window")
        if key in self._arrays:
            return max(self._arrays[key].values or (1,))
        return self.integer(key, 0)

    def _vocabulary(self) -> int:
        tokens = self._arrays.get("tokenizer.ggml.tokens")
        return tokens.length if tokens is not None else self.integer(self._own("vocab_size"), 0)

    def _quantization(self, commonest: str) -> str:
        if "general.file_type" not in self._values:
            return commonest
        return FILE_TYPES.get(self.integer("general.file_type", 0) % GUESSED, commonest)

    def header(self, path: Path, size: int, version: int, tensors: _Tensors) -> GgufHeader:
        """Everything together."""
        layers = self._positive("block_count", MAX_LAYERS)
        width = self._positive("embedding_length", 1 << 24)
        heads = self._per_layer("attention.head_count", layers, (0,) * layers)
        head_length = width // next((count for count in heads if count), width)
        return GgufHeader(
            path=str(path),
            file_bytes=size,
            version=version,
            architecture=self.architecture,
            name=self.text("general.name"),
            context_length=self._positive("context_length", 1 << 31),
            block_count=layers,
            embedding_length=width,
            head_count=heads,
            head_count_kv=self._per_layer("attention.head_count_kv", layers, heads),
            key_length=self.integer(self._own("attention.key_length"), head_length),
            value_length=self.integer(self._own("attention.value_length"), head_length),
            sliding_window=self._sliding_window(),
            recurrent=self._recurrent(),
            quantization=self._quantization(tensors.commonest),
            vocabulary=self._vocabulary(),
            tokenizer_model=self.text("tokenizer.ggml.model"),
            tokenizer_pre=self.text("tokenizer.ggml.pre"),
            chat_template=self.text("tokenizer.chat_template"),
            parameters=tensors.elements,
            tensor_bytes=tensors.size,
            tensors=tensors.count,
        )

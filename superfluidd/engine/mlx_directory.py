"""What a model directory (``config.json``, ``*.safetensors``) says, read without loading it.

As for GGUF, every bad directory is found here with its own message: nothing is believed that the files do not hold, and
no Python that a model brings along is run.

A safetensors file: 8 bytes with the length of the header (little-endian), the header (JSON: name to type, shape and
offsets), the data.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from superfluidd.engine.header import ModelHeader, integer
from superfluidd.errors import ModelFileError

MOST_CONFIG = 16 << 20
MOST_HEADER = 100_000_000
"""What the safetensors library allows."""

MOST_LAYERS = 4096
TYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
CPU_FLOAT, HALF = 4, 2
"""Bytes of a number: on a CPU everything is computed in float32, on a GPU as it is stored."""

RECURRENT = (
    "mamba",
    "rwkv",
    "recurrent_gemma",
    "jamba",
    "falcon_h1",
    "plamo2",
    "nemotron_h",
    "lfm2",
    "bamba",
    "qwen3_next",
)
"""Beginnings of model types that keep a state instead of keys and values."""


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class MlxHeader(ModelHeader, frozen=True, kw_only=True):
    """What a directory says beside that.

    Attributes:
        dense_bytes: what the tensors take if quantized ones are unpacked to float32.
        bits: of most weights, 0 if they are not quantized.
    """

    dense_bytes: int
    bits: int


def read_header(path: str | Path, *, trust_code: bool = False, gpu: bool = sys.platform == "darwin") -> MlxHeader:
    """Read and check a model directory, the length of its files included.

    Args:
        path: of the directory.
        trust_code: a model that brings Python along may be served.
        gpu: numbers are computed as they are stored.

    Raises:
        ModelFileError: it cannot be served; the message names it and says what to do.
    """
    path = Path(path)
    try:
        config = _config(path, trust_code)
        tensors, size = _tensors(path)
        template = _template(path)
    except OSError as error:
        raise ModelFileError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    return _Directory(path, config, tensors).header(size, template, gpu)


def _json(path: Path, most: int = MOST_CONFIG) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(most + 1)
    try:
        found = json.loads(data) if len(data) <= most else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelFileError(f"{path} is damaged: it is no JSON object; download the model again")
    return found


def _config(path: Path, trust_code: bool) -> dict[str, Any]:
    file = path / "config.json"
    if not file.exists():
        files = sorted(one.name for one in path.glob("*.gguf"))
        raise ModelFileError(
            f"{path} is a directory without config.json; "
            + (f"give the path of {files[0]} in it" if files else "give the path of an MLX model or of a .gguf file")
        )
    config = _json(file)
    if not isinstance(config.get("model_type"), str):
        raise ModelFileError(f"{file} does not say model_type; download the model again, or convert it with mlx-lm")
    code = config.get("model_file")
    if code and not trust_code:
        raise ModelFileError(
            f"{path} brings Python code along ({code}), which would run as this user; read it, and if you trust it, "
            "start with --trust-model-code"
        )
    return config


def _tensors(path: Path) -> tuple[dict[str, _Tensor], int]:
    """All tensors of ``model*.safetensors``, and the size of those files."""
    files = sorted(path.glob("model*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.exists():
        wanted = _json(index).get("weight_map")
        names = set(map(str, wanted.values())) if isinstance(wanted, dict) else set()
        missing = sorted(names - {file.name for file in files})
        if missing:
            raise ModelFileError(
                f"{path} lacks {len(missing)} of {len(names)} files, {missing[0]} first; download it again"
            )
    if not files:
        raise ModelFileError(f"{path} has no model*.safetensors; download the model's weights, too")
    tensors: dict[str, _Tensor] = {}
    size = 0
    for file in files:
        found, length = _read_file(file)
        tensors |= found
        size += length
    return tensors, size


def _read_file(path: Path) -> tuple[dict[str, _Tensor], int]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if first.startswith(b"version "):
            raise ModelFileError(f"{path} is a Git LFS pointer; fetch the file itself with `git lfs pull`")
        if len(first) < 8 or not 2 <= length <= MOST_HEADER:
            raise ModelFileError(f"{path} is no safetensors file, or damaged; download it again")
        if length > size - 8:
            raise ModelFileError(f"{path} is truncated: it has only {size} bytes; download it again")
        try:
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            tensors = {name: msgspec.json.decode(one, type=_Tensor) for name, one in raw.items()}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{path} is damaged: its header cannot be read ({error}); download it again") from None
    end = 0
    for name, tensor in tensors.items():
        bits = TYPE_BITS.get(tensor.dtype)
        if bits is None:
            raise ModelFileError(f"{path} has tensor {name!r} of type {tensor.dtype}, which is not known here")
        held = bits
        for extent in tensor.shape:
            held *= extent
        start, stop = tensor.data_offsets
        if min(start, *tensor.shape, 0) < 0 or stop - start != held // 8:
            raise ModelFileError(f"{path} is damaged: tensor {name!r} cannot be right; download it again")
        end = max(end, stop)
    if 8 + length + end > size:
        raise ModelFileError(
            f"{path} is truncated: its tensors end at byte {8 + length + end} but the file has {size} bytes; "
            "download it again"
        )
    return tensors, size


def _template(path: Path) -> str:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8", errors="replace")
    settings = path / "tokenizer_config.json"
    found = _json(settings).get("chat_template") if settings.exists() else None
    return found if isinstance(found, str) else ""


class _Directory:
    """A directory's configuration, looked up by key."""

    def __init__(self, path: Path, config: dict[str, Any], tensors: dict[str, _Tensor]) -> None:
        self._path = path
        self._config = config
        inner = config.get("text_config")
        self._text: dict[str, Any] = inner if isinstance(inner, dict) else {}
        self._tensors = tensors
        found = config.get("quantization") or self._text.get("quantization")
        self._quantization: dict[str, Any] = found if isinstance(found, dict) else {}

    def _integer(self, key: str, default: int | None, most: int) -> int:
        return integer((self._text, self._config), key, default, most, f"{self._path}/config.json")

    def _group(self, module: str) -> int:
        own = self._quantization.get(module)
        group = own.get("group_size") if isinstance(own, dict) else self._quantization.get("group_size", 64)
        return group if isinstance(group, int) and 0 < group <= 1 << 16 else 64

    def _sizes(self, gpu: bool) -> tuple[int, int, int]:
        """Parameters; bytes of all tensors as they are kept; bytes if all of it is float32."""
        parameters = kept = 0
        for name, tensor in self._tensors.items():
            start, stop = tensor.data_offsets
            elements = (stop - start) * 8 // TYPE_BITS[tensor.dtype]
            module, _, part = name.rpartition(".")
            packed = f"{module}.scales" in self._tensors
            if part == "weight" and packed:
                scales = self._tensors[f"{module}.scales"]
                groups = (scales.data_offsets[1] - scales.data_offsets[0]) * 8 // TYPE_BITS[scales.dtype]
                parameters += groups * self._group(module)
            elif not (packed and part in ("scales", "biases")):
                parameters += elements
            floats = tensor.dtype in FLOATS
            kept += elements * CPU_FLOAT if floats and not gpu else stop - start
        return parameters, kept, parameters * CPU_FLOAT

    def _recurrent(self) -> bool:
        kinds = self._text.get("layer_types") or self._config.get("layer_types")
        state = isinstance(kinds, list) and any(str(kind).startswith(("linear", "mamba", "conv")) for kind in kinds)
        return state or str(self._config["model_type"]).startswith(RECURRENT)

    def header(self, size: int, template: str, gpu: bool) -> MlxHeader:
        """Everything together."""
        layers = self._integer("num_hidden_layers", None, MOST_LAYERS)
        width = self._integer("hidden_size", None, 1 << 24)
        heads = self._integer("num_attention_heads", 1, 1 << 16) or 1
        kv_heads = self._integer("num_key_value_heads", heads, 1 << 16)
        head = self._integer("head_dim", width // heads, 1 << 16)
        bits = self._quantization.get("bits", 0)
        bits = bits if isinstance(bits, int) else 0
        parameters, kept, dense = self._sizes(gpu)
        floats = max((tensor.dtype for tensor in self._tensors.values() if tensor.dtype in FLOATS), default="F32")
        return MlxHeader(
            path=str(self._path),
            file_bytes=size,
            architecture=str(self._config["model_type"]),
            name="",
            context_length=self._integer("max_position_embeddings", 8192, 1 << 31) or 8192,
            block_count=layers,
            embedding_length=width,
            head_count=(heads,) * layers,
            head_count_kv=(kv_heads,) * layers,
            key_length=head,
            value_length=self._integer("v_head_dim", head, 1 << 16),
            sliding_window=self._integer("sliding_window", 0, 1 << 31),
            recurrent=self._recurrent(),
            quantization=f"{bits}-bit" if bits else floats,
            chat_template=template,
            parameters=parameters,
            tensor_bytes=kept,
            tensors=len(self._tensors),
            element_bytes=HALF if gpu and floats != "F32" else CPU_FLOAT,
            dense_bytes=dense,
            bits=bits,
        )

"""A tree of MLX arrays and numbers as bytes, and back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

_DTYPES = {
    name: getattr(mx, name)
    for name in ("float32", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()
_array = msgspec.msgpack.Decoder(_Array)


def pack(tree: object) -> bytes:
    """Bytes of a tree of arrays, numbers, None and lists.

    Raises:
        TypeError: there is something else in it.
    """
    return _encoder.encode(_plain(tree))


def unpack(data: bytes) -> Any:
    """The tree of those bytes; its arrays are copies.

    Raises:
        ValueError: they were not made by :func:`pack`, or are not whole.
    """
    return _built(_decoder.decode(data))


def _plain(value: object) -> object:
    if isinstance(value, mx.array):
        name = _NAMES.get(value.dtype)
        if name is None:
            raise TypeError(f"an array of {value.dtype} has no form in bytes")
        # numpy knows no bfloat16; the bits are all that is needed.
        data = np.asarray(mx.contiguous(value).reshape(-1).view(mx.uint8)).tobytes() if value.size else b""
        return msgspec.msgpack.Ext(1, _encoder.encode(_Array(name, tuple(value.shape), data)))
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, bool | int):
        return value
    raise TypeError(f"{type(value).__name__} is no part of a state")


def _built(value: Any) -> Any:
    if isinstance(value, list):
        return [_built(one) for one in value]
    if isinstance(value, msgspec.msgpack.Ext):
        found = _array.decode(value.data)
        dtype = _DTYPES.get(found.dtype)
        if dtype is None:
            raise ValueError(f"an array of {found.dtype}")
        size = dtype.size
        for extent in found.shape:
            size *= extent
        if size != len(found.data) or any(extent < 0 for extent in found.shape):
            raise ValueError(f"an array of {found.shape} in {len(found.data)} bytes")
        raw = mx.array(np.frombuffer(found.data, dtype=np.uint8))
        return raw.view(dtype).reshape(found.shape) if found.data else mx.zeros(found.shape, dtype=dtype)
    if value is None or isinstance(value, int):
        return value
    raise ValueError(f"{type(value).__name__} is no part of a state")

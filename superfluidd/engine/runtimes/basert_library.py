"""libbaseRT's public C interface, as far as it is used here.

Declared from the meaning of its public header (version 0.1): names, types and what a call promises. The library is
found and checked here; nothing else in this project knows it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from superfluidd.engine.port import LoadFailed, OutOfCells, StepFailed

VERSION = (0, 1)
"""Major and minor version that this was written for; before 1.0 a minor version may change anything."""

OK, UNSUPPORTED, OUT_OF_MEMORY = 0, 5, 6
"""Codes that are told apart."""

NAMES = ("libbaseRT.dylib", "libbaseRT.so")
PLACES = ("/opt/homebrew/lib", "/usr/local/lib", "/usr/lib")

LAYERS = 128
"""Entries of tables by layer."""


class ModelConfig(ctypes.Structure):
    """The beginning of a model's configuration. The library may append to its end, and says how long its own is."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "q_dim")),
        *((name, ctypes.c_uint32) for name in ("kv_dim", "ffn_dim", "vocab_size", "max_seq_len")),
        ("norm_eps", ctypes.c_float),
        ("rope_theta", ctypes.c_float),
        ("sliding_window_pattern", ctypes.c_uint32),
        ("sliding_window", ctypes.c_uint32),
        ("rope_local_theta", ctypes.c_float),
        ("architecture", ctypes.c_char * 32),
    )


MOST_CONFIG = 64 << 10
"""More than a configuration will ever be, bytes."""


class PrefixMatch(ctypes.Structure):
    """Blocks of a cached prefix: locked until the handle is given back."""

    _fields_ = (
        ("matched_tokens", ctypes.c_int),
        ("n_blocks", ctypes.c_int),
        ("blocks", ctypes.POINTER(ctypes.c_int)),
        ("handle", ctypes.c_uint64),
    )


_MODEL, _SEQUENCE, _TEXT = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p
_TOKENS = ctypes.POINTER(ctypes.c_uint32)
_INT, _INTS = ctypes.c_int, ctypes.POINTER(ctypes.c_int)

_SIGNATURES: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "baseRT_version_string": (_TEXT, ()),
    "baseRT_model_config_sizeof": (ctypes.c_size_t, ()),
    "baseRT_get_error": (_TEXT, ()),
    "baseRT_get_error_code": (_INT, ()),
    "baseRT_set_kv_bits": (None, (_INT,)),
    "baseRT_set_paged_kv": (None, (_INT,)),
    "baseRT_set_max_batch_size": (None, (_INT,)),
    "baseRT_set_prefix_cache": (None, (_INT,)),
    "baseRT_load_model": (_MODEL, (_TEXT, _TEXT, _INT)),
    "baseRT_free_model": (None, (_MODEL,)),
    "baseRT_model_memory": (ctypes.c_size_t, (_MODEL,)),
    "baseRT_encode": (_INT, (_MODEL, _TEXT, _TOKENS, _INT)),
    "baseRT_decode_token_static": (_TEXT, (_MODEL, ctypes.c_uint32)),
    "baseRT_chat_template_jinja": (_TEXT, (_MODEL,)),
    "baseRT_bos_token": (_TEXT, (_MODEL,)),
    "baseRT_eos_token": (_TEXT, (_MODEL,)),
    "baseRT_eos_token_id": (ctypes.c_uint32, (_MODEL,)),
    "baseRT_sequence_create": (_SEQUENCE, (_MODEL,)),
    "baseRT_sequence_free": (None, (_SEQUENCE,)),
    "baseRT_batch_step_fused_logits": (_INT, (_MODEL, ctypes.POINTER(_SEQUENCE), _INT, _TOKENS, _INTS)),
    "baseRT_read_batch_logits": (_INT, (_MODEL, _INT, ctypes.c_void_p)),
    "baseRT_prefix_match": (PrefixMatch, (_MODEL, _TOKENS, _INT)),
    "baseRT_sequence_seed_prefix": (_INT, (_SEQUENCE, _INTS, _INT, _INT)),
    "baseRT_prefix_insert": (_INT, (_MODEL, _TOKENS, _INT, _SEQUENCE)),
    "baseRT_prefix_unlock": (None, (_MODEL, ctypes.c_uint64)),
    "baseRT_prefix_evict": (_INT, (_MODEL, _INT)),
}


def find(named: str, environ: Mapping[str, str] = os.environ, places: Sequence[str] = PLACES) -> Path:
    """The library: as named, as BASERT_LIB says, or where it is usually installed.

    Raises:
        LoadFailed: it is nowhere.
    """
    for source, value in (("--basert-lib", named), ("BASERT_LIB", environ.get("BASERT_LIB", ""))):
        if value:
            path = Path(value)
            if not path.is_file():
                raise LoadFailed(f"{source} names {path}, where there is no file")
            return path
    for place in places:
        for name in NAMES:
            if (Path(place) / name).is_file():
                return Path(place) / name
    raise LoadFailed(f"libbaseRT is not in {', '.join(places)}; name it with --basert-lib or BASERT_LIB")


class Library:
    """The loaded library.

    Args:
        path: of the library.

    Raises:
        LoadFailed: it is none, lacks a function, or is of another version.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._native = ctypes.CDLL(str(path))
        except OSError as error:
            raise LoadFailed(f"{path} cannot be loaded: {error}") from error
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(self._native, name)
            except AttributeError:
                raise LoadFailed(f"{path} has no {name}: it is no libbaseRT {_dotted(VERSION)}") from None
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("baseRT_"), function)
        self.version = self.version_string().decode("ascii", "replace")
        found = tuple(self.version.split(".")[:2])
        if found != tuple(map(str, VERSION)):
            raise LoadFailed(f"{path} is of version {self.version}; this program speaks {_dotted(VERSION)}.x")
        size = self.model_config_sizeof()
        if not ctypes.sizeof(ModelConfig) <= size <= MOST_CONFIG:
            raise LoadFailed(f"{path} says that a configuration has {size} bytes; it is no libbaseRT {self.version}")
        # It is returned by value: the whole of it, however long the library's is.
        padded = type("PaddedConfig", (ctypes.Structure,), {"_fields_": (("data", ctypes.c_char * size),)})
        function = self._native.baseRT_get_config
        function.restype, function.argtypes = padded, (_MODEL,)
        self._get_config = function

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # what is called is set when the library is loaded

    def config(self, model: int) -> ModelConfig:
        """A model's configuration."""
        return ModelConfig.from_buffer_copy(bytes(self._get_config(model)))

    def message(self) -> str:
        """The latest failure in the library's own words."""
        text: bytes = self.get_error() or b""
        return text.decode("utf-8", "replace") or "it gives no reason"

    def check(self, code: int, what: str) -> None:
        """Raise what a return code stands for.

        Raises:
            OutOfCells, StepFailed: the call failed.
        """
        if code == OK:
            return
        kind = OutOfCells if code == OUT_OF_MEMORY else StepFailed
        raise kind(f"{what} failed with code {code}: {self.message()}")


def tokens_of(values: Sequence[int]) -> Any:
    """Token ids as the library takes them."""
    return (ctypes.c_uint32 * max(1, len(values)))(*values)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

"""The metadata section of a GGUF file, value by value. See :mod:`.gguf` for the rules it is read by."""

from __future__ import annotations

import struct
from typing import BinaryIO, NoReturn

import msgspec

MAX_VALUES = 1 << 14
MAX_NAME = 1 << 12
MAX_TEXT = 1 << 22
MAX_STRINGS = 1 << 24
"""Strings of one array; the largest vocabularies have a sixteenth of that."""

MAX_LAYERS = 1 << 10

KEPT_ARRAYS = (".attention.head_count", ".attention.head_count_kv", ".attention.sliding_window")
"""How the keys end whose values may differ from layer to layer and are needed; other arrays are walked over."""

KEPT_TEXTS = frozenset(
    {
        "general.architecture",
        "general.name",
        "general.type",
        "tokenizer.ggml.model",
        "tokenizer.ggml.pre",
        "tokenizer.chat_template",
    }
)

_STRING, _ARRAY = 8, 9
_NUMBERS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_FRACTIONS = (6, 12)
_U32, _U64 = _NUMBERS[4], _NUMBERS[10]

Scalar = int | float | bool | str


class Array(msgspec.Struct, frozen=True):
    """An array's length, and its values where they were kept."""

    length: int
    values: tuple[int, ...] | None = None


Arrays = dict[str, Array]


class Malformed(Exception):
    """The file is no good; the message continues a sentence that begins with its path."""


class Reader:
    """Reads forward, and never believes that there is more than the file has.

    Args:
        file: positioned where reading begins.
        size: bytes of the file.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self.position = file.tell()
        """Bytes from the beginning of the file."""

    def malformed(self, what: str) -> NoReturn:
        """Report something no converter writes."""
        raise Malformed(f"is damaged or hostile: it has {what}; download it again")

    def need(self, count: int) -> None:
        """Check that so many bytes are left."""
        if count > self._size - self.position:
            raise Malformed(
                f"is truncated: its header goes on past the end of the file, at {self._size} bytes; download it again"
            )

    def take(self, count: int) -> bytes:
        """That many bytes."""
        self.need(count)
        self.position += count
        return self._file.read(count)

    def skip(self, count: int) -> None:
        """Go on behind so many bytes."""
        self.need(count)
        self.position += count
        self._file.seek(count, 1)

    def u32(self) -> int:
        """An unsigned 32-bit integer."""
        number: int = _U32.unpack(self.take(4))[0]
        return number

    def u64(self) -> int:
        """An unsigned 64-bit integer."""
        number: int = _U64.unpack(self.take(8))[0]
        return number

    def text(self, limit: int, what: str) -> str:
        """A string with its length in front of it."""
        length = self.u64()
        self.need(length)
        if length > limit:
            self.malformed(f"a {what} of {length} bytes")
        return self.take(length).decode("utf-8", "replace")

    def name(self) -> str:
        """A key, or a tensor's name."""
        return self.text(MAX_NAME, "name")

    def number(self, kind: int) -> int | float | bool:
        """A number of one of the fixed-size types."""
        form = _NUMBERS[kind]
        value: int | float | bool = form.unpack(self.take(form.size))[0]
        return value

    def array(self, *, keep: bool) -> Array:
        """An array. Strings, fractions and whatever is not to be kept are only walked over."""
        kind, length = self.u32(), self.u64()
        if kind == _STRING:
            self.need(8 * length)
            if length > MAX_STRINGS:
                self.malformed(f"an array of {length} strings")
            for _ in range(length):
                self.skip(self.u64())
            return Array(length)
        if kind not in _NUMBERS:
            self.malformed(f"an array of type {kind}")
        form = _NUMBERS[kind]
        self.need(form.size * length)
        if not keep or length > MAX_LAYERS or kind in _FRACTIONS:
            self.skip(form.size * length)
            return Array(length)
        data = self.take(form.size * length)
        return Array(length, tuple(int(item[0]) for item in form.iter_unpack(data)))


def read_metadata(reader: Reader, count: int) -> tuple[dict[str, Scalar], Arrays]:
    """All numbers, the texts that matter, and what there is of arrays.

    Raises:
        Malformed: the section is damaged or cut off.
    """
    if count > MAX_VALUES:
        reader.malformed(f"{count} metadata values")
    values: dict[str, Scalar] = {}
    arrays: Arrays = {}
    for _ in range(count):
        key = reader.name()
        kind = reader.u32()
        if kind == _ARRAY:
            arrays[key] = reader.array(keep=key.endswith(KEPT_ARRAYS))
        elif kind == _STRING:
            if key in KEPT_TEXTS:
                values[key] = reader.text(MAX_TEXT, "text")
            else:
                reader.skip(reader.u64())
        elif kind in _NUMBERS:
            values[key] = reader.number(kind)
        else:
            reader.malformed(f"metadata of type {kind}")
    return values, arrays

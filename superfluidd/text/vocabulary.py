"""The bytes of every token, packed: two flat buffers instead of a quarter of a million objects."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from itertools import accumulate, pairwise


class Vocabulary:
    """A model's token pieces, as they came in :class:`~superfluidd.engine.wire.Hello`.

    Args:
        pieces: the pieces of all tokens joined, in id order.
        ends: where each piece ends in ``pieces``: little-endian unsigned 32-bit integers.

    Raises:
        ValueError: the two do not belong together.
    """

    def __init__(self, pieces: bytes, ends: bytes) -> None:
        self._pieces = pieces
        self._ends = _offsets()
        if len(ends) % self._ends.itemsize:
            raise ValueError(f"{len(ends)} bytes of ends are not a whole number of 32-bit integers")
        self._ends.frombytes(ends)
        if sys.byteorder == "big":
            self._ends.byteswap()
        last = self._ends[-1] if self._ends else 0
        if last != len(pieces) or any(end < start for start, end in pairwise(self._ends)):
            raise ValueError(f"the ends do not divide the {len(pieces)} bytes of pieces")

    @staticmethod
    def pack(pieces: list[bytes]) -> tuple[bytes, bytes]:
        """The two buffers of a list of pieces.

        Raises:
            OverflowError: the pieces are longer than 32-bit offsets reach.
        """
        ends = _offsets()
        ends.extend(accumulate(map(len, pieces)))
        if sys.byteorder == "big":
            ends.byteswap()
        return b"".join(pieces), ends.tobytes()

    def __len__(self) -> int:
        return len(self._ends)

    def piece(self, token: int) -> bytes:
        """The bytes of a token; they need not be whole characters.

        Raises:
            IndexError: no such token.
        """
        if not 0 <= token < len(self._ends):
            raise IndexError(f"token {token} is outside the vocabulary of {len(self._ends)}")
        return self._pieces[self._ends[token - 1] if token else 0 : self._ends[token]]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of whole tokens at once; bytes that are no character become U+FFFD.

        Raises:
            IndexError: some token does not exist.
        """
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")


def _offsets() -> array[int]:
    # The C types behind these two letters differ between platforms; the wire's integers do not.
    return array("I") if array("I").itemsize == 4 else array("L")

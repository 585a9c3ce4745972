"""Bytes to text as they come, without ever showing half a character."""

from __future__ import annotations

import codecs

_Decoder = codecs.getincrementaldecoder("utf-8")


class Utf8Stream:
    """Decodes bytes in pieces of any size.

    What all calls return, joined, equals decoding all bytes at once with ``errors="replace"``: a character that is
    cut between two pieces waits for its rest, bytes that can never become one turn into U+FFFD as soon as that is
    certain.
    """

    def __init__(self) -> None:
        self._decoder = _Decoder("replace")

    def feed(self, data: bytes) -> str:
        """The characters that these bytes complete."""
        return self._decoder.decode(data)

    @property
    def pending(self) -> bool:
        """Whether the bytes so far end inside a character."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """U+FFFD if the bytes ended inside a character, else nothing. The stream starts afresh."""
        return self._decoder.decode(b"", final=True)

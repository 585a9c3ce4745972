"""Length-prefixed msgpack frames: bytes in, typed messages out. No sockets here.

A frame is a 32-bit big-endian length and that many bytes of msgpack. Messages are decoded by their union type at
once; anything else is a :class:`BadFrame`, and the link is not to be trusted any further.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

MAX_FRAME = 256 * 1024 * 1024
"""Longest frame accepted, bytes. The largest honest one is a hello with a big vocabulary."""

M = TypeVar("M")


class BadFrame(Exception):
    """The peer sent something that is not a message of the agreed union."""


class FrameEncoder:
    """Turns messages into frames."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: msgspec.Struct) -> bytes:
        """One message as one frame."""
        buffer = bytearray(4)
        self._encoder.encode_into(message, buffer, 4)
        buffer[0:4] = (len(buffer) - 4).to_bytes(4, "big")
        return bytes(buffer)


class FrameDecoder(Generic[M]):
    """Collects bytes and yields the messages they complete.

    Args:
        decoder: a typed msgpack decoder of the direction's union.
        limit: longest frame accepted.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], limit: int = MAX_FRAME) -> None:
        self._decoder = decoder
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Messages completed by ``data``, in order.

        Raises:
            BadFrame: a frame is too long or does not decode; the decoder must not be used again.
        """
        self._buffer += data
        messages: list[M] = []
        offset = 0
        while len(self._buffer) - offset >= 4:
            size = int.from_bytes(self._buffer[offset : offset + 4], "big")
            if size > self._limit:
                raise BadFrame(f"a frame of {size} bytes is longer than the limit of {self._limit}")
            end = offset + 4 + size
            if len(self._buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(memoryview(self._buffer)[offset + 4 : end]))
            except msgspec.DecodeError as error:
                raise BadFrame(f"undecodable frame of {size} bytes: {error}") from error
            offset = end
        if offset:
            del self._buffer[:offset]
        return messages

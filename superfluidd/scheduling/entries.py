"""What is kept of KV: the record of one prefix, and how token ids are packed, compared and named. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from superfluidd.scheduling.request import Pin, Request
from superfluidd.types import RequestId

__all__ = ["LINEAGE", "TOKEN_BYTES", "Cache", "Entry", "Pin", "key_of", "pack", "shared_length"]

TOKEN_BYTES = 4

LINEAGE = 32
"""Requests that are remembered of those that have fed what one entry holds."""


class Cache(msgspec.Struct, frozen=True):
    """How KV is kept.

    Attributes:
        enabled: requests are seeded from what others left; otherwise only preempted requests keep theirs.
        cut: where the engine can shorten a sequence, as in its info.
        host_bytes: most bytes of KV saved in host memory.
        cell_bytes: KV bytes of a token, as long as nothing has been measured; 0 asks the engine.
        least: the shortest prefix that is worth seeding from, tokens: feeding a shorter one costs less than finding it
            a place may.
        wait_seconds: a prefix whose prefill takes that long is worth waiting for while another lane is fed it.
        park_bytes: most bytes of KV on disk; 0 is none. ``park_least``: the shortest prefix that is written there.
        pin_part: part of the pool that may be pinned.
        high, low: above that part of the pool entries go until it is below the other (source: the specification,
            "Memory pressure").
    """

    enabled: bool = False
    cut: Literal["anywhere", "window", "head"] = "anywhere"
    host_bytes: int = 0
    cell_bytes: int = 0
    least: int = 32
    wait_seconds: float = 0.5
    park_bytes: int = 0
    park_least: int = 64
    pin_part: float = 0.5
    high: float = 0.85
    low: float = 0.70


@dataclass(slots=True, eq=False)
class Entry:
    """KV that is kept.

    Attributes:
        tokens: what it holds, packed; ``length``: how many.
        sequence: where it is resident, or None; ``blob``: the number it is saved under, or None.
        bytes: size of what is saved.
        key: the name it is parked on disk under, or empty; ``parked``: bytes it takes there, 0 while it is written.
        unparkable: it could not be written, or not be read.
        owner: the waiting request it belongs to, if any.
        used: when it was last of use; counts, not seconds.
        requests: those that have fed it, oldest first, the latest :data:`LINEAGE` of them.
        pin: an operator wants it kept: it goes after everything else.
    """

    tokens: bytes
    length: int
    sequence: int | None
    used: int
    owner: Request | None = None
    blob: int | None = None
    bytes: int = 0
    requests: tuple[RequestId, ...] = ()
    pin: Pin | None = None
    key: str = ""
    parked: int = 0
    unparkable: bool = False

    @property
    def nowhere(self) -> bool:
        """No place holds it any more."""
        return self.sequence is None and self.blob is None and not self.key


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids in a form that is compared fast."""
    return array("i", tokens).tobytes()


def shared_length(one: bytes, other: bytes) -> int:
    """Tokens that two packed lists have in common at their beginnings."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most // TOKEN_BYTES
    least, most = 0, most // TOKEN_BYTES
    while most - least > 1:
        middle = (least + most) // 2
        if one[least * TOKEN_BYTES : middle * TOKEN_BYTES] == other[least * TOKEN_BYTES : middle * TOKEN_BYTES]:
            least = middle
        else:
            most = middle
    return least


def key_of(tokens: bytes) -> str:
    """The name of packed token ids."""
    return hashlib.blake2b(tokens, digest_size=16).hexdigest()

"""Strategies: bytes that are nearly UTF-8, and every way to cut a text into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

Text = TypeVar("Text", str, bytes)

FRAGMENTS = [
    b"a",
    b" the",
    b"th",
    "é".encode(),
    "日本".encode(),
    "😀".encode(),
    "😀".encode()[:1],
    "😀".encode()[:3],
    "日".encode()[:2],
    b"\x80",
    b"\xc0",
    b"\xed\xa0\x80",
    b"\xf4\x90",
    b"\xff",
    b"\xe0\x80",
]

nearly_utf8 = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=3)), max_size=16).map(b"".join)


def cut(whole: Text, places: Sequence[int]) -> list[Text]:
    """The pieces between these places; some may be empty."""
    edges = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[start:end] for start, end in itertools.pairwise(edges)]


places = st.lists(st.integers(0, 200), max_size=12)

"""Packed token pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluidd.text.vocabulary import Vocabulary


@given(st.lists(st.binary(max_size=6), max_size=40))
def test_what_was_packed_comes_out(pieces: list[bytes]) -> None:
    vocabulary = Vocabulary(*Vocabulary.pack(pieces))
    assert len(vocabulary) == len(pieces)
    assert [vocabulary.piece(token) for token in range(len(pieces))] == pieces


def test_the_ends_are_little_endian_32_bit() -> None:
    assert Vocabulary.pack([b"a", b"", b"b" * 257]) == (
        b"a" + b"b" * 257,
        bytes([1, 0, 0, 0, 1, 0, 0, 0, 2, 1, 0, 0]),
    )


def test_decode_joins_characters_that_span_tokens_and_marks_what_is_cut_off() -> None:
    vocabulary = Vocabulary(*Vocabulary.pack([b"caf\xc3", b"\xa9", b"!", b""]))
    assert vocabulary.decode([0, 1, 3, 2]) == "café!"
    assert vocabulary.decode([0]) == "caf\ufffd"
    assert vocabulary.decode([]) == ""


@pytest.mark.parametrize("token", [-1, 2, 1 << 40])
def test_a_token_outside_the_vocabulary_is_an_error(token: int) -> None:
    vocabulary = Vocabulary(*Vocabulary.pack([b"a", b"b"]))
    with pytest.raises(IndexError, match="vocabulary of 2"):
        vocabulary.piece(token)


@pytest.mark.parametrize(
    "pieces, ends",
    [
        (b"ab", b"\x01\0\0"),
        (b"ab", b"\x01\0\0\0"),
        (b"ab", b""),
        (b"", b"\x01\0\0\0"),
        (b"ab", b"\x02\0\0\0\x01\0\0\0\x02\0\0\0"),
    ],
)
def test_buffers_that_do_not_belong_together_are_refused(pieces: bytes, ends: bytes) -> None:
    with pytest.raises(ValueError, match="ends"):
        Vocabulary(pieces, ends)

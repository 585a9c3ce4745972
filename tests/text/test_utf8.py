"""Incremental decoding equals decoding at once, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given

from superfluidd.text.utf8 import Utf8Stream
from tests.text.chunks import cut, nearly_utf8, places


@given(nearly_utf8, places)
def test_streamed_text_equals_the_whole(data: bytes, where: list[int]) -> None:
    stream = Utf8Stream()
    text = "".join(stream.feed(piece) for piece in cut(data, where)) + stream.finish()
    assert text == data.decode("utf-8", "replace")


@given(nearly_utf8)
def test_byte_by_byte_shows_only_what_the_whole_text_begins_with(data: bytes) -> None:
    stream, whole, shown = Utf8Stream(), data.decode("utf-8", "replace"), ""
    for byte in data:
        shown += stream.feed(bytes([byte]))
        assert whole.startswith(shown)


@pytest.mark.parametrize("character", ["é", "日", "😀"])
def test_a_character_waits_for_its_last_byte(character: str) -> None:
    stream = Utf8Stream()
    data = character.encode()
    for byte in data[:-1]:
        assert stream.feed(bytes([byte])) == ""
        assert stream.pending
    assert stream.feed(data[-1:]) == character
    assert not stream.pending
    assert stream.finish() == ""


def test_bytes_that_can_be_no_character_show_at_once() -> None:
    stream = Utf8Stream()
    assert stream.feed(b"\xff") == "\ufffd"
    assert stream.feed(b"\xf0\x9f") == ""
    assert stream.feed(b"a") == "\ufffda"


def test_an_incomplete_end_is_one_replacement_character() -> None:
    stream = Utf8Stream()
    assert stream.feed("x😀".encode()[:-1]) == "x"
    assert stream.finish() == "\ufffd"
    assert stream.feed(b"y") == "y"

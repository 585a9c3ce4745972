"""Stop texts against a plain search of the whole text."""

from __future__ import annotations

import time

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from superfluidd.text.stops import StopMatcher, StopState
from tests.text.chunks import cut, places

texts = st.text(alphabet="ab", max_size=40)
stop_sets = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


def searched(text: str, stops: list[str]) -> tuple[str, bool]:
    """What comes before the match that starts first, and whether there is one."""
    starts = [text.index(stop) for stop in stops if stop in text]
    return (text[: min(starts)], True) if starts else (text, False)


def streamed(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher, state, shown = StopMatcher(stops), StopState(), ""
    for piece in pieces:
        state, released, found = matcher.feed(state, piece)
        shown += released
        if found:
            return shown, True
    rest, found = matcher.finish(state)
    return shown + rest, found


@given(texts, stop_sets, places)
@example("abab", ["ababb", "ba"], [])
def test_any_chunking_equals_a_search_of_the_whole(text: str, stops: list[str], where: list[int]) -> None:
    expected = searched(text, stops)
    event("found" if expected[1] else "not found")
    assert streamed(cut(text, where), stops) == expected
    assert streamed(list(text), stops) == expected


@given(texts, stop_sets)
def test_only_what_could_begin_a_stop_text_is_held_back(text: str, stops: list[str]) -> None:
    matcher, state, shown = StopMatcher(stops), StopState(), 0
    for at, character in enumerate(text, start=1):
        state, released, found = matcher.feed(state, character)
        if found:
            return
        shown += len(released)
        tail = text[shown:at]
        assert len(tail) == matcher.held(state)
        assert not tail or any(stop.startswith(tail) for stop in stops)


def test_the_text_before_a_stop_in_the_same_piece_is_released() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed(StopState(), "one STOP two") == (StopState(), "one ", True)


def test_a_stop_over_three_pieces() -> None:
    matcher = StopMatcher(["</end>"])
    state, text, found = matcher.feed(StopState(), "a <")
    assert (text, found, matcher.held(state)) == ("a ", False, 1)
    state, text, found = matcher.feed(state, "/en")
    assert (text, found) == ("", False)
    assert matcher.feed(state, "d>b")[1:] == ("", True)


def test_a_false_start_is_released_whole() -> None:
    matcher = StopMatcher(["aab"])
    state, text, _ = matcher.feed(StopState(), "xaa")
    assert text == "x"
    state, text, _ = matcher.feed(state, "ac")
    assert text == "aaac"
    assert matcher.finish(state) == ("", False)


def test_a_match_waits_for_a_longer_one_that_started_earlier() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    state, text, found = matcher.feed(StopState(), "xabc")
    assert (text, found) == ("x", False)
    assert matcher.feed(state, "d")[1:] == ("", True)
    assert matcher.feed(state, "e")[1:] == ("a", True)
    assert matcher.finish(state) == ("a", True)


def test_one_matcher_serves_many_replies_at_once() -> None:
    matcher = StopMatcher(["zz"])
    first, _, _ = matcher.feed(StopState(), "z")
    second, _, _ = matcher.feed(StopState(), "y")
    assert matcher.feed(first, "z")[2]
    assert not matcher.feed(second, "z")[2]


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_repetitive_text_takes_linear_time() -> None:
    stop = "a" * 2000 + "b"
    matcher, state, shown = StopMatcher([stop]), StopState(), 0
    started = time.process_time()
    for _ in range(100_000):
        state, text, found = matcher.feed(state, "a")
        shown += len(text)
        assert not found
    # A rescan of the 2,000 held characters for each new one would be 200 million comparisons.
    assert time.process_time() - started < 5
    assert shown == 98_000

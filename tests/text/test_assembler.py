"""Tokens to text: the three machines together, against the same done on the whole text."""

from __future__ import annotations

from hypothesis import event, given
from hypothesis import strategies as st

from superfluidd.text.assembler import Alternative, Assembler, TokenText
from superfluidd.text.vocabulary import Vocabulary
from superfluidd.types import TokenLogprob
from tests.text.chunks import cut, nearly_utf8, places


def assembler(pieces: list[bytes], stop: tuple[str, ...] = (), want: bool = True) -> Assembler:
    return Assembler(Vocabulary(*Vocabulary.pack(pieces)), stop, want)


def push_all(made: Assembler, count: int) -> tuple[list[str], list[TokenText], bool]:
    """Every token in turn; the text of each push and of the finish."""
    shown: list[str] = []
    tokens: list[TokenText] = []
    for token in range(count):
        text, some, stopped = made.push(token, -float(token), ())
        shown.append(text)
        tokens += some
        if stopped:
            assert made.finish() == ("", ())
            assert made.push(0, -1.0, ()) == ("", (), True)
            return shown, tokens, True
    text, rest = made.finish()
    return [*shown, text], [*tokens, *rest], False


@given(nearly_utf8, places, st.lists(st.sampled_from(["a", "é", "the", " th", "\ufffd", "本", "ea"]), max_size=3))
def test_streamed_text_and_entries_equal_the_whole(data: bytes, where: list[int], stops: list[str]) -> None:
    pieces = cut(data, where)
    shown, tokens, stopped = push_all(assembler(pieces, tuple(stops)), len(pieces))
    whole = data.decode("utf-8", "replace")
    starts = [whole.index(stop) for stop in stops if stop in whole]
    event("stop" if starts else "no stop")
    expected = whole[: min(starts)] if starts else whole
    assert "".join(shown) == expected
    assert "".join(token.text for token in tokens) == expected
    # Entries are the tokens in order, from the first, each with all its bytes.
    assert [token.raw for token in tokens] == pieces[: len(tokens)]
    assert [token.logprob for token in tokens] == [-float(index) for index in range(len(tokens))]
    if not starts:
        assert len(tokens) == len(pieces)
    if stopped:
        assert starts


@given(nearly_utf8, places, st.lists(st.sampled_from(["a", "the", "本"]), max_size=2))
def test_entries_never_come_before_their_text(data: bytes, where: list[int], stops: list[str]) -> None:
    pieces = cut(data, where)
    made = assembler(pieces, tuple(stops))
    shown = told = ""
    for token in range(len(pieces)):
        text, some, stopped = made.push(token, -1.0, ())
        shown += text
        told += "".join(entry.text for entry in some)
        assert shown.startswith(told)
        if stopped:
            return


@given(nearly_utf8, places, st.lists(st.sampled_from(["a", "the"]), max_size=2))
def test_log_probabilities_do_not_change_the_text(data: bytes, where: list[int], stops: list[str]) -> None:
    pieces = cut(data, where)
    plain, none, _ = push_all(assembler(pieces, tuple(stops), want=False), len(pieces))
    assert none == []
    assert plain == push_all(assembler(pieces, tuple(stops)), len(pieces))[0]


def test_a_character_over_two_tokens_shows_once_and_takes_both_entries_along() -> None:
    made = assembler(["😀".encode()[:2], "😀".encode()[2:]])
    assert made.push(0, -0.5, ()) == ("", (), False)
    assert made.push(1, -0.25, ()) == (
        "😀",
        (TokenText("", b"\xf0\x9f", -0.5), TokenText("😀", b"\x98\x80", -0.25)),
        False,
    )


def test_the_entry_of_a_token_with_text_before_the_stop_stays_and_later_ones_go() -> None:
    made = assembler([b"one", b" two<", b"/", b">x"], ("</>",))
    assert made.push(0, -1.0, ()) == ("one", (TokenText("one", b"one", -1.0),), False)
    assert made.push(1, -2.0, ()) == (" two", (), False)
    assert made.push(2, -3.0, ()) == ("", (), False)
    assert made.push(3, -4.0, ()) == ("", (TokenText(" two", b" two<", -2.0),), True)


def test_held_text_that_was_no_stop_is_released_with_its_entries() -> None:
    made = assembler([b"a<", b"/", b"b"], ("</>",))
    assert made.push(0, -1.0, ())[0:2] == ("a", ())
    assert made.push(1, -2.0, ())[0:2] == ("", ())
    text, tokens, stopped = made.push(2, -3.0, ())
    assert (text, [token.text for token in tokens], stopped) == ("</b", ["a<", "/", "b"], False)


def test_finish_releases_what_is_held_and_marks_half_a_character() -> None:
    made = assembler([b"a<", b"\xe6\x97"], ("<\u65e5",))
    assert made.push(0, -1.0, ())[0] == "a"
    assert made.push(1, -2.0, ())[0] == ""
    text, tokens = made.finish()
    assert text == "<\ufffd"
    assert [(token.text, token.raw) for token in tokens] == [("a<", b"a<"), ("\ufffd", b"\xe6\x97")]
    assert made.finish() == ("", ())


def test_finish_releases_what_could_have_become_a_stop() -> None:
    made = assembler([b"a<", b"/"], ("</>",))
    assert made.push(0, -1.0, ())[0:2] == ("a", ())
    assert made.push(1, -2.0, ())[0:2] == ("", ())
    text, tokens = made.finish()
    assert (text, [token.text for token in tokens]) == ("</", ["a<", "/"])


def test_finish_cuts_at_a_stop_that_was_waiting_for_an_earlier_one() -> None:
    made = assembler([b"xa", b"b", b"c"], ("abcd", "bc"))
    for token, shown in enumerate(("x", "", "")):
        assert made.push(token, -1.0, ())[0] == shown
    text, tokens = made.finish()
    assert (text, [token.text for token in tokens]) == ("a", ["xa"])


def test_a_token_without_text_has_an_entry_at_once() -> None:
    made = assembler([b"", b"x"])
    assert made.push(0, -1.0, ()) == ("", (TokenText("", b"", -1.0),), False)


def test_alternatives_carry_their_own_bytes() -> None:
    made = assembler([b"yes", b"\xf0\x9f"])
    _, tokens, _ = made.push(0, -0.1, [TokenLogprob(0, -0.1), TokenLogprob(1, -3.0)])
    assert tokens[0].top == (Alternative("yes", b"yes", -0.1), Alternative("\ufffd", b"\xf0\x9f", -3.0))

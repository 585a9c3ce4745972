"""Tokens to the text of one reply: bytes, characters and stop texts in one place.

Everything that leaves is a function of the token sequence alone, so a streamed reply, a reply read at once and a
reply that went on after its worker died are the same text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from superfluidd.text.stops import StopMatcher, StopState
from superfluidd.text.utf8 import Utf8Stream
from superfluidd.text.vocabulary import Vocabulary
from superfluidd.types import TokenLogprob


class Alternative(msgspec.Struct, frozen=True):
    """A token that could have been drawn; ``text`` is its bytes decoded on their own."""

    text: str
    raw: bytes
    logprob: float


class TokenText(msgspec.Struct, frozen=True):
    """A drawn token beside the text.

    The ``text`` of all tokens, joined, is the text of the reply: a token that ends inside a character has none of
    it (the one that completes it has), and of the token that a stop text begins in only what comes before.

    Attributes:
        text: the token's share of the reply.
        raw: the token's bytes, whole in any case.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens at its place.
    """

    text: str
    raw: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()


class _Pending(msgspec.Struct):
    """A token that has not been released.

    Attributes:
        start: where its share of the text begins, in characters.
        due: characters that must be out first: its own, and the one it ends inside of.
    """

    text: str
    raw: bytes
    logprob: float
    top: tuple[Alternative, ...]
    start: int
    due: int

    def released(self, limit: int) -> TokenText:
        """As it goes out, with no text past ``limit``."""
        return TokenText(self.text[: max(0, limit - self.start)], self.raw, self.logprob, self.top)


class Assembler:
    """Turns the tokens of one reply into text that may be shown.

    Args:
        vocabulary: the model's.
        stop: texts that end the reply; they are not part of it.
        want_logprobs: also return a :class:`TokenText` for every token.
    """

    def __init__(self, vocabulary: Vocabulary, stop: tuple[str, ...], want_logprobs: bool) -> None:
        self._vocabulary = vocabulary
        self._want = want_logprobs
        self._utf8 = Utf8Stream()
        self._matcher = StopMatcher(stop)
        self._state = StopState()
        self._decoded = 0
        """Characters decoded so far; ``_released`` of them are out."""
        self._released = 0
        self._pending: deque[_Pending] = deque()
        self._ended = False
        self.stopped = False
        """A stop text has ended the reply."""

    def push(
        self, token: int, logprob: float | None, top: Iterable[TokenLogprob]
    ) -> tuple[str, tuple[TokenText, ...], bool]:
        """Add a token.

        Returns:
            Text that can be shown, the tokens that are completely shown with it (where they are wanted and came
            with a log-probability), and whether the reply has ended with a stop text. Once it has, nothing more
            comes.

        Raises:
            IndexError: the vocabulary has no such token.
        """
        if self._ended:
            return "", (), True
        raw = self._vocabulary.piece(token)
        text = self._utf8.feed(raw)
        if self._want and logprob is not None:
            start, due = self._decoded, self._decoded + len(text) + self._utf8.pending
            self._pending.append(_Pending(text, raw, logprob, self._alternatives(top), start, due))
        return self._advance(text)

    def finish(self) -> tuple[str, tuple[TokenText, ...]]:
        """The reply ends: whatever was held back, with U+FFFD for a character that was never completed."""
        if self._ended:
            return "", ()
        rest = self._utf8.finish()
        if self._pending:
            self._pending[-1].text += rest
        text, tokens, _ = self._advance(rest)
        if not self._ended:
            self._ended = True
            held, self.stopped = self._matcher.finish(self._state)
            self._released += len(held)
            text += held
            tokens += self._take(cut=True)
        return text, tokens

    def _advance(self, text: str) -> tuple[str, tuple[TokenText, ...], bool]:
        self._decoded += len(text)
        self._state, shown, self._ended = self._matcher.feed(self._state, text)
        self.stopped = self._ended
        self._released += len(shown)
        return shown, self._take(cut=self._ended), self._ended

    def _take(self, *, cut: bool) -> tuple[TokenText, ...]:
        """Tokens that are out; with ``cut`` nothing follows, so the one that begins before the cut is out as well."""
        limit, taken = self._released, []
        while self._pending and (self._pending[0].due <= limit or (cut and self._pending[0].start < limit)):
            taken.append(self._pending.popleft().released(limit))
        return tuple(taken)

    def _alternatives(self, top: Iterable[TokenLogprob]) -> tuple[Alternative, ...]:
        found = []
        for candidate in top:
            raw = self._vocabulary.piece(candidate.token)
            found.append(Alternative(raw.decode("utf-8", "replace"), raw, candidate.logprob))
        return tuple(found)

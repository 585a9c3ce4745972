"""Stop texts that may be cut anywhere: an immutable matcher, and a state of two integers per reply.

The rule is a function of the whole text, so chunking cannot matter: the reply ends before the match that *starts*
first. A match is therefore not final while a longer stop text that started earlier may still complete ("bc" is found
in "abc", but "abcd" would begin before it).

The matcher is the automaton of Aho and Corasick: each node stands for a prefix of some stop text, and after any
text the current node is the longest such prefix that the text ends with. That prefix is exactly what must be held
back, so it need not be stored, and every character is looked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopState(NamedTuple):
    """Where in the automaton a reply is.

    Attributes:
        node: the prefix that is held back.
        cut: a complete match starts that many characters into it; -1 if there is none yet.
    """

    node: int = 0
    cut: int = -1


class StopMatcher:
    """Finds the stop text that starts first.

    Args:
        stops: the stop texts. None at all is fine and matches nothing.

    Raises:
        ValueError: a stop text is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop text must not be empty")
        self._next: list[dict[str, int]] = [{}]
        self._source: list[tuple[str, int]] = [("", 0)]
        """Per node: a stop text and how many of its characters the node stands for."""
        self._match: list[int] = [0]
        """Per node: length of the longest stop text that ends here, 0 if none does."""
        for stop in stops:
            self._insert(stop)
        self._fallback = [0] * len(self._next)
        """Per node: the next shorter prefix that the text also ends with."""
        self._link()
        self._starts = frozenset(self._next[0])

    def _insert(self, stop: str) -> None:
        node = 0
        for depth, character in enumerate(stop, start=1):
            known = self._next[node].get(character)
            if known is None:
                known = len(self._next)
                self._next[node][character] = known
                self._next.append({})
                self._source.append((stop, depth))
                self._match.append(0)
            node = known
        self._match[node] = len(stop)

    def _link(self) -> None:
        level = list(self._next[0].values())
        while level:
            deeper = []
            for node in level:
                for character, child in self._next[node].items():
                    self._fallback[child] = fallback = self._advance(self._fallback[node], character)
                    self._match[child] = self._match[child] or self._match[fallback]
                    deeper.append(child)
            level = deeper

    def _advance(self, node: int, character: str) -> int:
        while True:
            found = self._next[node].get(character)
            if found is not None:
                return found
            if not node:
                return 0
            node = self._fallback[node]

    def feed(self, state: StopState, text: str) -> tuple[StopState, str, bool]:
        """Go on with some more text.

        Returns:
            The new state, the text that can be released, and whether a stop text was found. When it was, the
            released text is the last there is: the stop text and what follows it are gone.
        """
        if not state.node and self._starts.isdisjoint(text):
            return state, text, False
        node = state.node
        held = self._source[node][1]
        best = state.cut
        for end, character in enumerate(text, start=held + 1):
            node = self._advance(node, character)
            match = self._match[node]
            if match and (best < 0 or end - match < best):
                best = end - match
            if 0 <= best <= end - self._source[node][1]:
                return StopState(), self._release(state, text, best), True
        release = held + len(text) - self._source[node][1]
        cut = best - release if best >= 0 else -1
        return StopState(node, cut), self._release(state, text, release), False

    def _release(self, state: StopState, text: str, length: int) -> str:
        stop, held = self._source[state.node]
        return stop[: min(held, length)] + text[: max(0, length - held)]

    def held(self, state: StopState) -> int:
        """How many characters are held back."""
        return self._source[state.node][1]

    def finish(self, state: StopState) -> tuple[str, bool]:
        """The text ends here: what was held back, up to a match if it contains one; and whether it does."""
        stop, held = self._source[state.node]
        return (stop[: state.cut], True) if state.cut >= 0 else (stop[:held], False)

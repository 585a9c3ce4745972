"""The simulated runtime: deterministic tokens, a cost model in seconds, no weights.

A token is a hash of (seed, every token the sequence was fed), so a lane that was fed the wrong tokens, or was cut at
the wrong place, says something else. Time is a number this runtime adds up; with ``pace`` it also really passes.

It ships in the product: ``superfluidd serve --engine simulated`` tries a configuration or a client without a model,
and whole-daemon tests run on it in virtual time with exact figures.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Literal

from superfluidd.engine.port import Choice, Draw, EngineInfo, Feed, OutOfCells, StepAbandoned, StepFailed
from superfluidd.engine.wire import LoadSpec
from superfluidd.types import TokenLogprob

ROUND_SECONDS = 0.008
LANE_SECONDS = 0.001
"""A decode round costs ROUND_SECONDS and LANE_SECONDS for every lane in it."""

PREFILL_SECONDS = 0.002
PREFILL_RATE = 400.0
"""A prefill micro-batch costs PREFILL_SECONDS and its tokens at PREFILL_RATE a second."""

BOS, EOS, TURN, END_OF_TURN = 256, 257, 258, 259
SPECIALS = {BOS: "<|bos|>", EOS: "<|end|>", TURN: "<|im_start|>", END_OF_TURN: "<|im_end|>"}
HALF, OTHER_HALF = 260, 261
"""Two tokens that make one character between them; the second always follows the first."""

_SYLLABLES = ("la", "ne", "ti", "or", "mu", "sa", "vel", "in", "qua", "ré", "do", "than", "ex", "pi", "gor", "ul")
_WORDS = [f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES] + ["\n", ".", ",", " a", " 日本"]
_PIECES = (
    [bytes([byte]) for byte in range(256)]
    + [b""] * len(SPECIALS)
    + ["😀".encode()[:2], "😀".encode()[2:]]
    + [word.encode() for word in _WORDS]
)
_FIRST_WORD = OTHER_HALF + 1
_WORD_IDS = {word: _FIRST_WORD + index for index, word in enumerate(_WORDS)}
_SPECIAL_IDS = {text: token for token, text in SPECIALS.items()}
_SPLIT_SPECIALS = re.compile("|".join(re.escape(text) for text in SPECIALS.values()))
_SPLIT_WORDS = re.compile("|".join(re.escape(word) for word in sorted(_WORDS, key=len, reverse=True)))

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_DRAWN = {END_OF_TURN, HALF, *_WORD_IDS.values()}
"""Tokens that a hash can choose."""

CELL_BYTES = 8
"""Of KV, a token."""

_MASK = (1 << 61) - 1
_END_ONE_IN = 128


class SimulatedRuntime:
    """A runtime of arithmetic.

    Args:
        spec: layout, lanes and cells as for a real runtime; the path is ignored.
        pace: called with every cost in seconds, for example ``time.sleep``; None lets only the virtual clock run.
    """

    def __init__(self, spec: LoadSpec, pace: Callable[[float], None] | None = None) -> None:
        layout: Literal["shared", "per-sequence"] = "shared" if spec.layout == "shared" else "per-sequence"
        window = spec.window if layout == "per-sequence" else min(spec.window, spec.cells)
        self._speed = spec.simulated_speed
        self._pace = pace
        self._now = 0.0
        self._abandon = threading.Event()
        self._computed = 0
        self._sequences: list[list[int]] = [[] for _ in range(spec.lanes + spec.spare)]
        """Per sequence: a running hash after each token fed."""
        self._rows: list[int] = []
        self.info = EngineInfo(
            runtime="simulated",
            version="1",
            architecture="simulated",
            description="simulated engine, no weights",
            layout=layout,
            cells=spec.cells if layout == "shared" else window * (spec.lanes + spec.spare),
            lanes=spec.lanes,
            sequences=spec.lanes + spec.spare,
            window=window,
            trained_context=1 << 20,
            bytes_per_cell=CELL_BYTES,
            weights_bytes=0,
            cut="anywhere",
            round_granular=True,
            abandons=True,
            packs_prefill_with_decode=False,
            max_step=spec.micro_batch,
            threads=0,
            vocabulary=len(_PIECES),
            add_bos=False,
            bos=BOS,
            eos=EOS,
            end_tokens=(EOS, END_OF_TURN),
            chat_template=TEMPLATE,
            bos_text=SPECIALS[BOS],
            eos_text=SPECIALS[EOS],
        )

    def length(self, sequence: int) -> int:
        """Tokens fed and not cut."""
        return len(self._sequences[sequence])

    def cells_used(self) -> int:
        """One cell a token."""
        return sum(map(len, self._sequences))

    def computed(self) -> int:
        """Tokens charged for."""
        return self._computed

    def free(self, sequence: int) -> None:
        """Empty the sequence."""
        self._sequences[sequence].clear()

    def cut(self, sequence: int, length: int) -> bool:
        """Always possible."""
        del self._sequences[sequence][length:]
        return True

    def copy(self, source: int, sequence: int, length: int) -> None:
        """The hashes of the tokens."""
        self._fill(sequence, self._sequences[source], length)

    def export(self, sequence: int) -> bytes:
        """CELL_BYTES bytes a token."""
        return array("q", self._sequences[sequence]).tobytes()

    def restore(self, sequence: int, state: bytes, length: int) -> None:
        """What was exported."""
        hashes = array("q")
        try:
            hashes.frombytes(state)
        except ValueError as error:
            raise StepFailed(f"a state of {len(state)} bytes is not whole") from error
        self._fill(sequence, hashes, length)

    def _fill(self, sequence: int, hashes: Sequence[int], length: int) -> None:
        if len(hashes) < length:
            raise StepFailed(f"{length} tokens are wanted of {len(hashes)}")
        if self.info.layout == "shared" and self.cells_used() + length > self.info.cells:
            raise OutOfCells(f"{length} more tokens do not fit beside {self.cells_used()} in {self.info.cells} cells")
        self._sequences[sequence] = list(hashes[:length])

    def step(self, feeds: Sequence[Feed], *, abandonable: bool = False) -> None:
        """Charge for the tokens and take them in."""
        total = sum(len(feed.tokens) for feed in feeds)
        if self.info.layout == "shared" and self.cells_used() + total > self.info.cells:
            raise OutOfCells(f"{total} more tokens do not fit beside {self.cells_used()} in {self.info.cells} cells")
        for feed in feeds:
            held = len(self._sequences[feed.sequence])
            if feed.start != held or feed.start + len(feed.tokens) > self.info.window:
                raise OutOfCells(f"sequence {feed.sequence} holds {held} of {self.info.window} tokens")
        self._charge(self.step_seconds(total, len(feeds)), abandonable)
        self._computed += total
        for feed in feeds:
            hashes = self._sequences[feed.sequence]
            state = hashes[-1] if hashes else 7
            for token in feed.tokens:
                state = (state * 1_000_003 + token + 1) & _MASK
                hashes.append(state)
        self._rows = [feed.sequence for feed in feeds]

    def abandon(self, wanted: bool) -> None:
        """Noted at once; an abandonable step that really takes its time ends at once, too."""
        (self._abandon.set if wanted else self._abandon.clear)()

    def step_seconds(self, tokens: int, lanes: int) -> float:
        """What a step of so many tokens in so many lanes costs: a token a lane is a decode round."""
        nominal = ROUND_SECONDS + LANE_SECONDS * lanes if tokens == lanes else PREFILL_SECONDS + tokens / PREFILL_RATE
        return nominal / self._speed

    def _charge(self, seconds: float, abandonable: bool) -> None:
        if abandonable and (self._abandon.wait(seconds) if self._pace else self._abandon.is_set()):
            raise StepAbandoned("the step was given up")
        self._now += seconds
        if self._pace is not None and not abandonable:
            self._pace(seconds)

    def choose(self, feed: int, draw: Draw) -> Choice:
        """The hash's choice among the tokens the parameters leave."""
        params = draw.params
        if draw.history and draw.history[-1] == HALF:
            return Choice(OTHER_HALF, *self._logprobs([OTHER_HALF], params.logprobs))
        key = self._sequences[self._rows[feed]][-1]
        if params.temperature > 0:
            key ^= (params.seed * 0x9E3779B97F4A7C15) & _MASK
        banned = {token for token, bias in params.logit_bias if bias <= -100}
        forced = [token for token, bias in params.logit_bias if bias >= 100]
        if params.ignore_eos:
            banned.update(draw.end_tokens)
        candidates = forced or list(self._candidates(key, banned, 1 + (params.logprobs or 0)))
        return Choice(candidates[0], *self._logprobs(candidates, params.logprobs))

    def _candidates(self, key: int, banned: set[int], count: int) -> list[int]:
        allowed = len(_DRAWN - banned)
        if not allowed:
            raise ValueError("every token this engine draws is forbidden")
        found: list[int] = []
        while len(found) < min(count, allowed):
            key = ((key ^ (key >> 29)) * 0xBF58476D1CE4E5B9 + 1) & _MASK
            token = END_OF_TURN if (key >> 7) % _END_ONE_IN == 0 else HALF if (key >> 7) % 97 == 0 else None
            token = _FIRST_WORD + (key >> 17) % len(_WORDS) if token is None else token
            if token not in banned and token not in found:
                found.append(token)
        return found

    @staticmethod
    def _logprobs(candidates: list[int], wanted: int | None) -> tuple[float | None, tuple[TokenLogprob, ...]]:
        if wanted is None:
            return None, ()
        return -0.5, tuple(TokenLogprob(token, -0.5 - rank) for rank, token in enumerate(candidates[:wanted]))

    def seconds(self) -> float:
        """The sum of all costs so far."""
        return self._now

    def set_threads(self, decode: int, prefill: int) -> None:
        """There are none."""

    def tokenize(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """Known words first, then bytes."""
        tokens = [BOS] if add_bos else []
        at = 0
        for special in _SPLIT_SPECIALS.finditer(text) if parse_special else ():
            tokens += _plain(text[at : special.start()])
            tokens.append(_SPECIAL_IDS[special.group()])
            at = special.end()
        return tokens + _plain(text[at:])

    def pieces(self) -> list[bytes]:
        """Text of every token."""
        return list(_PIECES)

    def close(self) -> None:
        """Nothing is held."""


def _plain(text: str) -> list[int]:
    tokens: list[int] = []
    at = 0
    for word in _SPLIT_WORDS.finditer(text):
        tokens += text[at : word.start()].encode("utf-8", "replace")
        tokens.append(_WORD_IDS[word.group()])
        at = word.end()
    tokens += text[at:].encode("utf-8", "replace")
    return tokens

"""KV of MLX sequences: each alone in caches of its own, or as one row of the batch that decodes together.

mlx-lm has a class for either form of every kind of cache, and ways from one to the other: ``merge`` and ``extend`` for
those who join, ``extract`` and ``filter`` for those who leave. Which sequences are rows is decided by who decodes in a
step, nothing else: there is no queue here. Joining and leaving copies, so rows stay rows for as long as the same
sequences decode.

The caches' arrays are lazy. Who hands them to somebody else evaluates them first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from superfluidd.engine.port import StepFailed

log = logging.getLogger(__name__)

Caches = list[Any]
"""One cache of mlx-lm for every layer."""

GONE = -1
"""The sequence of a row that nobody wants any more."""


class Sequences:
    """KV of all sequences.

    Args:
        make: caches of an empty sequence.
        count: how many sequences there are.
    """

    def __init__(self, make: Callable[[], Caches], count: int) -> None:
        self._make = make
        self._alone: list[Caches | None] = [None] * count
        self._rows: list[int] = []
        self._batch: Caches = []
        self.lengths = [0] * count
        """Tokens that each holds."""

    @property
    def rows(self) -> Sequence[int]:
        """The sequences that are rows of the batch."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, room they have reserved included."""
        alone = sum(cache.nbytes for caches in self._alone if caches for cache in caches)
        return int(alone + sum(cache.nbytes for cache in self._batch))

    def reset(self, sequence: int) -> None:
        """Empty a sequence."""
        self._alone[sequence] = None
        self.lengths[sequence] = 0
        if sequence in self._rows:
            self._rows[self._rows.index(sequence)] = GONE
            if all(row == GONE for row in self._rows):
                self._rows, self._batch = [], []

    # -- alone or together ----------------------------------------------------------------------------------------

    def alone(self, sequence: int) -> Caches:
        """A sequence's caches, out of the batch if it was there.

        Raises:
            StepFailed: they could not be taken out; the sequence is empty.
        """
        if sequence in self._rows:
            self._leave([sequence])
            if self._alone[sequence] is None:
                raise StepFailed(f"KV of sequence {sequence} was lost")
        caches = self._alone[sequence]
        if caches is None:
            caches = self._alone[sequence] = self._make()
        return caches

    def together(self, sequences: Sequence[int]) -> tuple[Caches, list[int]]:
        """Batch caches with one row for each of these, and for nobody else; and which sequence each row is.

        Raises:
            StepFailed: it could not be made; every sequence is alone now, or empty if even that failed.
        """
        wanted = set(sequences)
        if any(row not in wanted for row in self._rows):
            self._leave([row for row in self._rows if row != GONE and row not in wanted])
        joining = [sequence for sequence in sequences if sequence not in self._rows]
        if joining:
            self._join(joining)
        return self._batch, list(self._rows)

    def _join(self, joining: list[int]) -> None:
        ready = [self.alone(sequence) for sequence in joining]
        try:
            batch = [layers[0].merge(list(layers)) for layers in zip(*ready, strict=True)]
            if self._batch:
                for old, new in zip(self._batch, batch, strict=True):
                    old.extend(new)
            else:
                self._batch = batch
            mx.eval([cache.state for cache in self._batch])
        except Exception as error:  # whatever a cache class raises, the batch is half made
            self._dissolve()
            raise StepFailed(f"the batch could not be made: {_words(error)}") from error
        self._rows = [*self._rows, *joining]
        for sequence in joining:
            self._alone[sequence] = None

    def _leave(self, leaving: Sequence[int]) -> None:
        """Take rows out, and with them those that are gone. A row that cannot be saved is lost, the others stay."""
        for sequence in leaving:
            self._extract(sequence)
        left = {*leaving, GONE}
        keep = [index for index, row in enumerate(self._rows) if row not in left]
        if not keep:
            self._rows, self._batch = [], []
            return
        try:
            for cache in self._batch:
                cache.filter(keep)
            mx.eval([cache.state for cache in self._batch])
        except Exception as error:  # whatever a cache class raises, the batch is half filtered
            log.warning("the MLX batch could not be filtered (%s); every lane leaves it", _words(error))
            self._rows = [GONE if row in left else row for row in self._rows]
            self._dissolve()
            return
        self._rows = [self._rows[index] for index in keep]

    def _extract(self, sequence: int) -> None:
        row = self._rows.index(sequence)
        try:
            caches = [cache.extract(row) for cache in self._batch]
            mx.eval([cache.state for cache in caches])
            if any(held != self.lengths[sequence] for cache in caches if (held := _held(cache)) is not None):
                raise StepFailed("its caches do not hold its tokens")
        except Exception as error:  # whatever a cache class raises: this row is lost, its neighbours are not
            log.warning("KV of sequence %d could not be taken out of the MLX batch: %s", sequence, _words(error))
            self._rows[row] = GONE
            self.lengths[sequence] = 0
            self._alone[sequence] = None
            return
        self._alone[sequence] = caches

    def _dissolve(self) -> None:
        """The batch is over: who can be saved is alone from now on."""
        for sequence in [row for row in self._rows if row != GONE]:
            if self._alone[sequence] is None:
                self._extract(sequence)
        self._rows, self._batch = [], []

    # -- prompts in one pass --------------------------------------------------------------------------------------

    def merged(self, sequences: Sequence[int], lengths: Sequence[int]) -> Caches:
        """Batch caches of copies, a row for each sequence, for so many more tokens of each, shorter ones padded at
        their end."""
        rows = [self.alone(sequence) for sequence in sequences]
        caches = [layers[0].merge(list(layers)) for layers in zip(*rows, strict=True)]
        padding = [max(lengths) - length for length in lengths]
        if any(padding):
            for cache in caches:
                cache.prepare(lengths=list(lengths), right_padding=padding)
        return caches

    def separate(self, caches: Caches, sequences: Sequence[int], lengths: Sequence[int]) -> None:
        """The rows of :meth:`merged`, fed, are the sequences' caches from now on."""
        if len(set(lengths)) > 1:
            for cache in caches:
                cache.finalize()
        rows = [[cache.extract(row) for cache in caches] for row in range(len(sequences))]
        mx.eval([[cache.state for cache in row] for row in rows])
        for sequence, length, row in zip(sequences, lengths, rows, strict=True):
            held = self.lengths[sequence] + length
            if any(found != held for cache in row if (found := _held(cache)) is not None):
                raise StepFailed(f"sequence {sequence} does not hold {held} tokens after its step")
        for sequence, row in zip(sequences, rows, strict=True):
            self._alone[sequence] = row

    # -- shorter, copied, saved -----------------------------------------------------------------------------------

    def cut(self, sequence: int, length: int) -> bool:
        """Shorten a sequence; False if its caches cannot, and then nothing has changed."""
        if length <= 0:
            self.reset(sequence)
            return True
        if length >= self.lengths[sequence]:
            return length == self.lengths[sequence]
        caches = self.alone(sequence)
        if not all(cache.is_trimmable() for cache in caches):
            return False
        for cache in caches:
            cache.trim(self.lengths[sequence] - length)
        self.lengths[sequence] = length
        return True

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Make an empty sequence hold the beginning of another. Plain caches share their arrays until one of the two
        writes.

        Raises:
            StepFailed: the source is too short, or cannot be cut there.
        """
        self.adopt(sequence, self.state(source), self.lengths[source], length)

    def state(self, sequence: int) -> list[Any]:
        """What a sequence's caches hold: arrays, numbers and lists of them, for :meth:`adopt`."""
        caches = self.alone(sequence)
        mx.eval([cache.state for cache in caches])
        return [_short(cache) for cache in caches]

    def adopt(self, sequence: int, state: Sequence[Any], held: int, length: int) -> None:
        """Make an empty sequence hold ``length`` tokens of a state of ``held``.

        Raises:
            StepFailed: it does not fit this model's caches; the sequence is empty.
        """
        caches = self._make()
        try:
            if len(state) != len(caches):
                raise ValueError(f"{len(state)} layers, not {len(caches)}")
            for cache, one in zip(caches, state, strict=True):
                cache.state = one
                if (found := _held(cache)) is not None and found != held:
                    raise ValueError(f"{found} tokens, not {held}")
            mx.eval([cache.state for cache in caches])
        except Exception as error:  # whatever a setter raises: it is not a state of this model
            self.reset(sequence)
            raise StepFailed(f"MLX cannot bring the state back: {_words(error)}") from error
        self._alone[sequence] = caches
        self.lengths[sequence] = held
        if not self.cut(sequence, length):
            self.reset(sequence)
            raise StepFailed(f"{length} tokens of a state of {held} cannot be brought back")


class Undo:
    """How caches were before a step, so that a step that failed half way leaves nothing.

    Args:
        caches: those that the step will change.
    """

    def __init__(self, caches: Caches) -> None:
        self._marks = [_mark(cache) for cache in caches]

    def back(self) -> bool:
        """Undo. False if some cache has overwritten what it held: then all of it is to be thrown away."""
        done = True
        for mark in self._marks:
            done = mark() and done
        return done


def _mark(cache: Any) -> Callable[[], bool]:
    match cache:
        case CacheList():
            return Undo(list(cache.caches)).back
        case ArraysCache():
            held, padding, lengths = list(cache.cache), cache.left_padding, cache.lengths

            def restore() -> bool:
                cache.cache, cache.left_padding, cache.lengths = held, padding, lengths
                return True

            return restore
        case KVCache():
            return _trimmer(cache, lambda: cache.offset)
        case BatchKVCache():
            return _trimmer(cache, lambda: cache._idx)
        case RotatingKVCache():
            return _trimmer(cache, lambda: cache.offset)
        case BatchRotatingKVCache():
            return _trimmer(cache, lambda: cache._offset)
        case _:
            return lambda: False


def _trimmer(cache: Any, position: Callable[[], int]) -> Callable[[], bool]:
    before = position()

    def trim() -> bool:
        grown = position() - before
        # A window that is full has overwritten its oldest token.
        if grown and not cache.is_trimmable():
            return False
        cache.trim(grown)
        return True

    return trim


def _held(cache: Any) -> int | None:
    """Tokens that a cache says it has seen; None where it does not count."""
    if isinstance(cache, KVCache | RotatingKVCache):
        return int(cache.offset)
    if isinstance(cache, CacheList):
        return next((held for one in cache.caches if (held := _held(one)) is not None), None)
    return None


def _short(cache: Any) -> Any:
    """The state without the room that is reserved behind it, in arrays of its own."""
    if isinstance(cache, CacheList):
        return [_short(one) for one in cache.caches]
    if isinstance(cache, KVCache) and cache.keys is not None:
        return [cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :], cache.offset]
    return _own(cache.state)


def _own(value: Any) -> Any:
    """The same tree with array objects of its own: caches assign into theirs."""
    if isinstance(value, list | tuple):
        return [_own(one) for one in value]
    return mx.array(value) if isinstance(value, mx.array) else value


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

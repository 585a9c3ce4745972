"""The KV pool in the scheduler's books: cells and sequences, each promised at most once.

Two layouts, one interface. In the *shared* layout sequences draw cells from one pool, so the sum of promises is
bounded by its size. In the *per-sequence* layout every sequence owns a window, so a free sequence is all it takes.

A promise covers everything a running request may still need. What requests leave behind is *kept*: it is worth having,
and goes without harm when a promise needs the room. Who is kept and who goes is :mod:`superfluidd.scheduling.kv`'s
business.
"""

from __future__ import annotations


class KvPool:
    """Promises of cells.

    Args:
        shared: one pool for all, or a window per sequence.
        cells: cells in all, tokens.
        sequences: sequences in all.
        window: longest context of one sequence, tokens.
    """

    def __init__(self, *, shared: bool, cells: int, sequences: int, window: int) -> None:
        self.shared = shared
        self.cells = cells
        self.limit = min(window, cells)
        """The longest context any request can have, tokens."""
        self._free = list(range(sequences))
        self._promises: dict[int, int] = {}
        self._kept: dict[int, int] = {}

    @property
    def promised(self) -> int:
        """Cells promised to seated requests."""
        return sum(self._promises.values())

    @property
    def kept(self) -> int:
        """Cells of kept sequences."""
        return sum(self._kept.values())

    def fits(self, cells: int) -> bool:
        """Whether ``cells`` can be promised: what is kept is in nobody's way."""
        if not (self._free or self._kept) or cells > self.limit:
            return False
        return not self.shared or self.promised + cells <= self.cells

    def short(self, cells: int, own: int | None = None) -> bool:
        """Whether something that is kept has to go before ``cells`` are promised; ``own`` is the kept sequence that
        the promise is to go on with."""
        kept = self.kept if own is None else self.kept - self._kept[own]
        return (own is None and not self._free) or (self.shared and self.promised + kept + cells > self.cells)

    def promise(self, cells: int, own: int | None = None) -> int:
        """Promise ``cells`` that fit and are not short.

        Args:
            cells: how many.
            own: a kept sequence to go on with.

        Returns:
            The sequence that may fill them, by default the lowest free one, because runtimes work best on neighbours.
        """
        if not self.fits(cells) or self.short(cells, own):
            raise ValueError(
                f"{cells} cells do not fit: {self.promised} of {self.cells} are promised, {self.kept} kept"
            )
        if own is None:
            own = min(self._free)
            self._free.remove(own)
        else:
            del self._kept[own]
        self._promises[own] = cells
        return own

    def release(self, sequence: int) -> None:
        """Take a promise back."""
        del self._promises[sequence]
        self._free.append(sequence)

    def keep(self, sequence: int, cells: int) -> None:
        """Turn a promise into something worth keeping: the ``cells`` it has filled."""
        del self._promises[sequence]
        self._kept[sequence] = cells

    def drop(self, sequence: int) -> None:
        """Give up a kept sequence."""
        del self._kept[sequence]
        self._free.append(sequence)

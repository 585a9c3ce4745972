"""The KV pool in the scheduler's books: cells and sequences, each promised at most once.

Two layouts, one interface. In the *shared* layout sequences draw cells from one pool, so the sum of promises is
bounded by its size. In the *per-sequence* layout every sequence owns a window, so a free sequence is all it takes.
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

    @property
    def promised(self) -> int:
        """Cells promised to seated requests."""
        return sum(self._promises.values())

    def fits(self, cells: int) -> bool:
        """Whether :meth:`promise` would succeed."""
        if not self._free or cells > self.limit:
            return False
        return not self.shared or self.promised + cells <= self.cells

    def promise(self, cells: int) -> int:
        """Promise ``cells`` and return the sequence that may fill them: the lowest free one, because runtimes work
        best on neighbours."""
        if not self.fits(cells):
            raise ValueError(f"{cells} cells do not fit: {self.promised} of {self.cells} are promised")
        sequence = min(self._free)
        self._free.remove(sequence)
        self._promises[sequence] = cells
        return sequence

    def release(self, sequence: int) -> None:
        """Take a promise back."""
        del self._promises[sequence]
        self._free.append(sequence)

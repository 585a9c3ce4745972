"""The KV pool in the scheduler's books: cells and sequences, each promised at most once.

Two layouts, one interface. In the *shared* layout sequences draw cells from one pool, so the sum of promises is
bounded by its size. In the *per-sequence* layout every sequence owns a window, so a free sequence is all it takes.

A promise covers everything a running request may still need. What a preempted request leaves behind is *held*: it is
worth keeping, and goes without harm when a promise needs the room.
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
        self._held: dict[int, tuple[tuple[int, int], int]] = {}
        """Sequence -> (rank, cells). The highest rank goes first."""

    @property
    def promised(self) -> int:
        """Cells promised to seated requests."""
        return sum(self._promises.values())

    @property
    def held(self) -> int:
        """Cells of held sequences."""
        return sum(cells for _, cells in self._held.values())

    def fits(self, cells: int) -> bool:
        """Whether :meth:`promise` would succeed: what is held is in nobody's way."""
        if not (self._free or self._held) or cells > self.limit:
            return False
        return not self.shared or self.promised + cells <= self.cells

    def promise(self, cells: int, own: int | None = None) -> tuple[int, list[int]]:
        """Promise ``cells``.

        Args:
            cells: how many.
            own: a held sequence to go on with.

        Returns:
            The sequence that may fill them, by default the lowest free one, because runtimes work best on neighbours;
            and the held sequences that had to go for it, which the engine must empty.
        """
        if not self.fits(cells):
            raise ValueError(f"{cells} cells do not fit: {self.promised} of {self.cells} are promised")
        if own is not None:
            del self._held[own]
        gone: list[int] = []
        while (own is None and not self._free) or (
            self.shared and self._held and self.promised + self.held + cells > self.cells
        ):
            gone.append(max(self._held, key=lambda sequence: self._held[sequence][0]))
            self.drop(gone[-1])
        sequence = min(self._free) if own is None else own
        if own is None:
            self._free.remove(sequence)
        self._promises[sequence] = cells
        return sequence, gone

    def release(self, sequence: int) -> None:
        """Take a promise back."""
        del self._promises[sequence]
        self._free.append(sequence)

    def hold(self, sequence: int, cells: int, rank: tuple[int, int]) -> None:
        """Turn a promise into something worth keeping.

        Args:
            sequence: as promised.
            cells: cells it has filled.
            rank: of several, the highest goes first.
        """
        del self._promises[sequence]
        self._held[sequence] = (rank, cells)

    def drop(self, sequence: int) -> None:
        """Give up a held sequence."""
        del self._held[sequence]
        self._free.append(sequence)

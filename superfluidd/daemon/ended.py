"""Requests that have ended, as long as somebody may want to record them: class, times and counts, no text."""

from __future__ import annotations

from collections import deque

from superfluidd.control.protocol import TraceEntry, TraceResult

KEPT = 4096
"""Entries kept. A recorder asks twice a second."""

AT_ONCE = 2048
"""Entries of one answer, so that it stays well below the longest line."""


class Ended:
    """A ring of entries with a cursor that only grows."""

    def __init__(self) -> None:
        self._entries: deque[TraceEntry] = deque(maxlen=KEPT)
        self._count = 0

    def add(self, entry: TraceEntry) -> None:
        """A request has ended."""
        self._entries.append(entry)
        self._count += 1

    def since(self, cursor: int) -> TraceResult:
        """Entries from a cursor on; a negative one, or one from before a restart, asks for the present cursor."""
        if not 0 <= cursor <= self._count:
            return TraceResult((), self._count)
        first = self._count - len(self._entries)
        start = max(cursor, first)
        wanted = [self._entries[index - first] for index in range(start, min(self._count, start + AT_ONCE))]
        return TraceResult(tuple(wanted), start + len(wanted), start - cursor)

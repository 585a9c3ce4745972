"""The decision record: what the scheduler decided about one request, and why. Bounded and structured; no text of any
prompt or reply is in it.

``sfctl explain`` tells it in the sentences that :func:`sentences` makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, assert_never

import msgspec

Kind = Literal[
    "queued",
    "overtaken",
    "capped",
    "held-back",
    "class-paused",
    "memory-critical",
    "awaits-prefix",
    "admitted",
    "resumed",
    "starved-up",
    "preempted",
    "engine-lost",
    "refused-by-engine",
    "abandoned",
    "first-token",
    "reclassed",
    "pinned",
    "unpinned",
    "finished",
]

MOST = 64
"""Entries kept of one request."""

BEGINNING = 8
"""Of which so many are its first ones; what is dropped, is dropped from the middle."""

_REPEATS: tuple[Kind, ...] = (
    *("overtaken", "capped", "held-back", "class-paused", "memory-critical", "awaits-prefix", "abandoned"),
)
"""Kinds that one after the other are counted in one entry."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One decision.

    Attributes:
        at: when, seconds on the scheduler's clock; ``until``: when it was last repeated.
        tick: number of the latest tick then.
        kind: what was decided.
        qos: the class it was decided in, or the new one.
        other: id of the request it was decided for, the latest if there were several; ``other_qos``: its class.
        lane: the lane given or lost.
        count: how many times in a row; for ``queued``, how many waited in the same class before it.
        tokens: tokens concerned: in KV already, or given up.
        why: in words, where the kind does not say it.
    """

    at: float
    tick: int
    kind: Kind
    qos: str = ""
    until: float = 0.0
    other: int = 0
    other_qos: str = ""
    lane: int = -1
    count: int = 1
    tokens: int = 0
    why: str = ""


class Trail:
    """The entries of one request, oldest first."""

    __slots__ = ("_entries", "dropped")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self.dropped = 0
        """Entries that had to go."""

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """Add an entry; a repetition of the last one is counted in it."""
        last = self._entries[-1] if self._entries else None
        if last is not None and entry.kind in _REPEATS and last.kind == entry.kind and last.qos == entry.qos:
            self._entries[-1] = msgspec.structs.replace(
                entry,
                at=last.at,
                until=entry.at,
                count=last.count + 1,
                tokens=entry.tokens + (last.tokens if entry.kind == "abandoned" else 0),
            )
            return
        if len(self._entries) == MOST:
            del self._entries[BEGINNING]
            self.dropped += 1
        self._entries.append(entry)


def sentences(entries: Sequence[Entry], dropped: int = 0) -> list[str]:
    """The trail in words: one line per entry, each with the seconds since the first."""
    if not entries:
        return []
    start = entries[0].at
    lines = [f"{entry.at - start:9.3f} s  {_sentence(entry, entry.until - start)}" for entry in entries]
    if dropped:
        lines.insert(BEGINNING, f"{'':11}  ({dropped} entries are not kept)")
    return lines


def _sentence(entry: Entry, until: float) -> str:
    other = f"request {entry.other} ({entry.other_qos})"
    size = f" of {entry.tokens} tokens" if entry.tokens else ""
    times = "" if entry.count == 1 else f" {entry.count} times, the last time at {until:.3f} s"
    match entry.kind:
        case "queued":
            ahead = f"{entry.count} ahead of it" if entry.count else "nobody ahead of it"
            return f"queued as {entry.qos}, {ahead} in its class" + (f"; {entry.why}" if entry.why else "")
        case "overtaken":
            return f"overtaken by {other}" + (f" and others:{times}" if times else "")
        case "capped":
            return f"passed over{times}: {entry.qos} holds all the lanes that its cap allows ({entry.why})"
        case "held-back":
            return f"held back{times} while batch-invariant {other} waits"
        case "class-paused":
            return f"passed over{times}: an operator has paused the class {entry.qos}"
        case "memory-critical":
            return f"passed over{times}: memory is short, and no lanes go to {entry.qos} requests{size}"
        case "awaits-prefix":
            return f"waits{times} until {other} has been fed what both their prompts begin with"
        case "admitted":
            cached = f"; {entry.tokens} tokens of its prompt were cached" if entry.tokens else ""
            return f"got lane {entry.lane}" + (f"; {entry.why}" if entry.why else "") + cached
        case "resumed":
            kept = f"{entry.tokens} tokens of KV were still there" if entry.tokens else "its KV is prefilled again"
            return f"resumed in lane {entry.lane}; {kept}"
        case "starved-up":
            return f"had waited long enough to count as {entry.why}, and went ahead of {other}"
        case "preempted":
            cause = f" for {other}" if entry.other else ""
            return f"gave lane {entry.lane} up{cause}; {entry.tokens} tokens of its KV are held" + (
                f" ({entry.why})" if entry.why else ""
            )
        case "engine-lost":
            return f"lost lane {entry.lane} with the engine; it keeps its tokens and is prefilled again"
        case "refused-by-engine":
            return f"sent back to the head of its queue: {entry.why}"
        case "abandoned":
            return f"a prefill step was given up{times} so that {entry.why} need not wait; {entry.tokens} tokens again"
        case "first-token":
            return f"first token, {entry.why} after it arrived"
        case "reclassed":
            return f"re-classed to {entry.qos} by an operator"
        case "pinned":
            return f"pinned by an operator: what it leaves is kept, {entry.tokens} tokens by now"
        case "unpinned":
            return "unpinned by an operator"
        case "finished":
            return f"ended: {entry.why}"
        case _:
            assert_never(entry.kind)

"""What the KV pool holds besides running requests: the prefix cache, and what preempted requests left behind.

What a request leaves becomes an *entry*: its tokens, and where their KV is: resident in a sequence of the pool, or
saved in the engine's host memory. A request that is seated starts from the longest prefix that an entry or a running
lane has of its tokens. An entry of a waiting request is its own: others may copy it but not take it over.

Nothing here talks to the engine: what is to be done is written down in ``ops``, in order, for the next plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from superfluidd.scheduling.plan import Copy, Cut, Discard, Export, Free, Import, KvOp
from superfluidd.scheduling.pool import KvPool
from superfluidd.scheduling.request import Request
from superfluidd.scheduling.statistics import Counters, KvStatistics

LEAST_PART = 128
"""A prefix that is a smaller part of what would have to be copied for it is not worth it."""

TOKEN_BYTES = 4


class Cache(msgspec.Struct, frozen=True):
    """How KV is kept.

    Attributes:
        enabled: requests are seeded from what others left; otherwise only preempted requests keep theirs.
        cut: where the engine can shorten a sequence, as in its info.
        host_bytes: most bytes of KV saved in host memory.
        cell_bytes: KV bytes of a token, as long as nothing has been measured; 0 asks the engine.
        least: the shortest prefix that is worth seeding from, tokens: feeding a shorter one costs less than finding it
            a place may.
        wait_seconds: a prefix whose prefill takes that long is worth waiting for while another lane is fed it.
        high, low: above that part of the pool entries go until it is below the other (source: the specification,
            "Memory pressure").
    """

    enabled: bool = False
    cut: Literal["anywhere", "window", "head"] = "anywhere"
    host_bytes: int = 0
    cell_bytes: int = 0
    least: int = 32
    wait_seconds: float = 0.5
    high: float = 0.85
    low: float = 0.70


@dataclass(slots=True, eq=False)
class Entry:
    """KV that is kept.

    Attributes:
        tokens: what it holds, packed; ``length``: how many.
        sequence: where it is resident, or None; ``blob``: the number it is saved under, or None.
        bytes: size of what is saved.
        owner: the waiting request it belongs to, if any.
        used: when it was last of use; counts, not seconds.
        pinned: an operator wants it kept: it goes after everything else.
    """

    tokens: bytes
    length: int
    sequence: int | None
    used: int
    owner: Request | None = None
    blob: int | None = None
    bytes: int = 0
    pinned: bool = False


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids in a form that is compared fast."""
    return array("i", tokens).tobytes()


def shared_length(one: bytes, other: bytes) -> int:
    """Tokens that two packed lists have in common at their beginnings."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most // TOKEN_BYTES
    least, most = 0, most // TOKEN_BYTES
    while most - least > 1:
        middle = (least + most) // 2
        if one[least * TOKEN_BYTES : middle * TOKEN_BYTES] == other[least * TOKEN_BYTES : middle * TOKEN_BYTES]:
            least = middle
        else:
            most = middle
    return least


class Kv:
    """Entries, and who starts from which.

    Args:
        pool: the books of cells and sequences.
        cache: how KV is kept.
        counters: where to count what is done.
    """

    def __init__(self, pool: KvPool, cache: Cache, counters: Counters) -> None:
        self.cache = cache
        self.ops: list[KvOp] = []
        """What the engine has yet to do."""
        self.saving = True
        """What leaves the pool may be saved in host memory."""
        self._counters = counters
        self._pool = pool
        self._entries: list[Entry] = []
        self._clock = 0
        self._last_blob = 0
        self._cell_bytes = float(cache.cell_bytes)

    # -- looking in -----------------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Bytes saved in host memory, as far as is known."""
        return sum(entry.bytes for entry in self._entries)

    @property
    def entries(self) -> Sequence[Entry]:
        """To read, not to change."""
        return self._entries

    def statistics(self) -> KvStatistics:
        """What has been done, and what is there."""
        counters = self._counters
        return KvStatistics(
            hits=counters.prefix_hits,
            cached_tokens=counters.cached_tokens,
            evictions=counters.evictions,
            exports=counters.exports,
            imports=counters.imports,
            entries=len(self._entries),
            host_entries=sum(entry.blob is not None for entry in self._entries),
            host_bytes=self.host_bytes,
        )

    def resident(self) -> int:
        """Cells of entries in the pool."""
        return sum(entry.length for entry in self._entries if entry.sequence is not None)

    def best(self, record: Request, lanes: Iterable[Request]) -> tuple[Entry | Request | None, int]:
        """What has the longest usable prefix of a request's tokens, and how many tokens that is. Of equals what costs
        least: its own entry, one that can be taken over, one in the pool, one in host memory, another lane."""
        if record.batch_invariant or record.media:
            return None, 0
        tokens, most = pack(record.tokens), len(record.tokens) - 1
        found: tuple[Entry | Request | None, int] = None, 0
        rank = (0, 0)
        for entry in self._entries:
            own = entry.owner is record
            if not own and not self.cache.enabled:
                continue
            length = min(shared_length(tokens, entry.tokens), most)
            if not self._usable(length, entry.length, own=own):
                continue
            whole = length == entry.length
            cheap = 4 if own else 3 if self._free_to_take(entry) and whole else 2 if entry.sequence is not None else 1
            if (length, cheap) > rank:
                rank, found = (length, cheap), (entry, length)
        if self.cache.enabled:
            for lane in lanes:
                if lane.media or lane.fed <= rank[0]:
                    continue
                length = min(shared_length(tokens, pack(lane.tokens[: lane.fed])), most)
                if self._usable(length, lane.fed, own=False) and length > rank[0]:
                    rank, found = (length, 0), (lane, length)
        return found

    def _usable(self, length: int, of: int, *, own: bool) -> bool:
        """Whether the first ``length`` tokens of something that holds ``of`` are worth starting from and can be."""
        if length < of and self.cache.cut != "anywhere":
            return False
        return length > 0 if own else length >= max(self.cache.least, of // LEAST_PART)

    @staticmethod
    def _free_to_take(entry: Entry) -> bool:
        return entry.sequence is not None and entry.owner is None and not entry.pinned

    def leader(self, record: Request, lanes: Iterable[Request], worth: int) -> Request | None:
        """A lane in prefill whose prompt begins like this request's, for at least ``worth`` tokens more than there is
        to start from now. It is never of a worse class, and never further from there than the request itself would be.
        Who waits already waits for the last of them: to be fed that as well would be no sooner, and twice the work.
        """
        if not self.cache.enabled or self.cache.cut != "anywhere" or record.batch_invariant or record.media:
            return None
        begins = record.tokens[:worth]
        least = worth if record.awaits_tick is None else 1
        if len(begins) < worth:
            return None
        for lane in lanes:
            if lane.decoding or lane.media or lane.qos > record.qos or lane.tokens[:worth] != begins:
                continue
            shared = min(shared_length(pack(record.tokens), pack(lane.tokens)), len(record.tokens) - 1)
            _, have = self.best(record, lanes)
            if lane.fed >= have and shared - max(have, lane.fed) >= least:
                return lane
        return None

    # -- seating --------------------------------------------------------------------------------------------------

    def seat(self, record: Request, lanes: Sequence[Request]) -> tuple[int, int]:
        """Give a request that fits a sequence, with as much in it as there is to start from.

        Returns:
            The sequence, and how many of the request's tokens it holds once ``ops`` are done.
        """
        self._clock += 1
        source, length = self.best(record, lanes)
        own = next((entry for entry in self._entries if entry.owner is record), None)
        if own is not None:
            own.owner = None
        if record.batch_invariant and self._pool.shared:
            self.clear()  # where its cells lie must not depend on others
        sequence, length = self._seat(record, source, length)
        if own is not None and own is not source and own in self._entries:
            self._remove(own)  # what it starts from holds as much
        return sequence, length

    def _seat(self, record: Request, source: Entry | Request | None, length: int) -> tuple[int, int]:
        if isinstance(source, Request):
            assert source.sequence is not None
            self._make_room(record.cells)
            sequence = self._pool.promise(record.cells)
            self.ops.append(Copy(source.sequence, sequence, length))
            return sequence, length
        if source is None:
            self._make_room(record.cells)
            return self._pool.promise(record.cells), 0
        source.used = self._clock
        if source.sequence is None:
            return self._bring_back(record, source, length), length
        whole = length == source.length
        if not (whole and self._free_to_take(source)) and self._make_room(record.cells, source):
            sequence = self._pool.promise(record.cells)
            self.ops.append(Copy(source.sequence, sequence, length))
            return sequence, length
        if source.owner is not None:
            # Somebody else waits to go on from it, and nothing else can go: it is exported, or fed again.
            self._make_room(record.cells)
            return self._pool.promise(record.cells), 0
        self._make_room(record.cells, source, own=source.sequence)
        self._entries.remove(source)
        sequence = self._pool.promise(record.cells, source.sequence)
        if not whole:
            self.ops.append(Cut(sequence, length))
        return sequence, length

    def _bring_back(self, record: Request, source: Entry, length: int) -> int:
        """Import from host memory. What is wholly used has no use there any more: the lane leaves more of it."""
        assert source.blob is not None
        self._make_room(record.cells, source)
        sequence = self._pool.promise(record.cells)
        self.ops.append(Import(source.blob, sequence, length))
        self._counters.imports += 1
        if length == source.length and source.owner is None and not source.pinned:
            self._remove(source)
        return sequence

    def _make_room(self, cells: int, spared: Entry | None = None, own: int | None = None) -> bool:
        """Let entries go until a promise of ``cells`` is not short; False if only the spared one is left to go."""
        while self._pool.short(cells, own):
            victim = self._next_victim(spared)
            if victim is None:
                return False
            self.evict(victim, spared)
        return True

    def _next_victim(self, spared: Entry | None = None, *, resident: bool = True) -> Entry | None:
        """Who goes first: what nobody waits for and was not used for longest, then what waits, worst class and
        youngest first; what is pinned last."""
        choice = [e for e in self._entries if e is not spared and (e.sequence is not None) is resident]
        return min(choice, key=_worth, default=None)

    # -- leaving --------------------------------------------------------------------------------------------------

    def leave(self, record: Request, *, waits: bool, certain: bool = True, whole: bool = True) -> None:
        """A request gives its sequence up; what is in it is kept if that may be of use.

        Args:
            record: has a sequence.
            waits: it will go on: what it has is its own.
            certain: the engine holds exactly what the books say; otherwise it may be a few tokens ahead.
            whole: nothing is wrong with it.
        """
        assert record.sequence is not None
        sequence, length, record.sequence = record.sequence, record.fed, None
        keep = length > 0 and whole and (waits or self.cache.enabled) and not record.media
        keep = keep and (certain or self.cache.cut == "anywhere")
        tokens = pack(record.tokens[:length]) if keep else b""
        if keep and not waits and self._covered(tokens, length):
            keep = False
        if not keep:
            self._pool.release(sequence)
            if length or not certain:
                self.ops.append(Free(sequence))
            return
        if not certain:
            self.ops.append(Cut(sequence, length))
        self._pool.keep(sequence, length)
        if self.cache.cut == "anywhere":
            for entry in [e for e in self._entries if e.owner is None and tokens.startswith(e.tokens) and not e.pinned]:
                self._remove(entry)  # the new one holds as much
        self._clock += 1
        self._entries.append(Entry(tokens, length, sequence, self._clock, record if waits else None))

    def _covered(self, tokens: bytes, length: int) -> bool:
        """Too short to be of use, or held by another entry already, which then has been of use just now."""
        if length < self.cache.least:
            return True
        if self.cache.cut == "anywhere":
            for entry in self._entries:
                if entry.sequence is not None and entry.tokens.startswith(tokens):
                    self._clock += 1
                    entry.used = self._clock
                    return True
        return False

    def disown(self, record: Request) -> None:
        """A waiting request is over: what was its own is kept like anybody's."""
        for entry in self._entries:
            if entry.owner is record:
                entry.owner = None
                if not self.cache.enabled:
                    self._remove(entry)
                return

    # -- letting go -----------------------------------------------------------------------------------------------

    def evict(self, entry: Entry, spared: Entry | None = None) -> None:
        """An entry leaves the pool: to host memory where there is room for it, or for good."""
        assert entry.sequence is not None
        self._counters.evictions += 1
        size = max(1, round(entry.length * self._cell_bytes))
        if entry.length < self.cache.least or not self._make_host_room(size, spared):
            self._remove(entry)
            return
        self._last_blob += 1
        self.ops += [Export(entry.sequence, self._last_blob), Free(entry.sequence)]
        self._pool.drop(entry.sequence)
        entry.sequence, entry.blob, entry.bytes = None, self._last_blob, size
        self._counters.exports += 1

    def _make_host_room(self, size: int, spared: Entry | None) -> bool:
        if not self.saving or size > self.cache.host_bytes:
            return False
        while self.host_bytes + size > self.cache.host_bytes:
            victim = self._next_victim(spared, resident=False)
            if victim is None:
                return False
            self._remove(victim)
        return True

    def relieve(self, used: int) -> None:
        """Watermarks: with more than the high one of the pool in use, entries go until it is the low one.

        Args:
            used: cells that running requests have filled.
        """
        if used + self._pool.kept > self.cache.high * self._pool.cells:
            self.evict_down(used)

    def evict_down(self, used: int) -> None:
        """Entries go until the pool is at the low watermark."""
        while used + self._pool.kept > self.cache.low * self._pool.cells:
            victim = self._next_victim()
            if victim is None:
                break
            self.evict(victim)

    def clear(self) -> None:
        """Every entry leaves the pool, pinned or not."""
        while (victim := self._next_victim()) is not None:
            self.evict(victim)

    def drop_host(self) -> None:
        """Nothing stays in host memory."""
        while (victim := self._next_victim(resident=False)) is not None:
            self._remove(victim)

    def _remove(self, entry: Entry) -> None:
        self._entries.remove(entry)
        if entry.sequence is not None:
            self._pool.drop(entry.sequence)
            self.ops.append(Free(entry.sequence))
        if entry.blob is not None:
            self.ops.append(Discard(entry.blob))

    # -- what the engine says -------------------------------------------------------------------------------------

    def exported(self, blob: int, size: int) -> None:
        """Something was saved, or (0 bytes) could not be."""
        entry = next((entry for entry in self._entries if entry.blob == blob), None)
        if entry is None:
            return
        if size == 0:
            entry.blob = None
            self._entries.remove(entry)
            return
        entry.bytes = size
        self._cell_bytes = size / entry.length

    def unreadable(self, blob: int) -> None:
        """What was saved could not be brought back; nobody is to try again."""
        for entry in self._entries:
            if entry.blob == blob:
                self._remove(entry)
                return

    def emptied(self, sequence: int) -> None:
        """A sequence holds nothing, whatever the books say. An entry in it is gone."""
        for entry in self._entries:
            if entry.sequence == sequence:
                self._remove(entry)
                return

    def lose(self) -> None:
        """The engine is gone with everything it had."""
        for entry in self._entries:
            if entry.sequence is not None:
                self._pool.drop(entry.sequence)
        self._entries.clear()
        self.ops.clear()


def _worth(entry: Entry) -> tuple[bool, bool, int, int]:
    owner = entry.owner
    if owner is None:
        return entry.pinned, False, 0, entry.used
    return entry.pinned, True, -owner.qos, -owner.id

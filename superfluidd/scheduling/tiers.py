"""Where kept KV is: in the pool, in host memory, on disk; and how it moves down and away.

Each tier is bounded, and what was not used for longest goes first. An entry may be in several places at once, and is
gone when it is in none. Nothing here talks to the engine: what is to be done is written down in ``ops``, in order, for
the next plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from superfluidd.scheduling.entries import LINEAGE, TOKEN_BYTES, Cache, Entry, key_of
from superfluidd.scheduling.plan import Discard, Export, Forget, Free, KvOp, Park
from superfluidd.scheduling.pool import KvPool
from superfluidd.scheduling.shares import Budget, Share
from superfluidd.scheduling.statistics import Counters, KvStatistics


class Tiers:
    """Entries and their places.

    Args:
        pool: the books of cells and sequences.
        cache: how KV is kept.
        counters: where to count what is done.
        host, disk: shares of what other schedulers use as well; by default this one has all that ``cache`` allows.
    """

    def __init__(
        self, pool: KvPool, cache: Cache, counters: Counters, host: Share | None = None, disk: Share | None = None
    ) -> None:
        self.cache = cache
        self._host = host or Budget(cache.host_bytes).join(lambda: None)
        self._host.held = lambda: self.host_bytes
        self._disk = disk or Budget(cache.park_bytes).join(lambda: None)
        self._disk.held = lambda: self.parked_bytes
        self.ops: list[KvOp] = []
        """What the engine has yet to do."""
        self.saving = True
        """What leaves the pool may be saved in host memory, and be parked."""
        self._counters = counters
        self._pool = pool
        self._entries: list[Entry] = []
        self._clock = 0
        self._last_blob = 0
        self._last_pin = 0
        self._lost_pins: dict[str, Entry] = {}
        """Pinned entries on disk of an engine that is gone, by key: it will find them again."""
        self._cell_bytes = float(cache.cell_bytes)
        self._sealing = ""
        """Key of what is being written to disk: one at a time, so that little of it is in memory meanwhile."""

    # -- looking in -----------------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Bytes saved in host memory, as far as is known."""
        return sum(entry.bytes for entry in self._entries)

    @property
    def parked_bytes(self) -> int:
        """Bytes on disk, as far as is known."""
        return sum(entry.parked for entry in self._entries)

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
            parks=counters.parks,
            recalls=counters.recalls,
            entries=len(self._entries),
            host_entries=sum(entry.blob is not None for entry in self._entries),
            host_bytes=self.host_bytes,
            parked_entries=sum(entry.parked > 0 for entry in self._entries),
            parked_bytes=self.parked_bytes,
            pins=sum(entry.pin is not None for entry in self._entries),
            pinned_tokens=sum(entry.length for entry in self._entries if entry.pin),
            pins_yielded=counters.pins_yielded,
            pins_expired=counters.pins_expired,
        )

    def resident(self) -> int:
        """Cells of entries in the pool."""
        return sum(entry.length for entry in self._entries if entry.sequence is not None)

    # -- leaving the pool -----------------------------------------------------------------------------------------

    def evict(self, entry: Entry, spared: Entry | None = None) -> None:
        """An entry leaves the pool: to host memory where there is room for it, or to disk, or for good."""
        assert entry.sequence is not None
        self._counters.evictions += 1
        self._counters.pins_yielded += entry.pin is not None
        size = max(1, round(entry.length * self._cell_bytes))
        if entry.length >= self.cache.least and self._make_host_room(size, spared):
            self._last_blob += 1
            self.ops.append(Export(entry.sequence, self._last_blob))
            entry.blob, entry.bytes = self._last_blob, size
            self._counters.exports += 1
        else:
            self._park(entry)
        self._leave_pool(entry)

    def _leave_pool(self, entry: Entry) -> None:
        assert entry.sequence is not None
        self.ops.append(Free(entry.sequence))
        self._pool.drop(entry.sequence)
        entry.sequence = None
        self._bury(entry)

    def _make_host_room(self, size: int, spared: Entry | None) -> bool:
        if not self.saving or size > self.cache.host_bytes:
            return False
        if self.host_bytes + size > self._host.room:
            self._host.ask(size)
        while self.host_bytes + size > self._host.room:
            victim = self._first_to_go(lambda entry: entry.blob is not None and entry is not spared)
            if victim is None:
                return False
            self._leave_host(victim)
        return True

    def give_back(self) -> None:
        """What others have a right to leaves host memory and the disk, the longest unused first."""
        while self._host.owed > 0 and (victim := self._first_to_go(lambda entry: entry.blob is not None)):
            self._host.owed -= victim.bytes
            self._leave_host(victim)
        while self._disk.owed > 0 and (victim := self._first_to_go(lambda entry: entry.parked > 0)):
            self._disk.owed -= victim.parked
            self._forget_all([victim])
        self._host.owed = self._disk.owed = 0

    def _leave_host(self, entry: Entry) -> None:
        assert entry.blob is not None
        if not entry.key:
            self._park(entry)
        self.ops.append(Discard(entry.blob))
        entry.blob, entry.bytes = None, 0
        self._bury(entry)

    def _next_victim(self, spared: Entry | None = None) -> Entry | None:
        """Which entry leaves the pool first."""
        return self._first_to_go(lambda entry: entry.sequence is not None and entry is not spared)

    def _first_to_go(self, choice: Callable[[Entry], bool]) -> Entry | None:
        """What nobody waits for and was not used for longest, then what waits, worst class and youngest first; what is
        pinned last."""
        return min(filter(choice, self._entries), key=_worth, default=None)

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
        for entry in [entry for entry in self._entries if entry.blob is not None]:
            self._leave_host(entry)

    def _remove(self, entry: Entry) -> None:
        """It leaves every place it is in."""
        self._entries.remove(entry)
        if entry.sequence is not None:
            self._pool.drop(entry.sequence)
            self.ops.append(Free(entry.sequence))
        if entry.blob is not None:
            self.ops.append(Discard(entry.blob))
        if entry.key:
            self._forget(entry)

    def _bury(self, entry: Entry) -> None:
        if entry.nowhere:
            self._entries.remove(entry)

    def _supersede(self, entry: Entry, by: Entry) -> None:
        """Another entry begins with all of it. What is on disk stays until the other one is there as well; if they hold
        the same, it already is."""
        by.requests = (*entry.requests, *by.requests)[-LINEAGE:]
        if entry.length == by.length and entry.key:
            by.key, by.parked, entry.key, entry.parked = entry.key, entry.parked, "", 0
        if not entry.parked:
            self._remove(entry)
            return
        if entry.blob is not None:
            self.ops.append(Discard(entry.blob))
            entry.blob, entry.bytes = None, 0
        if entry.sequence is not None:
            self._leave_pool(entry)

    # -- the disk -------------------------------------------------------------------------------------------------

    def park_next(self, *, idle: bool) -> None:
        """Write the next entry to disk, unless one is being written: what is in host memory, for it costs a tick
        nothing; what is in the pool only while nobody is held up by it."""
        entry = self._next_to_park(idle=idle)
        if entry is not None:
            self._park(entry)

    @property
    def parking(self) -> bool:
        """Something is being written, or would be if nothing else were to do."""
        return bool(self._sealing) or self._next_to_park(idle=True) is not None

    def _next_to_park(self, *, idle: bool) -> Entry | None:
        """What was used last: it is what will be asked for again."""
        if self._sealing or not self.cache.park_bytes:
            return None
        choice = [entry for entry in self._entries if self._parkable(entry) and (idle or entry.blob is not None)]
        entry = max(choice, key=_worth, default=None)
        return entry if entry is not None and self._disk_room(entry) is not None else None

    def _parkable(self, entry: Entry) -> bool:
        fits = self.cache.park_least <= entry.length and entry.length * self._cell_bytes <= self.cache.park_bytes
        if not fits or not self.cache.park_bytes or not self.saving or entry.key or entry.unparkable:
            return False
        # Two that hold the same would share a key: one artifact is enough, and one entry has to answer for it.
        return not any(other.key and other.tokens == entry.tokens for other in self._entries)

    def _park(self, entry: Entry) -> None:
        if self._sealing or not self._parkable(entry) or (victims := self._disk_room(entry)) is None:
            return
        self._forget_all(victims)
        entry.key = self._sealing = key_of(entry.tokens)
        if entry.blob is not None:
            self.ops.append(Park(entry.key, entry.tokens, blob=entry.blob))
        else:
            assert entry.sequence is not None
            self.ops.append(Park(entry.key, entry.tokens, sequence=entry.sequence))

    def _disk_room(self, entry: Entry) -> list[Entry] | None:
        """What has to be forgotten for an entry to be parked; None if that would be worth more than the entry."""
        size = round(entry.length * self._cell_bytes)
        over = self.parked_bytes + size - self._disk.room
        if over > 0:
            self._disk.ask(size)
        victims: list[Entry] = []
        for other in sorted((e for e in self._entries if e.parked and e is not entry), key=_worth) if over > 0 else ():
            if over <= 0:
                break
            if _worth(other) >= _worth(entry):
                return None
            victims.append(other)
            over -= other.parked
        return victims if over <= 0 else None

    def _forget_all(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._forget(entry)
            self._bury(entry)

    def _trim_disk(self) -> None:
        """Keep the budget, whatever was found or written."""
        for entry in sorted((e for e in self._entries if e.parked), key=_worth):
            if self.parked_bytes <= self._disk.room:
                return
            self._forget_all([entry])

    def _forget(self, entry: Entry) -> None:
        self.ops.append(Forget(entry.key))
        if self._sealing == entry.key and not entry.parked:
            self._sealing = ""  # whatever is said of it will be of no entry
        entry.key, entry.parked = "", 0

    def sealed(self, key: str, size: int) -> None:
        """Something has been written to disk, or (0 bytes) could not be."""
        if self._sealing == key:
            self._sealing = ""
        entry = next((entry for entry in self._entries if entry.key == key), None)
        if entry is None:
            return
        if size:
            self._counters.parks += 1
            entry.parked = size
            self._forget_beginnings(entry)
            self._trim_disk()
        else:
            entry.key, entry.unparkable = "", True
            self._bury(entry)

    def _forget_beginnings(self, entry: Entry) -> None:
        """What is only on disk and of which this one holds as much need not stay there."""
        if self.cache.cut != "anywhere":
            return
        for other in [e for e in self._entries if e is not entry and e.parked and entry.tokens.startswith(e.tokens)]:
            if other.sequence is None and other.blob is None and other.owner is None and not other.pin:
                entry.requests = (*other.requests, *entry.requests)[-LINEAGE:]
                self._remove(other)

    def adopt(self, found: Iterable[tuple[str, bytes, int]]) -> None:
        """What is on disk from earlier: (key, packed token ids, bytes), longest unused first."""
        known = {entry.key for entry in self._entries}
        for key, tokens, size in found:
            if key in known:
                continue
            self._clock += 1
            length = len(tokens) // TOKEN_BYTES
            entry = Entry(tokens, length, None, self._clock, key=key, parked=size)
            if key in self._lost_pins:
                entry.pin, entry.requests = self._lost_pins[key].pin, self._lost_pins[key].requests
            self._entries.append(entry)
        self._lost_pins.clear()
        self._trim_disk()

    # -- what the engine says -------------------------------------------------------------------------------------

    def exported(self, blob: int, size: int) -> None:
        """Something was saved, or (0 bytes) could not be."""
        entry = next((entry for entry in self._entries if entry.blob == blob), None)
        if entry is None:
            return
        if size == 0:
            entry.blob, entry.bytes = None, 0
            self._bury(entry)
            return
        entry.bytes = size
        self._cell_bytes = size / entry.length

    def unreadable(self, blob: int) -> None:
        """What was saved could not be brought back; nobody is to try again."""
        for entry in self._entries:
            if entry.blob == blob:
                self.ops.append(Discard(blob))
                entry.blob, entry.bytes = None, 0
                self._bury(entry)
                return

    def unrecallable(self, key: str) -> None:
        """What was parked could not be brought back."""
        for entry in self._entries:
            if entry.key == key:
                self._forget(entry)
                entry.unparkable = True
                self._bury(entry)
                return

    def emptied(self, sequence: int) -> None:
        """A sequence holds nothing, whatever the books say. An entry in it is in its other places, or gone."""
        for entry in self._entries:
            if entry.sequence == sequence:
                self._leave_pool(entry)
                return

    def lose(self) -> None:
        """The engine is gone with everything it had. What is on disk it will find again."""
        for entry in self._entries:
            if entry.sequence is not None:
                self._pool.drop(entry.sequence)
        self._lost_pins = {entry.key: entry for entry in self._entries if entry.pin and entry.parked}
        self._entries.clear()
        self.ops.clear()
        self._sealing = ""


def _worth(entry: Entry) -> tuple[int, bool, int, int]:
    owner, pin = entry.owner, entry.pin.number if entry.pin else 0
    if owner is None:
        return pin, False, 0, entry.used
    return pin, True, -owner.qos, -owner.id

"""What the KV pool holds besides running requests: the prefix cache, and what preempted requests left behind.

What a request leaves becomes an *entry*: its tokens, and where their KV is (:mod:`~superfluidd.scheduling.tiers`). A
request that is seated starts from the longest prefix that an entry or a running lane has of its tokens. An entry of a
waiting request is its own: others may copy it but not take it over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from superfluidd.scheduling.entries import LINEAGE, Entry, pack, shared_length
from superfluidd.scheduling.pins import Pins
from superfluidd.scheduling.plan import Copy, Cut, Free, Import, Recall
from superfluidd.scheduling.request import Request

LEAST_PART = 128
"""A prefix that is a smaller part of what would have to be copied for it is not worth it."""


class Kv(Pins):
    """Entries, and who starts from which."""

    # -- looking in -----------------------------------------------------------------------------------------------

    def best(self, record: Request, lanes: Iterable[Request]) -> tuple[Entry | Request | None, int]:
        """What has the longest usable prefix of a request's tokens, and how many tokens that is. Of equals what costs
        least: its own entry, one that can be taken over, one in the pool, one in host memory, one on disk, another
        lane."""
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
            cheap = 5 if own else 4 if self._free_to_take(entry) and whole else _nearness(entry)
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
        return entry.sequence is not None and entry.owner is None and not entry.pin

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
        sequence = self._pool.promise(record.cells, source.sequence)
        source.sequence = None
        self._inherit(record, source)
        self._bury(source)
        if not whole:
            self.ops.append(Cut(sequence, length))
        return sequence, length

    def _bring_back(self, record: Request, source: Entry, length: int) -> int:
        """Import from host memory, or else from disk. What is wholly used has no use in memory any more: the lane
        leaves more of it. What is on disk stays: it may have to outlive the lane."""
        self._make_room(record.cells, source)
        sequence = self._pool.promise(record.cells)
        if source.blob is None:
            self.ops.append(Recall(source.key, sequence, length))
            self._counters.recalls += 1
            return sequence
        self.ops.append(Import(source.blob, sequence, length))
        self._counters.imports += 1
        if length == source.length and source.owner is None and not source.pin:
            self._inherit(record, source)
            self._leave_host(source)
        return sequence

    @staticmethod
    def _inherit(record: Request, source: Entry) -> None:
        """What a lane takes over is for it to leave behind, pin included."""
        record.lineage = tuple(request for request in source.requests if request != record.id)[-LINEAGE:]
        if source.pin and not record.pin:
            record.pin, source.pin = source.pin, None

    def _make_room(self, cells: int, spared: Entry | None = None, own: int | None = None) -> bool:
        """Let entries go until a promise of ``cells`` is not short; False if only the spared one is left to go."""
        while self._pool.short(cells, own):
            victim = self._next_victim(spared)
            if victim is None:
                return False
            self.evict(victim, spared)
        return True

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
        if keep and not waits and self._covered(record, tokens, length):
            keep = False
        if not keep:
            self._pool.release(sequence)
            if length or not certain:
                self.ops.append(Free(sequence))
            return
        if not certain:
            self.ops.append(Cut(sequence, length))
        self._pool.keep(sequence, length)
        self._clock += 1
        requests = (*record.lineage, record.id)[-LINEAGE:]
        left = Entry(tokens, length, sequence, self._clock, record if waits else None, requests=requests)
        if self.cache.cut == "anywhere":
            for entry in [e for e in self._entries if e.owner is None and tokens.startswith(e.tokens) and not e.pin]:
                self._supersede(entry, left)  # the new one holds as much
        self._entries.append(left)
        if record.pin and not waits:
            self._pin(left, record.pin)

    def _covered(self, record: Request, tokens: bytes, length: int) -> bool:
        """Too short to be of use, or held by another entry already, which then has been of use just now."""
        if length < self.cache.least:
            return True
        if self.cache.cut == "anywhere":
            for entry in self._entries:
                if entry.sequence is not None and entry.tokens.startswith(tokens) and not record.pin:
                    self._clock += 1
                    entry.used = self._clock
                    entry.requests = (*entry.requests, record.id)[-LINEAGE:]
                    return True
        return False

    def disown(self, record: Request) -> None:
        """A waiting request is over: what was its own is kept like anybody's."""
        for entry in self._entries:
            if entry.owner is record:
                entry.owner = None
                if not self.cache.enabled:
                    self._remove(entry)
                elif record.pin:
                    self._pin(entry, record.pin)
                return


def _nearness(entry: Entry) -> int:
    """3 in the pool, 2 in host memory, 1 on disk."""
    return 3 if entry.sequence is not None else 2 if entry.blob is not None else 1

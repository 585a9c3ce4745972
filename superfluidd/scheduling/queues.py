"""One FIFO per class, aging, and which request is next.

Joining, leaving and asking for the heads are all O(1), so planning does not grow with the number of requests waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from superfluidd.scheduling.request import Request
from superfluidd.types import QosClass, RequestId


def effective_class(request: Request, tick: int, period: int) -> int:
    """The class a waiting request counts as: its own, less one for every ``period`` ticks it has waited.

    Source: the specification, "Lanes and admission".
    """
    return max(0, request.qos - (tick - request.queued_tick) // period)


class ClassQueues:
    """The waiting requests."""

    def __init__(self) -> None:
        self._queues: dict[QosClass, OrderedDict[RequestId, Request]] = {qos: OrderedDict() for qos in QosClass}
        self._alone: dict[QosClass, OrderedDict[RequestId, Request]] = {qos: OrderedDict() for qos in QosClass}
        """The batch-invariant ones among them."""

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Request]:
        """Every waiting request, by class and place in its queue."""
        for queue in self._queues.values():
            yield from queue.values()

    def append(self, request: Request) -> None:
        """Join at the end of its class."""
        self._queues[request.qos][request.id] = request
        if request.batch_invariant:
            self._alone[request.qos][request.id] = request

    def prepend(self, request: Request) -> None:
        """Join at the head of its class: it has been served before."""
        self.append(request)
        self._queues[request.qos].move_to_end(request.id, last=False)
        if request.batch_invariant:
            self._alone[request.qos].move_to_end(request.id, last=False)

    def remove(self, request: Request) -> None:
        """Leave. The request must be waiting here."""
        del self._queues[request.qos][request.id]
        self._alone[request.qos].pop(request.id, None)

    def head(self, qos: QosClass) -> Request | None:
        """The next request of a class. A batch-invariant one is next in its class as long as it waits, since nothing
        at or below its class is admitted then (source: the specification, "Batch-invariant lanes")."""
        return next(iter((self._alone[qos] or self._queues[qos]).values()), None)

    def first(self, qos: QosClass) -> Request | None:
        """The request of a class that has been in its queue for longest."""
        return next(iter(self._queues[qos].values()), None)

    def heads(self, tick: int, period: int, small: int | None = None) -> list[Request]:
        """The head of every class that has one, best first: by effective class, then by who has waited longer.

        The longer wait wins a tie, so a job that has risen is not passed over for ever by those born higher.

        Args:
            tick: number of the tick they would be seated in.
            period: of aging, ticks.
            small: the head of the interactive class is the first one that needs no more cells than that.
        """
        found = [head for qos in QosClass if (head := self.head(qos)) is not None]
        if small is not None and found and found[0].qos is QosClass.INTERACTIVE and found[0].cells > small:
            waiting = self._queues[QosClass.INTERACTIVE].values()
            found[0] = next((request for request in waiting if request.cells <= small), found[0])
        found.sort(key=lambda head: (effective_class(head, tick, period), head.queued_tick, head.qos, head.id))
        return found

    def position(self, request: Request) -> int:
        """Place in its class's queue, from 1. Counts, so it is not for every tick."""
        for place, waiting in enumerate(self._queues[request.qos], start=1):
            if waiting == request.id:
                return place
        raise KeyError(request.id)

    def depth(self, qos: QosClass) -> int:
        """Requests waiting in a class."""
        return len(self._queues[qos])

    def depths(self) -> dict[QosClass, int]:
        """Requests waiting, by class."""
        return {qos: len(queue) for qos, queue in self._queues.items()}

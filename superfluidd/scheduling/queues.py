"""One FIFO per class, and which request is next.

Joining, leaving and asking for the head are all O(1), so planning does not grow with the number of requests waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from superfluidd.scheduling.request import Request
from superfluidd.types import QosClass, RequestId


class ClassQueues:
    """The waiting requests."""

    def __init__(self) -> None:
        self._queues: dict[QosClass, OrderedDict[RequestId, Request]] = {qos: OrderedDict() for qos in QosClass}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Request]:
        """Every waiting request in the order it would be served."""
        for queue in self._queues.values():
            yield from queue.values()

    def append(self, request: Request) -> None:
        """Join at the end of its class."""
        self._queues[request.qos][request.id] = request

    def prepend(self, request: Request) -> None:
        """Join at the head of its class: it has been served before."""
        queue = self._queues[request.qos]
        queue[request.id] = request
        queue.move_to_end(request.id, last=False)

    def remove(self, request: Request) -> None:
        """Leave. The request must be waiting here."""
        del self._queues[request.qos][request.id]

    def head(self) -> Request | None:
        """The next request: the head of the best class that has one."""
        for queue in self._queues.values():
            for request in queue.values():
                return request
        return None

    def depths(self) -> dict[QosClass, int]:
        """Requests waiting, by class."""
        return {qos: len(queue) for qos, queue in self._queues.items()}

"""The queue of waiting requests, in which callers take turns."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from itertools import islice

from specjax.scheduling.request import Request

PREEMPTED = object()  # stands for a caller whose turn it always is


class FairQueue:
    """Requests in the order in which they start: round robin between callers, FIFO in each.

    A caller waits for at most one request of every other caller before its next request starts.
    Preempted requests come first. A request that cannot start yet keeps its position, and others
    may be taken before it. Any thread may call ``len``.
    """

    def __init__(self) -> None:
        self._callers: dict[Request, Hashable] = {}
        # queues that are not empty; it is the first caller's turn
        self._queues: OrderedDict[Hashable, deque[Request]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._callers)

    def __contains__(self, request: Request) -> bool:
        return request in self._callers

    def __iter__(self) -> Iterator[Request]:
        """Iterate over preempted requests, the next one of each caller in turn, and all others."""
        preempted = self._queues.get(PREEMPTED, ())
        yield from preempted
        yield from (queue[0] for queue in self._queues.values() if queue is not preempted)
        for queue in self._queues.values():
            yield from () if queue is preempted else islice(queue, 1, None)

    def append(self, request: Request, caller: Hashable = None) -> None:
        self._callers[request] = caller
        self._queues.setdefault(caller, deque()).append(request)

    def appendleft(self, request: Request) -> None:
        """Add a preempted request before all others."""
        self._callers[request] = PREEMPTED
        self._queues.setdefault(PREEMPTED, deque()).appendleft(request)
        self._queues.move_to_end(PREEMPTED, last=False)

    def take(self, request: Request) -> None:
        """Remove a request that starts; then all other callers have their turn before its own."""
        if (caller := self._callers[request]) is not PREEMPTED:
            self._queues.move_to_end(caller)
        self.remove(request)

    def remove(self, request: Request) -> None:
        queue = self._queues[caller := self._callers.pop(request)]
        queue.remove(request)
        if not queue:
            del self._queues[caller]

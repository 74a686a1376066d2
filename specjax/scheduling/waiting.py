"""The queue of waiting requests, in which callers take turns."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from itertools import chain

from specjax.scheduling.request import Request

PREEMPTED = object()  # stands for a caller whose turn it always is


class FairQueue:
    """Requests in the order in which they start: round robin between callers, FIFO in each.

    A caller waits for at most one request of every other caller before its next request starts.
    Preempted requests come first. Any thread may call ``len``.
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
        """Iterate over all requests, caller by caller."""
        return chain.from_iterable(self._queues.values())

    @property
    def first(self) -> Request:
        """The request that :meth:`popleft` removes next."""
        return next(iter(self))

    def append(self, request: Request, caller: Hashable = None) -> None:
        self._callers[request] = caller
        self._queues.setdefault(caller, deque()).append(request)

    def appendleft(self, request: Request) -> None:
        """Add a preempted request before all others."""
        self._callers[request] = PREEMPTED
        self._queues.setdefault(PREEMPTED, deque()).appendleft(request)
        self._queues.move_to_end(PREEMPTED, last=False)

    def popleft(self) -> Request:
        request = self.first
        if (caller := self._callers[request]) is not PREEMPTED:
            self._queues.move_to_end(caller)
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        queue = self._queues[caller := self._callers.pop(request)]
        queue.remove(request)
        if not queue:
            del self._queues[caller]

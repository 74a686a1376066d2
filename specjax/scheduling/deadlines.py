"""When requests run out of time."""

import heapq
import itertools

from specjax.scheduling.request import Request


class Deadlines:
    """Requests with a timeout, the first to expire first."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Request]] = []
        self._serial = itertools.count()
        self._limit = 0

    def watch(self, request: Request) -> None:
        """Expect the request to end within its timeout, if it has one."""
        if request.timeout is None:
            return
        deadline = request.created_time + request.timeout
        heapq.heappush(self._queue, (deadline, next(self._serial), request))
        if len(self._queue) > self._limit:
            # ended requests are not kept until their deadline: at twice the number of the others
            self._queue = [one for one in self._queue if not one[2].is_finished]
            heapq.heapify(self._queue)
            self._limit = 2 * len(self._queue) + 16

    @property
    def next(self) -> float | None:
        """When the next one is, in seconds of the requests' clock; ``None`` without any."""
        return self._queue[0][0] if self._queue else None

    def expired(self, now: float) -> list[Request]:
        """Requests that should have ended and have not; each is named once."""
        late = []
        while self._queue and self._queue[0][0] <= now:
            late.append(heapq.heappop(self._queue)[2])
        return [request for request in late if not request.is_finished]

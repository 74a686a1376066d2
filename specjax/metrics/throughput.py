"""Units a second over a window that slides with the time in which there is work."""

from collections import deque

WINDOW_SECONDS = 5.0
MARKS_A_WINDOW = 50


class Throughput:
    """Units a second over the last ``window`` seconds with work to do; other time does not count.

    So requests that come one by one show the speed that they are served at.
    """

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self._window = window
        self._busy = 0.0  # seconds with work until _now
        self._now = 0.0
        self._total = 0
        self._has_work = False
        # (busy seconds, total) of old, the first one a window or more ago
        self._marks: deque[tuple[float, int]] = deque([(0.0, 0)])

    def resume(self, now: float) -> None:
        """There is work from now on, if there was none."""
        if not self._has_work:
            self._has_work = True
            self._now = now

    def advance(self, now: float, total: int, has_work: bool) -> None:
        """Take the total of units so far, and whether there is more to do."""
        if self._has_work:
            self._busy += now - self._now
        if self._has_work or has_work:
            self._now = now
        self._has_work, self._total = has_work, total
        marks, busy = self._marks, self._busy
        if busy - marks[-1][0] >= self._window / MARKS_A_WINDOW:
            marks.append((busy, total))
            while len(marks) > 1 and marks[1][0] <= busy - self._window:
                marks.popleft()

    def rate(self, now: float, total: int) -> float:
        """Units a second, up to now where there is work, and up to its end where there is none."""
        busy = self._busy + (now - self._now if self._has_work else 0.0)
        start = self._marks[0]
        for mark in (*self._marks, (self._busy, self._total)):
            if mark[0] > busy - self._window:
                break
            start = mark
        seconds = busy - start[0]
        return (total - start[1]) / seconds if seconds > 0 else 0.0

    def is_idle(self, now: float) -> bool:
        return not self._has_work and now - self._now >= self._window

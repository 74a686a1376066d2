"""Counts and times of an engine since its start, as plain numbers."""

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from specjax.types import NO_DRAFTS, DraftShape

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


# of SGLang's, with finer steps below: a small model makes a token in a third of a millisecond
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400),
)
INTER_TOKEN_BOUNDS = (
    *(0.0001, 0.0002, 0.0004, 0.0006, 0.0008, 0.001),
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04),
    *(0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
LATENCY_BOUNDS = (*FIRST_TOKEN_BOUNDS, 600, 1200, 1800, 2400)
LENGTH_BOUNDS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))  # tokens


@dataclass
class Histogram:
    """How often values fell up to each bound; the last count is of those beyond all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> "Histogram":
        return replace(self, counts=list(self.counts))


@dataclass
class Totals:
    """Figures of an engine since its start.

    One thread writes, that of the scheduler: single figures directly, those that belong together by
    the methods. Any thread may take a :meth:`snapshot`. What each figure counts is said in
    ``docs/metrics.md`` and in :data:`specjax.metrics.prometheus.FIGURES`.
    """

    clock: Callable[[], float] = time.perf_counter
    max_total_tokens: int = 1
    drafts: bool = False  # rounds may draft, so that there is a tier
    adapts: bool = False  # the tier follows what is being accepted
    # tokens a round that are accepted right or wrong, where speed alone is measured
    simulate_accept_length: float | None = None

    tier: DraftShape = NO_DRAFTS  # of the rounds to come
    ema_accept_len: float = 0.0
    num_switches: int = 0
    wasted_drafts: int = 0

    num_running: int = 0
    num_waiting: int = 0
    num_used_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_stopped: int = 0  # ended by an end token or a stop string
    num_cut: int = 0  # ended by their length
    num_retracted: int = 0
    num_verifies: int = 0
    num_proposed_drafts: int = 0
    num_accepted_drafts: int = 0
    verifies_by_accepted: list[int] = field(default_factory=list)  # by their accepted drafts
    queue_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    e2e_latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    prompt_length: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    completion_length: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    gen_throughput: float = 0.0  # tokens/s over the last window with work, 0 after an idle one
    last_gen_throughput: float = 0.0  # the same, and what it was last where there is no work
    throughput: Throughput = field(default_factory=Throughput)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def snapshot(self) -> "Totals":
        with self.lock:
            now = self.clock()
            rate = self.throughput.rate(now, self.generated_tokens)
            speed = 0.0 if self.throughput.is_idle(now) else rate
            changes: dict[str, Any] = {"gen_throughput": speed, "last_gen_throughput": rate}
            changes["verifies_by_accepted"] = list(self.verifies_by_accepted)
            for name, value in vars(self).items():
                if isinstance(value, Histogram):
                    changes[name] = value.copy()
            return replace(self, **changes)

    def queue_changed(self, num_running: int, num_waiting: int, num_used_tokens: int) -> None:
        """Take the state after a step or an abort."""
        with self.lock:
            self.num_running = num_running
            self.num_waiting = num_waiting
            self.num_used_tokens = num_used_tokens
            has_work = num_running + num_waiting > 0
            self.throughput.advance(self.clock(), self.generated_tokens, has_work)

    def request_admitted(
        self, num_prompt_tokens: int, num_cached_tokens: int, queue_seconds: float | None
    ) -> None:
        """Count a prefill that begins; ``queue_seconds`` is ``None`` for a request that resumes."""
        with self.lock:
            self.throughput.resume(self.clock())
            self.reused_tokens += num_cached_tokens
            if queue_seconds is not None:
                self.prompt_tokens += num_prompt_tokens
                self.cached_tokens += num_cached_tokens
                self.queue_time.observe(queue_seconds)

    def tokens_generated(self, num_tokens: int, seconds: float | None) -> None:
        """Count tokens that a request got at once, ``seconds`` after those before, if any."""
        with self.lock:
            self.generated_tokens += num_tokens
            if seconds is not None:
                self.inter_token_latency.observe(seconds / num_tokens, num_tokens)

    def drafts_verified(self, num_proposed: int, accepted: Sequence[int]) -> None:
        """Count verifies of one request with their drafts; ``accepted`` has those of each."""
        with self.lock:
            self.num_verifies += len(accepted)
            self.num_proposed_drafts += num_proposed
            for count in accepted:
                self.num_accepted_drafts += count
                while count >= len(self.verifies_by_accepted):
                    self.verifies_by_accepted.append(0)
                self.verifies_by_accepted[count] += 1

    def request_finished(
        self, reason: str, seconds: float, num_prompt_tokens: int, num_completion_tokens: int
    ) -> None:
        """Count an end, ``seconds`` after the request was made."""
        with self.lock:
            self.num_finished += 1
            self.num_aborted += reason == "abort"
            self.num_stopped += reason == "stop"
            self.num_cut += reason == "length"
            if reason != "abort":
                self.e2e_latency.observe(seconds)
                self.prompt_length.observe(num_prompt_tokens)
                self.completion_length.observe(num_completion_tokens)

    @property
    def token_usage(self) -> float:
        return self.num_used_tokens / self.max_total_tokens

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens that the prefix cache had."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    @property
    def accept_length(self) -> float:
        """Tokens a verify, the bonus token included; 0 before the first verify."""
        return (self.num_verifies + self.num_accepted_drafts) / max(self.num_verifies, 1)

    @property
    def accepted_by_position(self) -> list[int]:
        """How often the first drafted token of a round was accepted, the second, and so on."""
        return list(accumulate(self.verifies_by_accepted[:0:-1]))[::-1]

    @property
    def accept_rate(self) -> float:
        """Share of the proposed drafts that was accepted."""
        return self.num_accepted_drafts / max(self.num_proposed_drafts, 1)

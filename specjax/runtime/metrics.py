"""Counts, times and throughput of an engine since its start, cheap to write and safe to read."""

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry

from specjax.runtime.exposition import make_registry

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

WINDOW_SECONDS = 5.0
MARKS_A_WINDOW = 50


@dataclass
class Histogram:
    """How often values fell up to each bound; the last count is of those beyond all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, several times if asked to."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_values(self) -> int:
        """Values counted so far."""
        return sum(self.counts)

    def copy(self) -> "Histogram":
        """A copy that later values leave alone."""
        return replace(self, counts=list(self.counts))


@dataclass
class Totals:
    """Figures of an engine since its start.

    Attributes:
        num_running: requests that run now.
        num_waiting: requests that wait now, retracted ones included.
        num_used_tokens: what the KV pages of running requests hold now.
        prompt_tokens: of the requests whose prefill has begun, each counted once.
        cached_tokens: of those, found in the prefix cache.
        prefilled_tokens: given to prefill, those of resumed requests included.
        reused_tokens: found in the prefix cache instead, those of resumed requests included.
        generated_tokens: completion tokens.
        num_finished: requests that ended, the aborted ones included.
        num_aborted: of those, with finish reason ``abort``.
        num_retracted: times that a running request lost its pages.
        num_verifies: rounds that verified drafts, counted for each request.
        num_proposed_drafts: drafts for the positions of kept tokens.
        num_accepted_drafts: of those, without the bonus tokens.
        queue_time: seconds from a request's making to its prefill.
        time_to_first_token: seconds from a request's making to its first token.
        inter_token_latency: seconds a token after the first; tokens that came together share the
            time since the ones before.
        e2e_latency: seconds from the making to the end of a request that was not aborted.
        gen_throughput: tokens a second over the last ``WINDOW_SECONDS`` with work to do; 0 where
            there has been none for as long.
        last_gen_throughput: the same, and what it was last where there is no work.
    """

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
    num_retracted: int = 0
    num_verifies: int = 0
    num_proposed_drafts: int = 0
    num_accepted_drafts: int = 0
    queue_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    e2e_latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    gen_throughput: float = 0.0
    last_gen_throughput: float = 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens that the prefix cache had."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens a verify, the bonus token included; 0 before the first verify."""
        verifies = self.num_verifies
        return 1 + self.num_accepted_drafts / verifies if verifies else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the proposed drafts that was accepted."""
        proposed = self.num_proposed_drafts
        return self.num_accepted_drafts / proposed if proposed else 0.0


class Throughput:
    """Units a second over the last ``window`` seconds with work to do.

    Time without work does not count, so that requests that come one by one show the speed that they
    are served at.
    """

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self._window = window
        self._busy = 0.0  # seconds with work until _now
        self._now = 0.0
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
        self._has_work = has_work
        marks, busy = self._marks, self._busy
        if busy - marks[-1][0] >= self._window / MARKS_A_WINDOW:
            marks.append((busy, total))
            while len(marks) > 1 and marks[1][0] <= busy - self._window:
                marks.popleft()

    def rate(self, now: float, total: int) -> float:
        """Units a second, up to now where there is work, and up to its end where there is none."""
        busy = self._busy + (now - self._now if self._has_work else 0.0)
        start = self._marks[0]
        for mark in self._marks:
            if mark[0] > busy - self._window:
                break
            start = mark
        seconds = busy - start[0]
        return (total - start[1]) / seconds if seconds > 0 else 0.0

    def is_idle(self, now: float) -> bool:
        """Whether there has been no work for a window."""
        return not self._has_work and now - self._now >= self._window


class EngineMetrics:
    """Hears a scheduler's events and keeps the figures of one engine.

    The scheduler's thread writes; any thread reads. An event takes about a microsecond: what a
    scrape needs is computed at the scrape.

    Args:
        model_name: label of everything that is exposed.
        max_total_tokens: tokens that the KV pool holds.
        clock: seconds, that of the scheduler.

    Attributes:
        registry: everything under SGLang's names with the prefix ``specjax:``, for
            ``prometheus_client``. Each engine has its own.
    """

    def __init__(
        self,
        model_name: str,
        max_total_tokens: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._totals = Totals()
        self._throughput = Throughput()
        self.registry: CollectorRegistry = make_registry(
            self.snapshot, model_name, max_total_tokens
        )

    def snapshot(self) -> Totals:
        """The figures of one moment."""
        with self._lock:
            totals, now = self._totals, self._clock()
            rate = self._throughput.rate(now, totals.generated_tokens)
            return replace(
                totals,
                queue_time=totals.queue_time.copy(),
                time_to_first_token=totals.time_to_first_token.copy(),
                inter_token_latency=totals.inter_token_latency.copy(),
                e2e_latency=totals.e2e_latency.copy(),
                gen_throughput=0.0 if self._throughput.is_idle(now) else rate,
                last_gen_throughput=rate,
            )

    def queue_changed(self, num_running: int, num_waiting: int, num_used_tokens: int) -> None:
        """Take the state after a step or an abort."""
        now = self._clock()
        with self._lock:
            totals = self._totals
            totals.num_running = num_running
            totals.num_waiting = num_waiting
            totals.num_used_tokens = num_used_tokens
            has_work = num_running + num_waiting > 0
            self._throughput.advance(now, totals.generated_tokens, has_work)

    def request_admitted(
        self, num_prompt_tokens: int, num_cached_tokens: int, queue_seconds: float | None
    ) -> None:
        """Count a prefill that begins."""
        now = self._clock()
        with self._lock:
            totals = self._totals
            self._throughput.resume(now)
            totals.prefilled_tokens += num_prompt_tokens - num_cached_tokens
            totals.reused_tokens += num_cached_tokens
            if queue_seconds is not None:
                totals.prompt_tokens += num_prompt_tokens
                totals.cached_tokens += num_cached_tokens
                totals.queue_time.observe(queue_seconds)

    def first_token(self, seconds: float) -> None:
        """Count a first token."""
        with self._lock:
            self._totals.time_to_first_token.observe(seconds)

    def tokens_generated(self, num_tokens: int, seconds: float | None) -> None:
        """Count the tokens that a request got at once."""
        with self._lock:
            totals = self._totals
            totals.generated_tokens += num_tokens
            if seconds is not None:
                totals.inter_token_latency.observe(seconds / num_tokens, num_tokens)

    def drafts_verified(self, num_verifies: int, num_proposed: int, num_accepted: int) -> None:
        """Count verifies."""
        with self._lock:
            totals = self._totals
            totals.num_verifies += num_verifies
            totals.num_proposed_drafts += num_proposed
            totals.num_accepted_drafts += num_accepted

    def request_retracted(self) -> None:
        """Count a retraction."""
        with self._lock:
            self._totals.num_retracted += 1

    def request_finished(self, reason: str, seconds: float) -> None:
        """Count an end."""
        with self._lock:
            totals = self._totals
            totals.num_finished += 1
            if reason == "abort":
                totals.num_aborted += 1
            else:
                totals.e2e_latency.observe(seconds)

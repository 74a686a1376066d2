"""What an engine counts: cheap to write in its thread, safe to read in any."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from prometheus_client import CollectorRegistry

from specjax.adaptive import AdaptiveController
from specjax.metrics.prometheus import make_registry
from specjax.metrics.throughput import Throughput
from specjax.metrics.totals import Totals


class EngineMetrics:
    """Hears a scheduler's events and keeps the figures of one engine.

    The scheduler's thread writes; any thread reads. An event takes about a microsecond: what a
    scrape needs is computed at the scrape.

    Args:
        model_name: label of everything that is exposed.
        max_total_tokens: tokens that the KV pool holds.
        clock: seconds, that of the scheduler.
        controller: what chooses the drafted tokens, if anything does.

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
        controller: AdaptiveController | None = None,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._totals = Totals()
        self._throughput = Throughput()
        self.registry: CollectorRegistry = make_registry(
            self.snapshot, model_name, max_total_tokens, controller
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
            totals.reused_tokens += num_cached_tokens
            if queue_seconds is not None:
                totals.prompt_tokens += num_prompt_tokens
                totals.cached_tokens += num_cached_tokens
                totals.queue_time.observe(queue_seconds)

    def tokens_prefilled(self, num_tokens: int) -> None:
        """Count a prefill chunk."""
        with self._lock:
            self._totals.prefilled_tokens += num_tokens

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

"""An engine's figures as Prometheus families, under SGLang's names with the prefix ``specjax:``."""

import weakref
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from specjax.adaptive import AdaptiveController
from specjax.metrics.totals import Histogram, Totals

PREFIX = "specjax:"


def make_registry(
    read: Callable[[], Totals],
    model_name: str,
    max_total_tokens: int,
    controller: AdaptiveController | None = None,
) -> CollectorRegistry:
    """A registry of its own for one engine.

    Args:
        read: its figures of the moment of a scrape.
        model_name: value of the only label that everything has.
        max_total_tokens: tokens that the KV pool holds.
        controller: what chooses the drafted tokens, if anything does.
    """
    registry = CollectorRegistry()
    registry.register(TotalsCollector(read, model_name, max_total_tokens, controller))
    return registry


class TotalsCollector(Collector):
    """Makes all families from one reading of the figures."""

    def __init__(
        self,
        read: Callable[[], Totals],
        model_name: str,
        max_total_tokens: int,
        controller: AdaptiveController | None,
    ) -> None:
        # a registry that outlives its engine must not keep the device's memory
        self._controller = None if controller is None else weakref.ref(controller)
        self._read = read
        self._labels = {"model_name": model_name}
        self._max_total_tokens = max_total_tokens

    def collect(self) -> Iterator[Metric]:
        """All families; called by the registry at a scrape."""
        now = self._read()
        capacity = self._max_total_tokens
        for name, value, help_text in (
            ("num_running_reqs", now.num_running, "Requests that run."),
            ("num_queue_reqs", now.num_waiting, "Requests that wait, retracted ones included."),
            ("num_used_tokens", now.num_used_tokens, "Tokens in KV pages of running requests."),
            ("max_total_num_tokens", capacity, "Tokens that the KV pool holds."),
            ("token_usage", now.num_used_tokens / capacity, "Used share of the KV pool."),
            ("gen_throughput", now.gen_throughput, "Tokens a second in the last 5 s with work."),
            ("cache_hit_rate", now.cache_hit_rate, "Share of prompt tokens found in the cache."),
            ("spec_accept_length", now.accept_length, "Tokens a verify, bonus token included."),
            ("spec_accept_rate", now.accept_rate, "Accepted share of the proposed drafts."),
        ):
            yield self._family(GaugeMetricFamily, name, value, help_text)
        for name, value, help_text in (
            ("prompt_tokens", now.prompt_tokens, "Prompt tokens of admitted requests."),
            ("cached_tokens", now.cached_tokens, "Of the prompt tokens, found in the cache."),
            ("generation_tokens", now.generated_tokens, "Completion tokens."),
            ("num_requests", now.num_finished, "Requests that ended, aborted ones included."),
            ("num_aborted_requests", now.num_aborted, "Requests that ended by abort or timeout."),
            ("num_retracted_requests", now.num_retracted, "Times that a request was retracted."),
            ("spec_verify_calls", now.num_verifies, "Verifies, counted for each request."),
            ("spec_proposed_drafts", now.num_proposed_drafts, "Drafts that were verified."),
            ("spec_accepted_drafts", now.num_accepted_drafts, "Drafts that were accepted."),
        ):
            yield self._family(CounterMetricFamily, name, value, help_text)
        controller = None if self._controller is None else self._controller()
        if controller is not None:
            yield from self._adaptive(controller)
        yield self._by_mode(now)
        for name, histogram, help_text in (
            ("queue_time", now.queue_time, "From a request's making to its prefill."),
            ("time_to_first_token", now.time_to_first_token, "From its making to its first token."),
            ("inter_token_latency", now.inter_token_latency, "A token after the first."),
            ("e2e_request_latency", now.e2e_latency, "From the making of a request to its end."),
        ):
            yield self._histogram(f"{name}_seconds", histogram, help_text)

    def _adaptive(self, controller: AdaptiveController) -> Iterator[Metric]:
        steps, ema = controller.worker.speculative_num_steps, controller.ema_accept_len
        for name, value, help_text in (
            ("spec_num_steps", steps, "Drafted tokens of a round now."),
            ("spec_ema_accept_len", ema, "Accepted drafts of a verify, moving average."),
        ):
            yield self._family(GaugeMetricFamily, name, value, help_text)
        for name, value, help_text in (
            ("spec_num_switches", controller.switches, "Changes of the drafted tokens."),
            ("spec_wasted_drafts", controller.wasted_drafts, "Drafts that were not accepted."),
        ):
            yield self._family(CounterMetricFamily, name, value, help_text)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        value: float,
        help_text: str,
    ) -> Metric:
        family = kind(PREFIX + name, help_text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _by_mode(self, now: Totals) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "realtime_tokens",
            "Tokens computed or found in the cache, those of resumed requests included.",
            labels=(*self._labels, "mode"),
        )
        for mode, value in (
            ("prefill_compute", now.prefilled_tokens),
            ("prefill_cache", now.reused_tokens),
            ("decode", now.generated_tokens),
        ):
            family.add_metric((*self._labels.values(), mode), value)
        return family

    def _histogram(self, name: str, histogram: Histogram, help_text: str) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, help_text, labels=tuple(self._labels))
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        counts = accumulate(histogram.counts)
        family.add_metric(
            tuple(self._labels.values()),
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=histogram.total,
        )
        return family

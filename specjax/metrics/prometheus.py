"""An engine's figures as Prometheus families, under SGLang's names with the prefix ``specjax:``."""

from collections.abc import Iterable
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from specjax.metrics.totals import Histogram, Totals

PREFIX = "specjax:"
_EMA = (
    "Accepted drafts a verify, moving average. It excludes the bonus token, which "
    "spec_accept_length includes."
)
_SIMULATED = "Tokens a verify that are accepted right or wrong, to measure speed alone."
_COMPUTED = "Tokens computed or found in the cache, those of resumed requests included."
_KINDS: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Figure(NamedTuple):
    """One figure of an engine."""

    name: str  # in Prometheus, without the prefix and a counter's ``_total``
    kind: str
    field: str  # of Totals
    help: str
    needs: str = ""  # the field of Totals without which an engine has no such figure
    label: tuple[str, str] | None = None  # of one member of a family

    def of(self, totals: Totals) -> Any:
        return attrgetter(self.field)(totals)


FIGURES = (
    Figure("num_running_reqs", "gauge", "num_running", "Requests that run."),
    Figure("num_queue_reqs", "gauge", "num_waiting", "Requests that wait, also retracted ones."),
    Figure("num_used_tokens", "gauge", "num_used_tokens", "Tokens in pages of running requests."),
    Figure("max_total_num_tokens", "gauge", "max_total_tokens", "Tokens that the KV pool holds."),
    Figure("token_usage", "gauge", "token_usage", "Used share of the KV pool."),
    Figure("gen_throughput", "gauge", "gen_throughput", "Tokens/s in the last 5 s with work."),
    Figure("cache_hit_rate", "gauge", "cache_hit_rate", "Share of prompt tokens in the cache."),
    Figure("spec_accept_length", "gauge", "accept_length", "Tokens a verify, bonus included."),
    Figure("spec_accept_rate", "gauge", "accept_rate", "Accepted share of the proposed drafts."),
    Figure("prompt_tokens", "counter", "prompt_tokens", "Prompt tokens of admitted requests."),
    Figure("cached_tokens", "counter", "cached_tokens", "Of them, found in the prefix cache."),
    Figure("generation_tokens", "counter", "generated_tokens", "Completion tokens."),
    Figure("num_requests", "counter", "num_finished", "Requests that ended, also aborted ones."),
    Figure("num_aborted_requests", "counter", "num_aborted", "Ends by abort or timeout."),
    Figure("num_retracted_requests", "counter", "num_retracted", "Times that one was retracted."),
    Figure("spec_verify_calls", "counter", "num_verifies", "Verifies, counted for each request."),
    Figure("spec_proposed_drafts", "counter", "num_proposed_drafts", "Drafts that were verified."),
    Figure("spec_accepted_drafts", "counter", "num_accepted_drafts", "Drafts that were accepted."),
    Figure("spec_num_steps", "gauge", "tier.steps", "Drafted levels of a round now.", "drafts"),
    Figure("spec_num_draft_tokens", "gauge", "tier.nodes", "Rows of a verify now.", "drafts"),
    Figure("spec_ema_accept_len", "gauge", "ema_accept_len", _EMA, "adapts"),
    Figure("spec_num_switches", "counter", "num_switches", "Changes of the tier.", "adapts"),
    Figure(
        "spec_simulate_accept_length",
        "gauge",
        "simulate_accept_length",
        _SIMULATED,
        "simulate_accept_length",
    ),
    Figure("spec_wasted_drafts", "counter", "wasted_drafts", "Drafts not accepted.", "adapts"),
    Figure(
        "realtime_tokens",
        "counter",
        "prefilled_tokens",
        _COMPUTED,
        label=("mode", "prefill_compute"),
    ),
    Figure(
        "realtime_tokens", "counter", "reused_tokens", _COMPUTED, label=("mode", "prefill_cache")
    ),
    Figure("realtime_tokens", "counter", "generated_tokens", _COMPUTED, label=("mode", "decode")),
    Figure("queue_time_seconds", "histogram", "queue_time", "From making to prefill."),
    Figure("time_to_first_token_seconds", "histogram", "time_to_first_token", "From making."),
    Figure("inter_token_latency_seconds", "histogram", "inter_token_latency", "Of later tokens."),
    Figure("e2e_request_latency_seconds", "histogram", "e2e_latency", "From making to end."),
)


class EngineMetrics(Collector):
    """The figures of one engine, for Prometheus and for code; ``model_name`` labels them all.

    Attributes:
        registry: all figures, for ``prometheus_client``. Each engine has its own.
        snapshot: the figures of one moment, as :class:`Totals`; any thread may call it.
    """

    def __init__(self, model_name: str, totals: Totals) -> None:
        self._model_name = model_name
        self.snapshot = totals.snapshot
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterable[Any]:
        """All families; called by the registry at a scrape."""
        return families(self.snapshot(), FIGURES, PREFIX, self._model_name)


def families(
    totals: Totals, figures: Iterable[Figure], prefix: str, model_name: str
) -> Iterable[Any]:
    """Figures as Prometheus families, each sample with the label ``model_name``."""
    found: dict[str, Any] = {}
    for figure in figures:
        if figure.needs and not getattr(totals, figure.needs):
            continue
        labels = {"model_name": model_name} | dict([figure.label] if figure.label else ())
        name, values = prefix + figure.name, tuple(labels.values())
        if name not in found:
            found[name] = _KINDS[figure.kind](name, figure.help, labels=tuple(labels))
        value = figure.of(totals)
        if isinstance(value, Histogram):
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(value.counts), strict=True))
            found[name].add_metric(values, buckets, value.total)
        else:
            found[name].add_metric(values, value)
    return found.values()

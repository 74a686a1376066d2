"""``GET /metrics``: the engine's figures, some of them under vLLM's names too."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from specjax.metrics.prometheus import FIGURES, PREFIX, Figure, families
from specjax.server.exchange import Exchange
from specjax.server.service import Service

TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_REASON = "finished_reason"
_SUCCESS = "Number of requests that ended, by reason."
# vLLM's names, which benchmarks, dashboards and gateways look for
ALIASES = (
    Figure("num_requests_running", "gauge", "num_running", "Number of running requests."),
    Figure("num_requests_waiting", "gauge", "num_waiting", "Number of waiting requests."),
    Figure("kv_cache_usage_perc", "gauge", "token_usage", "Used share of the KV pool, up to 1."),
    Figure("num_preemptions", "counter", "num_retracted", "Number of preemptions."),
    Figure("prompt_tokens", "counter", "prompt_tokens", "Number of prompt tokens."),
    Figure("generation_tokens", "counter", "generated_tokens", "Number of completion tokens."),
    Figure("prefix_cache_queries", "counter", "prompt_tokens", "Prompt tokens looked up."),
    Figure("prefix_cache_hits", "counter", "cached_tokens", "Prompt tokens found in the cache."),
    Figure("request_success", "counter", "num_stopped", _SUCCESS, label=(_REASON, "stop")),
    Figure("request_success", "counter", "num_cut", _SUCCESS, label=(_REASON, "length")),
    Figure("request_success", "counter", "num_aborted", _SUCCESS, label=(_REASON, "abort")),
    Figure("request_prompt_tokens", "histogram", "prompt_length", "Prompt tokens per request."),
    Figure(
        "request_generation_tokens",
        "histogram",
        "completion_length",
        "Completion tokens per request.",
    ),
    Figure("request_queue_time_seconds", "histogram", "queue_time", "Seconds until prefill."),
    Figure("time_to_first_token_seconds", "histogram", "time_to_first_token", "Seconds."),
    Figure("inter_token_latency_seconds", "histogram", "inter_token_latency", "Seconds."),
    Figure("e2e_request_latency_seconds", "histogram", "e2e_latency", "Seconds until the end."),
    Figure("spec_decode_num_drafts", "counter", "num_verifies", "Number of verify passes."),
    Figure("spec_decode_num_draft_tokens", "counter", "num_proposed_drafts", "Verified drafts."),
    Figure("spec_decode_num_accepted_tokens", "counter", "num_accepted_drafts", "Accepted drafts."),
)
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


async def answer_metrics(service: Service, exchange: Exchange) -> None:
    await exchange.reply(generate_latest(ServerMetrics(service)), kind=TEXT)


class ServerMetrics:
    """All families of a server, as a registry gives them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Any]:
        name, engine = self._service.name, self._service.engine
        totals, config = engine.metrics.snapshot(), engine.runner.config
        yield from families(totals, FIGURES, PREFIX, name)
        yield from families(totals, ALIASES, "vllm:", name)
        accepted = totals.accepted_by_position
        labels = ["model_name", "position"]
        metric = CounterMetricFamily(PER_POSITION, "Drafts accepted at a position.", labels=labels)
        for position in range(config.reach.accept_width - 1):
            count = accepted[position] if position < len(accepted) else 0
            metric.add_metric([name, str(position)], count)
        yield metric
        sizes = {"block_size": str(config.page_size), "num_gpu_blocks": str(config.num_pages - 1)}
        sizes["model_name"] = name
        info = GaugeMetricFamily("vllm:cache_config_info", "Sizes.", labels=list(sizes))
        info.add_metric(list(sizes.values()), 1)
        yield info
        text = "Number of unknown request fields that were ignored."
        ignored = CounterMetricFamily(f"{PREFIX}ignored_request_fields", text)
        ignored.add_metric([], self._service.ignored_fields.count)
        yield ignored

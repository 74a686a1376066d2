"""``GET /metrics``: the engine's figures, and some of them under the names that others read."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from specjax.engine import Engine
from specjax.server.exchange import Exchange
from specjax.server.service import Service

TEXT = b"text/plain; version=0.0.4; charset=utf-8"
# vLLM's names, which benchmarks and gateways look for, of fields of Totals
ALIASES = (
    ("gauge", "vllm:num_requests_running", "num_running", "Requests that run."),
    ("gauge", "vllm:num_requests_waiting", "num_waiting", "Requests that wait."),
    ("gauge", "vllm:kv_cache_usage_perc", "token_usage", "Used share of the KV pool, up to 1."),
    ("counter", "vllm:spec_decode_num_drafts", "num_verifies", "Verifies."),
    ("counter", "vllm:spec_decode_num_draft_tokens", "num_proposed_drafts", "Drafts verified."),
    ("counter", "vllm:spec_decode_num_accepted_tokens", "num_accepted_drafts", "Drafts accepted."),
)
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


async def answer_metrics(service: Service, exchange: Exchange) -> None:
    engine = service.engine
    text = generate_latest(engine.metrics.registry) + generate_latest(Aliases(engine, service.name))
    await exchange.reply(text, kind=TEXT)


class Aliases:
    """The figures of :data:`ALIASES`, as a registry gives them."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name

    def collect(self) -> Iterable[Any]:
        totals = self._engine.metrics.snapshot()
        for kind, name, field, text in ALIASES:
            family = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
            metric = family(name, text, labels=["model_name"])
            metric.add_metric([self._name], getattr(totals, field))
            yield metric
        config = self._engine.runner.config
        accepted = totals.accepted_by_position
        labels = ["model_name", "position"]
        metric = CounterMetricFamily(PER_POSITION, "Drafts accepted at a position.", labels=labels)
        for position in range(config.largest.steps):
            count = accepted[position] if position < len(accepted) else 0
            metric.add_metric([self._name, str(position)], count)
        yield metric
        sizes = {"block_size": str(config.page_size), "num_gpu_blocks": str(config.num_pages - 1)}
        info = GaugeMetricFamily("vllm:cache_config_info", "Sizes.", labels=list(sizes))
        info.add_metric(list(sizes.values()), 1)
        yield info

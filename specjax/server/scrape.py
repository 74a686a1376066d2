"""``/metrics``: the engine's metrics, those of the server and its process, and names of vLLM."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from platform import python_version
from typing import Any

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

import specjax
from specjax.engine.engine import Engine
from specjax.metrics import METRICS, PREFIX, Metric, families
from specjax.scheduling.loop import EngineFault
from specjax.server.exchange import Exchange
from specjax.server.fields import ApiError
from specjax.server.service import STATES, Service

METRICS_KIND = b"text/plain; version=0.0.4; charset=utf-8"
_REASON = "finished_reason"
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_SUCCESS = "Number of finished requests, by reason."
# vLLM's names, which benchmarks, dashboards and gateways look for
ALIASES = (
    Metric("num_requests_running", "gauge", "num_running", "Number of running requests."),
    Metric("num_requests_waiting", "gauge", "num_waiting", "Number of waiting requests."),
    Metric("kv_cache_usage_perc", "gauge", "token_usage", "Used fraction of the KV pool, 0 to 1."),
    Metric("num_preemptions", "counter", "num_retracted", "Number of preemptions."),
    Metric("prompt_tokens", "counter", "prompt_tokens", "Number of prompt tokens."),
    Metric("generation_tokens", "counter", "generated_tokens", "Number of completion tokens."),
    Metric("prefix_cache_queries", "counter", "prompt_tokens", "Prompt tokens looked up."),
    Metric("prefix_cache_hits", "counter", "cached_tokens", "Prompt tokens served from cache."),
    Metric("request_success", "counter", "num_stopped", _SUCCESS, label=(_REASON, "stop")),
    Metric("request_success", "counter", "num_cut", _SUCCESS, label=(_REASON, "length")),
    Metric("request_success", "counter", "num_aborted", _SUCCESS, label=(_REASON, "abort")),
    Metric("request_prompt_tokens", "histogram", "prompt_length", "Prompt tokens per request."),
    Metric("request_generation_tokens", "histogram", "completion_length", "Completion tokens."),
    Metric("request_queue_time_seconds", "histogram", "queue_time", "Seconds in the queue."),
    Metric("time_to_first_token_seconds", "histogram", "time_to_first_token", "TTFT in seconds."),
    Metric("inter_token_latency_seconds", "histogram", "inter_token_latency", "ITL in seconds."),
    Metric("e2e_request_latency_seconds", "histogram", "e2e_latency", "Seconds per request."),
    Metric("spec_decode_num_drafts", "counter", "num_verifies", "Number of verify passes."),
    Metric("spec_decode_num_draft_tokens", "counter", "num_proposed_drafts", "Verified drafts."),
    Metric("spec_decode_num_accepted_tokens", "counter", "num_accepted_drafts", "Accepted drafts."),
    Metric(_PER_POSITION, "counter", "accepted_by_position", "Accepted drafts by position."),
)
PROCESS = ProcessCollector(registry=None)


async def metrics(service: Service, exchange: Exchange) -> None:
    await exchange.reply(generate_latest(ServerMetrics(service)), kind=METRICS_KIND)


@dataclass(frozen=True)
class ServerMetrics:
    """All metric families of a server, in the form of a Prometheus registry.

    Those of the engine are missing while it is loading, after it has failed and after it is closed.
    """

    service: Service

    def collect(self) -> Iterable[Any]:
        service, state = self.service, self.service.state
        yield from PROCESS.collect()
        yield _info(f"{PREFIX}build_info", "Versions.", _versions())
        states = GaugeMetricFamily(f"{PREFIX}server_state", "1 for the state.", labels=["state"])
        for name in STATES:
            states.add_metric([name], name == state)
        yield states
        labels = ["endpoint", "method", "status_code"]
        responses = CounterMetricFamily(f"{PREFIX}http_responses", "Responses.", labels=labels)
        for (endpoint, method, status), count in sorted(service.responses.items()):
            responses.add_metric([endpoint, method, str(status)], count)
        yield responses
        ignored = CounterMetricFamily(
            f"{PREFIX}ignored_request_fields", "Number of ignored unknown request fields."
        )
        ignored.add_metric([], service.ignored_fields.count)
        yield ignored
        with suppress(ApiError, EngineFault):  # a server that is stopping still has its engine
            yield from _of_engine(service.engine, service.name)


def _of_engine(engine: Engine, name: str) -> Iterator[Any]:
    totals, config = engine.metrics.snapshot(), engine.config
    yield from families(totals, METRICS, PREFIX, name)
    yield from families(totals, ALIASES, "vllm:", name)
    sizes = {"block_size": str(config.page_size), "num_gpu_blocks": str(config.num_pages - 1)}
    yield _info("vllm:cache_config_info", "KV cache sizes.", sizes | {"model_name": name})


def _info(name: str, text: str, labels: dict[str, str]) -> GaugeMetricFamily:
    info = GaugeMetricFamily(name, text, labels=list(labels))
    info.add_metric(list(labels.values()), 1)
    return info


@cache
def _versions() -> dict[str, str]:
    libraries = {name: version(name) for name in ("jax", "jaxlib")}
    return {"version": specjax.__version__, "python": python_version()} | libraries

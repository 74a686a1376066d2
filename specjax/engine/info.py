"""What an engine says of itself: arguments, sizes and state, in the shape of SGLang's."""

import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from typing import Any

from specjax.adaptive import AdaptiveController
from specjax.engine.args import EngineArgs
from specjax.engine.build import EngineParts
from specjax.kv.sizes import kv_bytes_per_token
from specjax.metrics.totals import Totals


def server_info(
    args: EngineArgs,
    parts: EngineParts,
    totals: Totals,
    controller: AdaptiveController | None = None,
) -> dict[str, Any]:
    """Arguments and sizes, and under ``internal_states`` a list with one dict of the state.

    Everything is plain data that ``json.dumps`` takes.

    Args:
        args: what the engine was told.
        parts: what came of it; sizes replace the arguments that left them open.
        totals: its figures now.
        controller: what chooses the drafted tokens, if anything does.
    """
    config = parts.runner.config
    capacity = (config.num_pages - 1) * config.page_size
    return {
        **_plain(args),
        "model_path": parts.target.name,
        "dtype": parts.target.config.dtype,
        "context_length": parts.context_length,
        "max_running_requests": parts.max_running_requests,
        "batch_buckets": list(config.batch_buckets),
        "chunked_prefill_size": config.prefill_buckets[-1],
        "max_total_num_tokens": capacity,
        "max_req_input_len": parts.context_length - 1,
        "version": version("specjax"),
        "internal_states": [_state(parts, totals, capacity, controller)],
    }


def _state(
    parts: EngineParts, totals: Totals, capacity: int, controller: AdaptiveController | None
) -> dict[str, Any]:
    state = {
        "num_running_reqs": totals.num_running,
        "num_queue_reqs": totals.num_waiting,
        "num_used_tokens": totals.num_used_tokens,
        "token_usage": totals.num_used_tokens / capacity,
        "gen_throughput": totals.gen_throughput,
        "last_gen_throughput": totals.last_gen_throughput,
        "num_requests": totals.num_finished,
        "num_aborted_requests": totals.num_aborted,
        "num_retracted_requests": totals.num_retracted,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "generation_tokens": totals.generated_tokens,
        "cache_hit_rate": totals.cache_hit_rate,
        "memory_usage": _memory_usage(parts, capacity),
    }
    if parts.draft is not None:
        state |= {
            "speculative_num_steps": parts.runner.speculative_num_steps,
            "avg_spec_accept_length": totals.accept_length,
            "spec_accept_rate": totals.accept_rate,
            "spec_verify_ct": totals.num_verifies,
            "spec_num_proposed_drafts": totals.num_proposed_drafts,
            "spec_num_correct_drafts": totals.num_accepted_drafts,
        }
    if controller is not None:
        state["adaptive"] = controller.describe()
    return state


def _memory_usage(parts: EngineParts, capacity: int) -> dict[str, Any]:
    """GB (1e9 bytes) of weights and KV pools, and the tokens that the pools hold."""
    nets, config = parts.runner.networks, parts.runner.config
    models = [flat for flat in (nets.target, nets.head) if flat is not None]
    configs = [c for c in (nets.target_config, nets.head_config) if c is not None]
    weight = sum(leaf.size * leaf.dtype.itemsize for flat in models for leaf in flat.abstract)
    slots = config.num_pages * config.page_size
    return {
        "weight": weight / 1e9,
        "kvcache": slots * sum(map(kv_bytes_per_token, configs)) / 1e9,
        "token_capacity": capacity,
    }


def _plain(args: EngineArgs) -> dict[str, Any]:
    given = {f.name: getattr(args, f.name) for f in fields(args)}
    return {name: _plain_value(value) for name, value in given.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return dict(value) if isinstance(value, Mapping) else value

"""The server info of an engine: its arguments, sizes and state, with the keys that SGLang uses."""

import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from typing import Any

from specjax.adaptive import TierController
from specjax.engine.plan import EnginePlan
from specjax.metrics import METRICS, Totals

# metrics whose name in SGLang's server info differs from that in Prometheus
NAMES = {
    "spec_accept_length": "avg_spec_accept_length",
    "spec_verify_calls": "spec_verify_ct",
    "spec_proposed_drafts": "spec_num_proposed_drafts",
    "spec_accepted_drafts": "spec_num_correct_drafts",
    "spec_num_steps": "speculative_num_steps",
    "spec_num_draft_tokens": "speculative_num_draft_tokens",
}


def server_info(
    plan: EnginePlan, totals: Totals, controller: TierController | None
) -> dict[str, Any]:
    """Return arguments, planned sizes and, in ``internal_states``, metrics, as SGLang does."""
    args, format = plan.args, plan.target.config.quantization
    tier = {
        "speculative_num_steps": totals.tier.steps,
        "speculative_eagle_topk": totals.tier.topk,
        "speculative_num_draft_tokens": totals.tier.verified,
    }
    return {
        **{f.name: _plain(getattr(args, f.name)) for f in fields(args) if f.repr},
        **(tier if totals.drafts else {}),
        "model_path": plan.target.name,
        "dtype": plan.target.config.dtype,
        "quantization": None if format is None else format.kind,
        "context_length": plan.context_length,
        "max_running_requests": plan.config.num_slots - 1,
        "max_state_snapshots": plan.config.num_snapshots,
        "batch_buckets": list(plan.config.batch_buckets),
        "chunked_prefill_size": plan.config.mixed_prefill_tokens,
        "max_total_num_tokens": totals.max_total_tokens,
        "max_req_input_len": plan.context_length - 1,
        "version": version("specjax"),
        "internal_states": [_state(plan, totals, controller)],
    }


def _state(plan: EnginePlan, totals: Totals, controller: TierController | None) -> dict[str, Any]:
    kinds = ("chains", "is_mixture", "max_window_tokens")
    needs = "", "drafts", *(kind for kind in kinds if getattr(totals, kind))
    metrics = {
        NAMES.get(metric.name, metric.name): metric.of(totals)
        for metric in METRICS
        if metric.kind != "histogram"
        and not metric.label
        and metric.needs in needs
        and (totals.drafts or not metric.name.startswith("spec_"))
    }
    memory = {  # GB of 1e9 bytes, on each device
        "weight": plan.weight_bytes / 1e9,
        "replicated_weight": plan.networks.replicated_bytes / 1e9,
        "states": plan.state_bytes / 1e9,
        "kvcache": plan.kv_bytes / 1e9,
        "temporary": plan.needs.temporary_bytes / 1e9,
        "token_capacity": totals.max_total_tokens,
    }
    adaptive = {} if controller is None else {"adaptive": controller.describe()}
    last = {"last_gen_throughput": totals.last_gen_throughput, "memory_usage": memory}
    return metrics | last | adaptive


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return dict(value) if isinstance(value, Mapping) else value

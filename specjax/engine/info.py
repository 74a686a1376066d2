"""What an engine says of itself: arguments, sizes and state, in the shape of SGLang's."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.adaptive import AdaptiveController
from specjax.engine.args import EngineArgs
from specjax.engine.plan import EnginePlan
from specjax.metrics.prometheus import FIGURES
from specjax.metrics.totals import Totals
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Weights
from specjax.models.layers import rotated

# where SGLang's server info has another name than its Prometheus figures
NAMES = {
    "spec_accept_length": "avg_spec_accept_length",
    "spec_verify_calls": "spec_verify_ct",
    "spec_proposed_drafts": "spec_num_proposed_drafts",
    "spec_accepted_drafts": "spec_num_correct_drafts",
    "spec_num_steps": "speculative_num_steps",
    "spec_num_draft_tokens": "speculative_num_draft_tokens",
}


def server_info(
    args: EngineArgs, plan: EnginePlan, totals: Totals, controller: AdaptiveController | None
) -> dict[str, Any]:
    """Arguments, sizes in the place of those left open, and under ``internal_states`` figures."""
    tier = {
        "speculative_num_steps": totals.tier.steps,
        "speculative_eagle_topk": totals.tier.topk,
        "speculative_num_draft_tokens": totals.tier.nodes,
    }
    return {
        **{f.name: _plain(getattr(args, f.name)) for f in fields(args) if f.repr},
        **(tier if totals.drafts else {}),
        "model_path": plan.target.name,
        "dtype": plan.target.config.dtype,
        "context_length": plan.context_length,
        "max_running_requests": plan.config.num_slots - 1,
        "batch_buckets": list(plan.config.batch_buckets),
        "chunked_prefill_size": plan.config.mixed_prefill_tokens,
        "max_total_num_tokens": totals.max_total_tokens,
        "max_req_input_len": plan.context_length - 1,
        "version": version("specjax"),
        "internal_states": [_state(plan, totals, controller)],
    }


def _state(
    plan: EnginePlan, totals: Totals, controller: AdaptiveController | None
) -> dict[str, Any]:
    figures = {
        NAMES.get(figure.name, figure.name): figure.of(totals)
        for figure in FIGURES
        if figure.kind != "histogram"
        and not figure.label
        and figure.needs in ("", "drafts")
        and (totals.drafts or not figure.name.startswith("spec_"))
    }
    memory = {  # GB of 1e9 bytes
        "weight": plan.pools.weight_bytes / 1e9,
        "kvcache": plan.pools.kv_bytes / 1e9,
        "temporary": plan.pools.temporary_bytes / 1e9,
        "token_capacity": totals.max_total_tokens,
    }
    adaptive = {} if controller is None else {"adaptive": controller.describe()}
    last = {"last_gen_throughput": totals.last_gen_throughput, "memory_usage": memory}
    return figures | last | adaptive


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return dict(value) if isinstance(value, Mapping) else value


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """JAX's own attention of ``[B, T, N, H]`` over ``[B, L, KV, H]``; float32 is IEEE float32."""
    precision = "highest" if q.dtype == jnp.float32 else "default"
    # it mixes bfloat16 and float32, also under a caller's strict promotion
    with jax.default_matmul_precision(precision), jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, **options)


@rotated
def dense_attend(
    kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[Any, jax.Array]:
    """Causal attention over the tokens at hand, without any KV storage."""
    return kv, dense_attention(q, k, v, is_causal=True)


@partial(jax.jit, static_argnums=0)
def _next_logits(
    flat: FlatModel[CausalLM], weights: Weights, tokens: jax.Array, last: jax.Array
) -> jax.Array:
    model = flat.rebuild(weights)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    hidden, _, _ = model(tokens, positions, None, dense_attend)
    return model.logits(hidden[0, last])


def next_logits(
    flat: FlatModel[CausalLM], weights: Weights, input_ids: Sequence[int]
) -> np.ndarray:
    """Float32 logits ``[V]`` of the token behind ``input_ids``, in one pass."""
    # padded so that inputs of similar length share one compiled function
    tokens = np.zeros((1, -(-len(input_ids) // 64) * 64), np.int32)
    tokens[0, : len(input_ids)] = input_ids
    return np.asarray(_next_logits(flat, weights, tokens, np.int32(len(input_ids) - 1)))

"""Answers about a model that serving does not need."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Weights
from specjax.models.layers import rotated


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

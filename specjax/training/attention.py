"""Attention for training and for generating training data.

Serving attends over a paged pool; training has whole sequences and generation has a dense cache, so
each supplies its own ``attend`` callback (:data:`specjax.models.layers.Attend`) to the same models.

Axes: B rows, T tokens per row, L cache length, N query heads, KV key/value heads, G = N / KV,
H head dim.
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from specjax.engine.diagnostics import dense_attention
from specjax.models.layers import Attend, precision_for, rotated

_NEGATIVE = -1e30


def masked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, **fused: Any
) -> jax.Array:
    """Grouped-query attention ``[B, T, N, H]`` of q over keys and values ``[B, L, KV, H]``.

    ``mask`` is bool, broadcastable to ``[B, 1, T, L]``. Scores and softmax are float32. In half
    precision on a GPU cuDNN computes it; ``fused`` says the mask in arguments that cost it less.
    """
    if q.dtype == jnp.bfloat16 and jax.default_backend() == "gpu":
        return dense_attention(q, k, v, implementation="cudnn", **(fused or {"mask": mask}))
    return dense_attention(q, k, v, mask=mask)


def packed_attend(segments: jax.Array) -> Attend:
    """Causal attention within the segments ``i32[B, T]`` of packed rows; threads no cache."""
    mask = _causal_mask(segments)[:, None]
    return rotated(lambda kv, layer, q, k, v: (kv, masked_attention(q, k, v, mask)))


def ttt_attend(segments: jax.Array) -> Attend:
    """Attention of the unrolled draft steps of training-time test over packed rows.

    ``kv`` is the tuple of the earlier steps' ``(k, v)``. A query of row i at step j sees step 0's
    keys at rows up to i of its segment and, of each later step including its own, row i only: the
    keys that a chain drafted from row i sees when serving.
    """
    mask = _causal_mask(segments)[:, None, None]

    @rotated
    def attend(
        kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[Any, jax.Array]:
        kv = (*kv, (k, v))
        (first_k, first_v), later = kv[0], kv[1:]
        grouped, scale = _grouped(q, k), q.shape[-1] ** -0.5
        causal = _product("btkgh,blkh->bkgtl", grouped, first_k) * scale
        causal = jnp.where(mask, causal, _NEGATIVE)
        # [B, KV, G, T] each: products of a row with its own later keys
        own = [_product("btkgh,btkh->bkgt", grouped, step_k) * scale for step_k, _ in later]
        peak = jax.lax.stop_gradient(reduce(jnp.maximum, own, causal.max(axis=-1)))
        weights = jnp.exp(causal - peak[..., None])
        own_weights = [jnp.exp(score - peak) for score in own]
        total = weights.sum(axis=-1) + sum(own_weights)
        out = _product("bkgtl,blkh->btkgh", weights.astype(v.dtype), first_v)
        for weight, (_, step_v) in zip(own_weights, later, strict=True):
            rows = jnp.moveaxis(weight, 3, 1)[..., None]
            out = out + rows * step_v.astype(jnp.float32)[:, :, :, None]
        out = out / jnp.moveaxis(total, 3, 1)[..., None]
        return kv, out.reshape(q.shape).astype(v.dtype)

    return attend


def _causal_mask(segments: jax.Array) -> jax.Array:
    # bool [B, T, T] of packed rows: earlier tokens of the same segment and oneself
    rows = jnp.arange(segments.shape[1])
    same = segments[:, :, None] == segments[:, None, :]
    return same & (rows[:, None] >= rows[None, :])


def _grouped(q: jax.Array, k: jax.Array) -> jax.Array:
    # [B, T, N, H] to [B, T, KV, G, H]
    return q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = precision_for(a.dtype)
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)

"""Attention for training and for generating training data.

Serving attends over a paged pool; training has whole sequences and generation has a dense cache, so
each supplies its own ``attend`` callback (:data:`specjax.models.layers.Attend`) to the same models.

Axes: B rows, T tokens per row, L cache length, N query heads, KV key/value heads, G = N / KV,
H head dim.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.layers import Attend, precision_for, rotated

NEGATIVE = -1e30


def default_implementation(dtype: jnp.dtype) -> str:
    """``cudnn`` (fused) for half precision on a GPU, ``xla`` elsewhere."""
    half = jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
    return "cudnn" if half and jax.default_backend() == "gpu" else "xla"


def causal_mask(segments: jax.Array) -> jax.Array:
    """Mask bool ``[B, T, T]`` of packed rows: earlier tokens of the same segment and oneself."""
    length = segments.shape[1]
    rows = jnp.arange(length)
    same = segments[:, :, None] == segments[:, None, :]
    return same & (rows[:, None] >= rows[None, :])


def packed_attend(segments: jax.Array, implementation: str) -> Attend:
    """Causal attention within the segments ``i32[B, T]`` of packed rows; threads no cache."""
    mask = causal_mask(segments)[:, None]

    @rotated
    def attend(
        kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[Any, jax.Array]:
        if implementation == "cudnn":
            return kv, jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")
        return kv, masked_attention(q, k, v, mask)

    return attend


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention ``[B, T, N, H]`` of q over keys and values ``[B, L, KV, H]``.

    ``mask`` is bool, broadcastable to ``[B, 1, T, L]``. Scores and softmax are float32.
    """
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    precision = precision_for(q.dtype)
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum(
        "btkgh,blkh->bkgtl", grouped, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.where(mask[:, :, None], scores * dim**-0.5, NEGATIVE)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgtl,blkh->btkgh", probs, v, precision=precision)
    return out.reshape(batch, length, heads, dim)


def ttt_attend(segments: jax.Array) -> Attend:
    """Attention of the unrolled draft steps of training-time test over packed rows.

    ``kv`` is the tuple of the earlier steps' ``(k, v)``. A query of row i at step j sees step 0's
    keys at rows up to i of its segment and, of each later step including its own, row i only: the
    keys that a chain drafted from row i sees when serving.
    """
    mask = causal_mask(segments)[:, None, None]

    @rotated
    def attend(
        kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[Any, jax.Array]:
        kv = (*kv, (k, v))
        batch, length, heads, dim = q.shape
        kv_heads = k.shape[2]
        precision = precision_for(q.dtype)
        (first_k, first_v), later = kv[0], kv[1:]
        grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
        scale = dim**-0.5
        causal = jnp.einsum(
            "btkgh,blkh->bkgtl",
            grouped,
            first_k,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        causal = jnp.where(mask, causal * scale, NEGATIVE)
        # [B, KV, G, T] each: products of a row with its own later keys
        own = [
            jnp.einsum(
                "btkgh,btkh->bkgt",
                grouped,
                step_k,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            * scale
            for step_k, _ in later
        ]
        peak = causal.max(axis=-1)
        for score in own:
            peak = jnp.maximum(peak, score)
        peak = jax.lax.stop_gradient(peak)
        weights = jnp.exp(causal - peak[..., None])
        own_weights = [jnp.exp(score - peak) for score in own]
        total = weights.sum(axis=-1) + sum(own_weights)
        out = jnp.einsum(
            "bkgtl,blkh->btkgh",
            weights.astype(v.dtype),
            first_v,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        for weight, (_, step_v) in zip(own_weights, later, strict=True):
            rows = jnp.moveaxis(weight, 3, 1)[..., None]
            out = out + rows * step_v.astype(jnp.float32)[:, :, :, None]
        out = out / jnp.moveaxis(total, 3, 1)[..., None]
        return kv, out.reshape(batch, length, heads, dim).astype(v.dtype)

    return attend

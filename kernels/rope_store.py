"""Normalise and rotate queries and keys, and store keys and values, in one launch.

XLA needs three to four launches; the scatter into the pool alone takes 4 to 6 us (32 rows of 8 KV
heads of 128, one H200). Queries, keys and values may be the partial sums of a matrix product
that was split along its inner axis. Axes: B requests, T new tokens per request, N query and KV
key/value heads, H head dim, P partial sums; for the pool, see ``kv_format``.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.add_norm import rms_norm, scaled, whole
from specjax.kernels.backend import INVARIANT, WORD, power_of_two, resolve, spans, triton_call
from specjax.kernels.kv_format import head_dim_of, saturated, to_pool, to_words

# enough to give each of 132 multiprocessors several programs
ENOUGH_PROGRAMS = 1024
MAX_TOKENS = 16


# scales ``[H]`` of queries and of keys, and the epsilon of both
Norms = tuple[Array, Array, float]


def normed(q: Array, k: Array, norms: Norms | None) -> tuple[Array, Array]:
    """Apply RMS norms to the heads ``[..., H]`` of queries and keys, if there are norms."""
    if norms is None:
        return q, k
    q_scale, k_scale, eps = norms
    return rms_norm(q, q_scale, eps), rms_norm(k, k_scale, eps)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate ``x [..., H]`` in float32 by tables ``[..., H / 2]``; i and i + H / 2 form a pair."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (low * cos - high * sin, high * cos + low * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _reference(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, pool: Any, layer: Any, slots: Any, norms: Any
) -> Any:
    q, k, v = (whole(x, 4, jnp.bfloat16) for x in (q, k, v))
    q, k = normed(q, k, norms)
    stored = to_pool(jnp.stack([rotate(k, cos, sin), v], axis=2), pool.dtype)
    return rotate(q, cos, sin), pool.at[layer, slots].set(stored)


def specjax_rope_store(
    layer_ref: Any,
    slots_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    qkv_ref: Any,
    *refs: Any,
    block: int,
    eps: float | None,
) -> None:
    """Kernel body: one program per (block of tokens, head of q, k or v)."""
    *scale_refs, _pool_in, q_ref, pool_ref = refs
    tokens, half = cos_ref.shape
    heads, kv_heads = q_ref.shape[1], pool_ref.shape[3]
    head = pl.program_id(1)
    # lanes after the last token repeat the first ones and store the same values to the same slots
    token = (pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)) % tokens
    # pairs of slices whose elements are rotated with each other
    pairs = list(zip(spans(half), spans(half, half), strict=True))

    def loaded(span: Any) -> Array:
        x = qkv_ref[0, token, head, span]
        for i in range(1, qkv_ref.shape[0]):
            x += qkv_ref[i, token, head, span]
        return x.astype(q_ref.dtype)

    values = [(loaded(low), loaded(high)) for low, high in pairs]
    layer = layer_ref[0]

    def put(ref: Any, at: Any, pair: Any, low: Any, high: Any) -> None:
        if ref.dtype == WORD:
            ref[*at, low] = to_words(*pair)
            return
        for z, span in zip(pair, (low, high), strict=True):
            ref[*at, span] = saturated(z, ref.dtype)

    def store_rotated(index: int, ref: Any, *at: Any) -> None:
        wide = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in values]
        if scale_refs:
            squares = [jnp.sum(x * x, axis=1) + jnp.sum(y * y, axis=1) for x, y in wide]
            mean = sum(squares[1:], squares[0]) / (2 * half)
            inverse, scale = jax.lax.rsqrt(mean + eps)[:, None], scale_refs[index]
            wide = [
                tuple(
                    scaled(z * inverse, scale[span], q_ref.dtype).astype(jnp.float32)
                    for z, span in zip(pair, slices, strict=True)
                )
                for pair, slices in zip(wide, pairs, strict=True)
            ]
        for (x, y), (low, high) in zip(wide, pairs, strict=True):
            cos, sin = cos_ref[token, low], sin_ref[token, low]
            turned = x * cos - y * sin, y * cos + x * sin
            put(ref, at, [z.astype(q_ref.dtype) for z in turned], low, high)

    @pl.when(head < heads)
    def _() -> None:
        store_rotated(0, q_ref, token, head)

    @pl.when((head >= heads) & (head < heads + kv_heads))
    def _() -> None:
        store_rotated(1, pool_ref, layer, slots_ref[token], 0, head - heads)

    @pl.when(head >= heads + kv_heads)
    def _() -> None:
        slot, at = slots_ref[token], head - heads - kv_heads
        for pair, slices in zip(values, pairs, strict=True):
            put(pool_ref, (layer, slot, 1, at), pair, *slices)


def rope_store(
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    pool: Array,
    layer: int,
    slots: Array,
    *,
    norms: Norms | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Normalise and rotate queries and keys, and store keys and values in a layer of the KV pool.

    Writes in place if the caller donates ``pool``; otherwise XLA copies it first.

    Args:
        q: ``[B, T, N, H]``, before norms and rotation. q, k and v all have the same dtype, or all
            are float32 partial sums of bfloat16 products, with a leading axis P.
        k: ``[B, T, KV, H]``, before norms and rotation.
        v: ``[B, T, KV, H]``.
        cos: f32 ``[B, T, 1, H / 2]``.
        sin: f32 ``[B, T, 1, H / 2]``.
        pool: ``[L, slots, 2, KV, H]``, in the dtype of q, k and v, or words of
            ``[L, slots, 2, KV, H / 2]``, whose values saturate.
        slots: i32 ``[B, T]``; if slots are equal (padding page), one of their tokens is kept.
        norms: scales ``[H]`` of the RMS norms of each query and each key head, in the dtype of q
            or float32, and their epsilon; ``None`` skips them. The mean square is in float32.
        implementation: ``"invariant"`` has a program per token, so that the order of summation in
            a norm does not depend on the number of tokens.

    Returns:
        The rotated queries and the pool.
    """
    is_invariant = implementation in INVARIANT
    implementation = resolve(implementation, head_dim=q.shape[-1])
    tables = (*q.shape[-4:-2], 1, q.shape[-1] // 2)
    if (
        k.shape != v.shape
        or k.shape[-2:] != (pool.shape[3], head_dim_of(pool))
        or slots.shape != q.shape[-4:-2]
        or cos.shape != tables
        or sin.shape != tables
        or any(scale.shape != q.shape[-1:] for scale in (norms or ())[:2])
    ):
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape}, cos {cos.shape}, sin {sin.shape}, slots "
            f"{slots.shape}, pool {pool.dtype}{pool.shape}, norms "
            f"{[s.shape for s in (norms or ())[:2]]}: expected [B, T, N, H], [B, T, KV, H] twice, "
            "[B, T, 1, H / 2] twice, [B, T], [L, slots, 2, KV, H] (words: H / 2) and [H] twice"
        )
    if implementation == "xla" or q.size == 0:
        return _reference(q, k, v, cos, sin, pool, layer, slots, norms)
    *lead, heads, dim = q.shape[-4:]
    # the three are parts of one matrix product, so XLA removes the split and the concatenation
    qkv = jnp.concatenate([q, k, v], axis=-2)
    tokens, columns = slots.size, qkv.shape[-2]
    qkv = qkv.reshape(-1, tokens, columns, dim)
    scales, eps = (norms[:2], norms[2]) if norms else ((), None)
    # the widest heads would take too many registers
    most = MAX_TOKENS // 2 if dim > 256 else MAX_TOKENS
    block = min(most, power_of_two(pl.cdiv(tokens * columns, ENOUGH_PROGRAMS)))
    block = 1 if is_invariant and norms else block
    rotated, pool = triton_call(
        partial(specjax_rope_store, block=block, eps=eps),
        grid=(pl.cdiv(tokens, block), columns),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, heads, dim), q.dtype if q.ndim == 4 else jnp.bfloat16),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        num_warps=max(1, block // 8),
        implementation=implementation,
        input_output_aliases={5 + len(scales): 1},
    )(
        jnp.full((1,), layer, jnp.int32),
        slots.reshape(-1),
        cos.reshape(tokens, dim // 2),
        sin.reshape(tokens, dim // 2),
        qkv,
        *scales,
        pool,
    )
    return rotated.reshape(*lead, heads, dim), pool

"""Attention of a block of new tokens over a paged KV pool, with a tree mask inside the block.

Axes: B requests, T new tokens (tree rows) a request, N query heads, KV key/value heads, H head dim,
P pages a request. The T new tokens of a request lie in the slots of positions ``seq_len ..
seq_len + T - 1`` in row order; a row sees every key before ``seq_len`` and, of the new ones, those
that the mask names. The pool is ``[L, slots, 2, KV, H]``: keys and values of one token side by side,
so that one store writes both. Page 0 is the padding page.
"""

import jax
import jax.numpy as jnp

# keys a step of the chunked form; at 256 a short context needs one step and the loop costs nothing
CHUNK = 256


def _visible(
    keys: jax.Array, seq_lens: jax.Array, tree_mask: jax.Array | None, rows: int
) -> jax.Array:
    """Bool ``[B, T, C]``: which key positions ``keys [C]`` each row sees."""
    offset = keys[None, :] - seq_lens[:, None]  # [B, C]
    if tree_mask is None:
        return offset[:, None, :] <= jnp.arange(rows)[None, :, None]
    inside = jnp.clip(offset, 0, rows - 1)[:, None, :]
    in_tree = jnp.take_along_axis(
        tree_mask, jnp.broadcast_to(inside, tree_mask.shape[:2] + keys.shape), axis=2
    )
    return jnp.where((offset < 0)[:, None, :], True, in_tree & (offset < rows)[:, None, :])


def _gather(
    pool: jax.Array, layer: int, page_table: jax.Array, keys: jax.Array, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Keys and values ``[B, C, KV, H]`` at positions ``keys [C]`` of each request."""
    num_slots = pool.shape[1]
    pages = page_table.at[:, keys // page_size].get(mode="fill", fill_value=0)
    slots = pages * page_size + keys % page_size
    # one flat index: slicing the layer out first would copy it
    rows = pool.reshape(-1, *pool.shape[2:])[layer * num_slots + slots]
    return rows[:, :, 0], rows[:, :, 1]


def _scores(q: jax.Array, k: jax.Array, visible: jax.Array) -> jax.Array:
    """Masked float32 scores ``[B, T, KV, G, C]`` of grouped queries ``[B, T, KV, G, H]``."""
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum(
        "btkgh,bckh->btkgc", q, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = scores * q.shape[-1] ** -0.5
    return jnp.where(visible[:, :, None, None, :], scores, -jnp.inf)


def _mix(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Float32 ``[B, T, KV, G, H]`` of weights ``[B, T, KV, G, C]`` over values."""
    precision = jax.lax.Precision.HIGHEST if v.dtype == jnp.float32 else None
    return jnp.einsum(
        "btkgc,bckh->btkgh",
        weights.astype(v.dtype),
        v,
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def tree_attention_reference(
    q: jax.Array,
    pool: jax.Array,
    layer: int,
    page_table: jax.Array,
    seq_lens: jax.Array,
    tree_mask: jax.Array | None,
    page_size: int,
) -> jax.Array:
    """Dense form of :func:`tree_attention`: gathers the whole page table of every request."""
    batch, rows, heads, dim = q.shape
    keys = jnp.arange(page_table.shape[1] * page_size, dtype=jnp.int32)
    k, v = _gather(pool, layer, page_table, keys, page_size)
    grouped = q.reshape(batch, rows, pool.shape[3], -1, dim)
    scores = _scores(grouped, k, _visible(keys, seq_lens, tree_mask, rows))
    return _mix(jax.nn.softmax(scores, axis=-1), v).astype(q.dtype).reshape(q.shape)


def tree_attention_chunked(
    q: jax.Array,
    pool: jax.Array,
    layer: int,
    page_table: jax.Array,
    seq_lens: jax.Array,
    tree_mask: jax.Array | None,
    page_size: int,
) -> jax.Array:
    """Online-softmax form: work follows the longest request, not the width of the page table."""
    batch, rows, heads, dim = q.shape
    grouped = q.reshape(batch, rows, pool.shape[3], -1, dim)

    def chunk(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        best, total, mixed = carry
        keys = i * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        k, v = _gather(pool, layer, page_table, keys, page_size)
        scores = _scores(grouped, k, _visible(keys, seq_lens, tree_mask, rows))
        new_best = jnp.maximum(best, scores.max(axis=-1))
        # the first chunk holds key 0, which every row sees, so new_best is finite
        weights = jnp.exp(scores - new_best[..., None])
        scale = jnp.exp(best - new_best)
        return (
            new_best,
            total * scale + weights.sum(axis=-1),
            mixed * scale[..., None] + _mix(weights, v),
        )

    shape = grouped.shape[:-1]
    start = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(grouped.shape, jnp.float32),
    )
    num_chunks = (jnp.max(seq_lens) + rows + CHUNK - 1) // CHUNK
    _, total, mixed = jax.lax.fori_loop(0, num_chunks, chunk, start)
    return (mixed / total[..., None]).astype(q.dtype).reshape(q.shape)


IMPLEMENTATIONS = {"reference": tree_attention_reference, "chunked": tree_attention_chunked}


def tree_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: int,
    page_table: jax.Array,
    seq_lens: jax.Array,
    tree_mask: jax.Array | None,
    *,
    page_size: int,
    implementation: str,
) -> jax.Array:
    """Attention of T new tokens a request over its pages.

    Args:
        q: ``[B, T, N, H]``, rotated queries.
        pool: ``[L, slots, 2, KV, H]``, already holding the new tokens' keys and values.
        layer: index into L.
        page_table: i32 ``[B, P]``; entries behind a request's pages are 0.
        seq_lens: i32 ``[B]``, tokens before the new ones.
        tree_mask: bool ``[B, T, T]``, true where a row sees another new token; ``None`` is causal.
            A row must see itself.
        page_size: tokens a page.
        implementation: ``"chunked"`` (a loop over the context, for CPUs) or ``"reference"``.

    Returns:
        ``[B, T, N, H]`` in the dtype of ``q``.

    Raises:
        ValueError: for shapes that do not belong together or an unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {list(IMPLEMENTATIONS)}")
    if pool.ndim != 5 or pool.shape[2] != 2 or pool.shape[4] != q.shape[3]:
        raise ValueError(f"pool {pool.shape} must be [L, slots, 2, KV, {q.shape[3]}]")
    if q.shape[2] % pool.shape[3]:
        raise ValueError(f"{q.shape[2]} query heads are no multiple of {pool.shape[3]} KV heads")
    attention = IMPLEMENTATIONS[implementation]
    return attention(q, pool, layer, page_table, seq_lens, tree_mask, page_size)

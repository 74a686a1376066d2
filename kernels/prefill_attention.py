"""Causal attention of packed prompt chunks over a paged KV pool.

Axes: W packed tokens, G segments (one per request), N query heads, KV key/value heads, H head dim,
P pages per request. Segment g has ``counts[g]`` rows, directly after those of segment g - 1. Its
first token is at position ``starts[g]`` of its request. A row sees the keys of its own request up
to its own position, with a window W the last W of them. Rows after the last segment are padding.
The pool is ``[L, slots, 2, KV, H]`` as in ``tree_attention``; page 0 is the padding page.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import power_of_two, resolve, takes_head_dim, triton_call
from specjax.kernels.kv_format import for_products, head_spans, load_kv
from specjax.kernels.tree_attention import (
    NEGATIVE,
    add_keys,
    base2_scores,
    check_heads,
    empty_sums,
    row_dot,
    tree_attention,
    with_sinks,
)


def running_sums(counts: Array) -> Array:
    """Sums i32 ``[G]`` of the first 1 to G counts, without the loop of ``cumsum`` in jax 0.12."""
    index = jnp.arange(counts.shape[0])
    return jnp.where(index <= index[:, None], counts, 0).sum(axis=1, dtype=jnp.int32)


def _bounds(counts: Array, rows: int) -> tuple[Array, Array]:
    """First rows and ends of the segments, i32 ``[G]`` each; at most ``rows``."""
    ends = jnp.minimum(running_sums(counts), rows)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def _by_segment(q: Array, counts: Array, attention: Callable[[Array, Array], Array]) -> Array:
    """For each segment, attend with all rows to its pages, and keep the results of its own rows."""
    firsts, ends = _bounds(counts, q.shape[0])
    row = jnp.arange(q.shape[0])

    def segment(g: Array, out: Array) -> Array:
        # rows of other segments come later; without a window they see key 0, so none is NaN
        mixed = attention(jnp.roll(q, -firsts[g], axis=0), g)
        own = (row >= firsts[g]) & (row < ends[g])
        return jnp.where(own[:, None, None], jnp.roll(mixed, firsts[g], axis=0), out)

    trips = jnp.max(jnp.where(counts > 0, 1 + jnp.arange(counts.shape[0]), 0), initial=0)
    return jax.lax.fori_loop(0, trips, segment, jnp.zeros_like(q))


@dataclass(frozen=True)
class PrefillTiles:
    """Launch shape of the Pallas kernel; blocks must be powers of two of at least 16."""

    block_rows: int  # query rows (tokens x heads of a group) per program
    block_keys: int  # keys per loop step
    num_warps: int  # warps (of 32 threads) per program
    num_stages: int  # loads in flight in the software pipeline

    def __post_init__(self) -> None:
        for name in ("block_rows", "block_keys"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name}={size} must be a power of two, at least 16")

    @classmethod
    def choose(cls, *, tokens: int, group: int, head_dim: int, dtype: jnp.dtype) -> "PrefillTiles":
        """A launch shape for ``tokens`` packed tokens with ``group`` query heads per KV head."""
        if dtype != jnp.bfloat16:
            return cls(block_rows=64, block_keys=32, num_warps=4, num_stages=2)
        # Llama-3.1-8B shape, H200, jax 0.11.2: 512 tokens after 4,096 take 128 us with 64 rows and
        # 173 with 128. Two prompts of 1,024 take 87 and 77, and 87 with twice the warps.
        block_rows = 64 if tokens * group <= 2048 else 128
        # the queries, and keys and values of three stages, must fit 228 KiB of shared memory
        block_keys = min(128, max(16, 8192 // power_of_two(head_dim)))
        return cls(block_rows, block_keys, num_warps=4, num_stages=3)


@partial(jax.jit, static_argnums=(2, 3))
def tile_map(starts: Array, counts: Array, rows: int, tile_tokens: int) -> Array:
    """Work of each program, i32 ``[tiles, 4]``: segment, first row, number of tokens and of keys.

    The last token sees all the keys. The segment is -1 for unused programs. Padding rows are tiles
    of segment 0 without keys. Later tiles of a segment have more keys and come first, so that the
    last programs to start are short. As a jitted function, it is traced once for all layers.
    """
    firsts, ends = _bounds(counts, rows)
    segments = counts.shape[0]
    # padding is one more segment
    firsts = jnp.concatenate([firsts, ends[-1:]])
    ends = jnp.concatenate([ends, jnp.full((1,), rows, jnp.int32)])
    tile_ends = running_sums((ends - firsts + tile_tokens - 1) // tile_tokens)
    tile_firsts = jnp.concatenate([jnp.zeros((1,), jnp.int32), tile_ends[:-1]])
    # each segment, and the padding, has at most one partial tile
    tiles = min(rows, rows // tile_tokens + segments + 1)
    tile = jnp.arange(tiles - 1, -1, -1, dtype=jnp.int32)
    segment = jnp.sum(tile[:, None] >= tile_ends, axis=1, dtype=jnp.int32)
    owner = jnp.minimum(segment, segments)
    token = (tile - tile_firsts[owner]) * tile_tokens
    row = firsts[owner] + token
    tokens = jnp.minimum(ends[owner] - row, tile_tokens)
    is_padding = segment >= segments
    keys = jnp.where(is_padding, 0, starts[jnp.minimum(segment, segments - 1)] + token + tokens)
    segment = jnp.where(is_padding, jnp.where(segment > segments, -1, 0), segment)
    return jnp.stack([segment, row, tokens, keys], axis=1)


def specjax_prefill_attention(
    *refs: Any,
    tiles: PrefillTiles,
    page_size: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    implementation: str,
) -> None:
    """Kernel body: one program per (KV head, tile of query rows of one segment)."""
    layer_ref, map_ref, table_ref, q_ref, pool_ref, *sink_refs, out_ref = refs
    group, parts = q_ref.shape[1] // pool_ref.shape[3], head_spans(pool_ref)
    layer, head, tile = layer_ref[0], pl.program_id(0), pl.program_id(1)
    segment, first_row, tokens, total = (map_ref[tile, i] for i in range(4))

    @pl.when(segment >= 0)
    def _() -> None:
        # Rows after the last complete group repeat the first rows, and tokens after the last one
        # repeat the last one. Repeated rows store the same values to the same positions.
        row = jnp.arange(tiles.block_rows) % (tiles.block_rows // group * group)
        token = jnp.minimum(row // group, tokens - 1)
        member = head * group + row % group
        q = [for_products(q_ref[first_row + token, member, part], pool_ref) for part in parts]
        first_position = total - tokens

        def step(i: Array, carry: tuple[Array, ...], *, is_masked: bool) -> tuple[Array, ...]:
            position = i * tiles.block_keys + jnp.arange(tiles.block_keys)
            # past the end, read the last key again and mask its score; the load needs no mask
            key = jnp.minimum(position, total - 1) if is_masked else position
            if is_masked and window is not None:
                # pages before all windows may belong to another request
                key = jnp.maximum(key, jnp.maximum(first_position - window + 1, 0))
            page = table_ref[segment, jnp.minimum(key // page_size, table_ref.shape[1] - 1)]
            slot = page * page_size + key % page_size
            k, v = load_kv(pool_ref, layer, slot, head, q[0].dtype, implementation)
            products = [row_dot(x, y, transpose=True) for x, y in zip(q, k, strict=True)]
            scores = base2_scores(sum(products[1:], products[0]), scale, softcap)
            seen = None
            if is_masked:
                gap = token[:, None] - (position - first_position)[None, :]
                visible = gap >= 0 if window is None else (gap >= 0) & (gap < window)
                scores = jnp.where(visible, scores, NEGATIVE)
                # without a window, every row sees key 0, so masked keys have the weight 0
                seen = None if window is None else visible
            return add_keys(carry, scores, v, seen)

        carry = empty_sums(tiles.block_rows, *(part.size for part in parts))
        masked, size = partial(step, is_masked=True), tiles.block_keys
        # the first token of the tile sees all keys in the blocks before this one, without a window
        unmasked, blocks = jnp.maximum(first_position + 1, 0) // size, (total + size - 1) // size
        whole = jnp.int32(0)
        if window is not None:
            oldest = jnp.maximum(first_position - window + 1, 0) // size
            # from this block on, the last token of the tile sees all keys
            whole = (jnp.maximum(total - window, 0) + size - 1) // size
            whole, unmasked = jnp.minimum(whole, blocks), jnp.maximum(unmasked, whole)
            unmasked = jnp.minimum(unmasked, blocks)
            carry = jax.lax.fori_loop(oldest, whole, masked, carry)
        carry = jax.lax.fori_loop(whole, unmasked, partial(step, is_masked=False), carry)
        best, weight, *mixed = jax.lax.fori_loop(unmasked, blocks, masked, carry)
        if sink_refs:
            weight, mixed = with_sinks(best, weight, mixed, sink_refs[0][member])
        # the best key has weight 1, so the maximum changes only padding rows (0 / 1)
        weight = jnp.maximum(weight, 1.0)[:, None]
        for part, x in zip(parts, mixed, strict=True):
            out_ref[first_row + token, member, part] = (x / weight).astype(out_ref.dtype)


def prefill_attention(
    q: Array,
    pool: Array,
    layer: int,
    page_table: Array,
    starts: Array,
    counts: Array,
    *,
    page_size: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    implementation: str | None = None,
    tiles: PrefillTiles | None = None,
) -> Array:
    """Causal attention of W packed tokens of G requests over their pages.

    Args:
        q: ``[W, N, H]``, rotated queries: the rows of segment 0, of segment 1, ..., then padding.
        pool: ``[L, slots, 2, KV, H]``, or words of ``[L, slots, 2, KV, H / 2]``, already holding
            the new tokens' keys and values.
        page_table: i32 ``[G, P]``; entries after a request's pages are 0.
        starts: i32 ``[G]``, position of each segment's first token.
        counts: i32 ``[G]``, tokens of each segment, possibly 0. Their sum is at most W.
        page_size: tokens per page.
        window: number of positions that a row sees up to its own; ``None`` means all.
        softcap: c in the scores c * tanh(scores / c).
        sinks: ``[N]``, a score per query head that takes attention weight but has no value.
        implementation: the work of ``"pallas"`` is proportional to the actual tokens and keys; the
            others process all W rows for every segment up to the last one with tokens.
        tiles: launch shape of the Pallas kernel; ``None`` chooses one.

    Returns:
        ``[W, N, H]`` in the dtype of ``q``; zeros in padding rows.

    Raises:
        NotImplementedError: in the Pallas kernel, if the head dim is not a multiple of 16 up to
            256 (words: of 32), or if there are more query heads per KV head than rows in a tile.
    """
    check_heads(q, pool, 3)
    if not page_table.shape[:1] == starts.shape == counts.shape:
        raise ValueError(
            f"page_table {page_table.shape}, starts {starts.shape} and counts {counts.shape} must "
            "be [G, P], [G] and [G]"
        )
    implementation = resolve(
        implementation, head_dim=q.shape[2], kv_dtype=pool.dtype, is_attention=True
    )
    if implementation in ("xla", "chunked"):

        def attention(rows: Array, g: Array) -> Array:
            request = page_table[g][None], starts[g][None], None
            form = {"page_size": page_size, "implementation": implementation, "window": window}
            form |= {"softcap": softcap, "sinks": sinks}
            return tree_attention(rows[None], pool, layer, *request, **form)[0]

        return _by_segment(q, counts, attention)
    rows, heads, dim = q.shape
    group = heads // pool.shape[3]
    if tiles is None:
        tiles = PrefillTiles.choose(tokens=rows, group=group, head_dim=dim, dtype=q.dtype)
    if not takes_head_dim(dim, pool.dtype) or group > tiles.block_rows:
        raise NotImplementedError(
            "the Pallas kernel supports head dims of multiples of 16 (KV in words: 32) up to 256 "
            f"(got {dim}), and at most {tiles.block_rows} query heads per KV head (got {group}); "
            "use implementation='xla'"
        )
    work = tile_map(starts, counts, rows, tiles.block_rows // group)
    return triton_call(
        partial(
            specjax_prefill_attention,
            tiles=tiles,
            page_size=page_size,
            scale=dim**-0.5,
            window=window,
            softcap=softcap,
            implementation=implementation,
        ),
        grid=(pool.shape[3], work.shape[0]),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        implementation=implementation,
    )(
        # an operand, so that all layers of a model share one compiled kernel
        jnp.full((1,), layer, jnp.int32),
        work,
        page_table,
        q,
        pool,
        *(() if sinks is None else (sinks,)),
    )

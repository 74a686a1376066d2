"""Causal attention of packed prompt chunks over a paged KV pool.

Axes: W packed tokens, G segments (one per request), N query heads, KV key/value heads, H head dim,
P pages per request. Segment g has ``counts[g]`` rows, directly after those of segment g - 1. Its
first token is at position ``starts[g]`` of its request. A row sees the keys of its own request up
to its own position, with a window W the last W of them and those of the first ``sink_tokens``
tokens. Rows after the last segment are padding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import (
    INVARIANT,
    WIDEST,
    power_of_two,
    resolve,
    takes_head_dim,
    triton_call,
)
from specjax.kernels.invariant_attention import invariant_prefill_attention
from specjax.kernels.kv_format import for_products, head_spans, load_kv
from specjax.kernels.paged import (
    NEGATIVE,
    PagedForm,
    PagedInputs,
    add_keys,
    base2_scores,
    empty_sums,
    products,
    segment_bounds,
    tile_map,
    with_sinks,
)
from specjax.kernels.tree_attention import tree_attention


def _by_segment(q: Array, counts: Array, attention: Callable[[Array, Array], Array]) -> Array:
    """For each segment, attend with all rows to its pages, and keep the results of its own rows."""
    firsts, ends = segment_bounds(counts, q.shape[0])
    row = jnp.arange(q.shape[0])

    def segment(g: Array, out: Array) -> Array:
        # rows of other segments come later; without a window they see key 0, so none is NaN
        mixed = attention(jnp.roll(q, -firsts[g], axis=0), g)
        is_own = (row >= firsts[g]) & (row < ends[g])
        return jnp.where(is_own[:, None, None], jnp.roll(mixed, firsts[g], axis=0), out)

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
        if head_dim == WIDEST:  # as in AttentionTiles
            keys, stages = (32, 2) if dtype == jnp.bfloat16 else (16, 1)
            return cls(block_rows=64, block_keys=keys, num_warps=8, num_stages=stages)
        if dtype != jnp.bfloat16:
            return cls(block_rows=64, block_keys=32, num_warps=4, num_stages=2)
        # Llama-3.1-8B shape, H200, jax 0.11.2: 512 tokens after 4,096 take 128 us with 64 rows and
        # 173 with 128. Two prompts of 1,024 take 87 and 77, and 87 with twice the warps.
        block_rows = 64 if tokens * group <= 2048 else 128
        # the queries, and keys and values of three stages, must fit 228 KiB of shared memory
        block_keys = min(128, max(16, 8192 // power_of_two(head_dim)))
        return cls(block_rows, block_keys, num_warps=4, num_stages=3)


def specjax_prefill_attention(*refs: Any, tiles: PrefillTiles, form: PagedForm) -> None:
    """Kernel body: one program per (KV head, tile of query rows of one segment)."""
    layer_ref, map_ref, table_ref, q_ref, pool_ref, *sink_refs, out_ref = refs
    window, sink_tokens = form.window, form.sink_tokens
    group, dim_spans = q_ref.shape[1] // pool_ref.shape[3], head_spans(pool_ref)
    layer, head, tile = layer_ref[0], pl.program_id(0), pl.program_id(1)
    segment, first_row, tokens, total = (map_ref[tile, i] for i in range(4))

    @pl.when(segment >= 0)
    def _() -> None:
        # Rows after the last complete group repeat the first rows, and tokens after the last one
        # repeat the last one. Repeated rows store the same values to the same positions.
        row = jnp.arange(tiles.block_rows) % (tiles.block_rows // group * group)
        token = jnp.minimum(row // group, tokens - 1)
        member = head * group + row % group
        q = [for_products(q_ref[first_row + token, member, span], pool_ref) for span in dim_spans]
        first_position = total - tokens

        def step(i: Array, carry: tuple[Array, ...], *, is_masked: bool) -> tuple[Array, ...]:
            position = i * tiles.block_keys + jnp.arange(tiles.block_keys)
            # past the end, read the last key again and mask its score; the load needs no mask
            key = jnp.minimum(position, total - 1) if is_masked else position
            if is_masked and window is not None:
                # pages before all windows may belong to another request
                near = jnp.maximum(key, jnp.maximum(first_position - window + 1, 0))
                key = jnp.where(key < sink_tokens, key, near) if sink_tokens else near
            page = table_ref[segment, jnp.minimum(key // form.page_size, table_ref.shape[1] - 1)]
            slot = page * form.page_size + key % form.page_size
            k, v = load_kv(pool_ref, layer, slot, head, q[0].dtype, form.implementation)
            scores = base2_scores(products(q, k), form.scale, form.softcap)
            mask = None
            if is_masked:
                gap = token[:, None] - (position - first_position)[None, :]
                visible = gap >= 0
                if window is not None:
                    near = gap < window
                    if sink_tokens:
                        near |= (position < sink_tokens)[None, :]
                    visible &= near
                scores = jnp.where(visible, scores, NEGATIVE)
                # without a window, every row sees key 0, so masked keys have the weight 0
                mask = None if window is None else visible
            return add_keys(carry, scores, v, mask)

        carry = empty_sums(tiles.block_rows, *(span.size for span in dim_spans))
        masked, size = partial(step, is_masked=True), tiles.block_keys
        # the first token of the tile sees all keys in the blocks before this one, without a window
        unmasked, blocks = jnp.maximum(first_position + 1, 0) // size, (total + size - 1) // size
        begin = jnp.int32(0)
        if window is not None:
            oldest = jnp.maximum(first_position - window + 1, 0) // size
            # from this block on, the last token of the tile sees all keys
            begin = (jnp.maximum(total - window, 0) + size - 1) // size
            begin, unmasked = jnp.minimum(begin, blocks), jnp.maximum(unmasked, begin)
            unmasked = jnp.minimum(unmasked, blocks)
            if sink_tokens:
                num_sinks = jnp.minimum(-(-sink_tokens // size), oldest)
                carry = jax.lax.fori_loop(0, num_sinks, masked, carry)
            carry = jax.lax.fori_loop(oldest, begin, masked, carry)
        carry = jax.lax.fori_loop(begin, unmasked, partial(step, is_masked=False), carry)
        best, weight, *mixed = jax.lax.fori_loop(unmasked, blocks, masked, carry)
        if sink_refs:
            weight, mixed = with_sinks(best, weight, mixed, sink_refs[0][member])
        # the best key has weight 1, so the maximum changes only padding rows (0 / 1)
        weight = jnp.maximum(weight, 1.0)[:, None]
        for span, x in zip(dim_spans, mixed, strict=True):
            out_ref[first_row + token, member, span] = (x / weight).astype(out_ref.dtype)


def prefill_attention(
    q: Array,
    inputs: PagedInputs,
    starts: Array,
    counts: Array,
    *,
    implementation: str | None = None,
    tiles: PrefillTiles | None = None,
) -> Array:
    """Causal attention of W packed tokens of G requests over their pages.

    Args:
        q: ``[W, N, H]``, rotated queries: the rows of segment 0, of segment 1, ..., then padding.
        inputs: the pool, the pages of the G requests and the options of the layer.
        starts: i32 ``[G]``, position of each segment's first token.
        counts: i32 ``[G]``, tokens of each segment, possibly 0. Their sum is at most W.
        implementation: the work of ``"pallas"`` and ``"invariant"`` is proportional to the actual
            tokens and keys; the others process all W rows for every segment up to the last one with
            tokens.
        tiles: launch shape of the Pallas kernel; ``None`` chooses one.

    Returns:
        ``[W, N, H]`` in the dtype of ``q``; zeros in padding rows.

    Raises:
        NotImplementedError: in the Pallas kernel, if the head dim is not 512 or a multiple of 16
            up to 256 (words: of 32), or if there are more query heads per KV head than rows in a
            tile. The invariant form also refuses the options of a layer.
    """
    inputs.check(q, 3)
    (rows, heads, dim), pool, table = q.shape, inputs.pool, inputs.page_table
    if not table.shape[:1] == starts.shape == counts.shape:
        raise ValueError(
            f"page_table {table.shape}, starts {starts.shape} and counts {counts.shape} must "
            "be [G, P], [G] and [G]"
        )
    if implementation in INVARIANT:
        return invariant_prefill_attention(q, inputs, starts, counts, resolve(implementation))
    implementation = resolve(implementation, head_dim=dim, kv_dtype=pool.dtype, is_attention=True)
    if implementation in ("xla", "chunked"):

        def attention(rows: Array, g: Array) -> Array:
            request, start = replace(inputs, page_table=table[g][None]), starts[g][None]
            how = {"implementation": implementation}
            return tree_attention(rows[None], request, start, None, **how)[0]

        return _by_segment(q, counts, attention)
    group = heads // pool.shape[3]
    if tiles is None:
        tiles = PrefillTiles.choose(tokens=rows, group=group, head_dim=dim, dtype=q.dtype)
    if not takes_head_dim(dim, pool.dtype) or group > tiles.block_rows:
        raise NotImplementedError(
            "the Pallas kernel supports head dims of 512 or multiples of 16 (KV in words: 32) up "
            f"to 256 (got {dim}), and at most {tiles.block_rows} query heads per KV head (got "
            f"{group}); use implementation='xla'"
        )
    work = tile_map(starts, counts, rows, tiles.block_rows // group)
    operands = inputs.layer_operand, work, table, q, pool
    return triton_call(
        partial(specjax_prefill_attention, tiles=tiles, form=inputs.form(q, implementation)),
        grid=(pool.shape[3], work.shape[0]),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        implementation=implementation,
    )(*operands, *(() if inputs.sinks is None else (inputs.sinks,)))

"""Attention over a paged KV pool whose rows have the same bits in any batch, prompt or tree.

The keys of a row are cut into blocks at fixed positions. Each block is computed from fresh
sums, and blocks are added in ascending order, so it does not matter which program computes one. A
row sees its keys in the order of their positions, also if it is a tree node: its path then stands
where plain decoding would have stored the same tokens. Row sums depend on the layout of a tile in
registers, so the sum of weights is a matrix product, like the sum of values.

Axes: B requests, T query tokens per request, U new keys per request, N query heads, KV key/value
heads, H head dim, P pages per request, C key blocks, R query rows of a KV head (T * N / KV).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import power_of_two, row_dot, triton_call
from specjax.kernels.kv_format import for_products, head_spans, load_kv, slots_of
from specjax.kernels.paged import (
    LOG2E,
    NEGATIVE,
    PagedForm,
    PagedInputs,
    empty_sums,
    products,
    tile_map,
)

MIN_ROWS, MAX_ROWS = 16, 64
HEAD_DIMS = (16, 32, 64, 128, 256)
# Programs, of 16 rows, from which on one program adds up all blocks of its rows. With fewer, each
# block has its own program, and its sums are stored.
ENOUGH_PROGRAMS = 128
KEPT_PER_STEP = 4  # stored sums that are loaded at the same time
MOST_SHARES = 64  # programs that share the blocks of a request, which may have 1,024 of them
# highest score, sum of weights, and sum of weighted values for each span of the dims
Sums = tuple[Array, ...]


def block_size(head_dim: int) -> int:
    """Keys per block, so that a block fits into shared memory; other sizes give other bits."""
    return 64 if head_dim > 128 else 128


def _block(
    q: list[Array], kv: tuple[list[Array], list[Array]], scale: float, visible: Array | None
) -> Sums:
    """Sums over one block of keys and values ``kv``."""
    scores = products(q, kv[0])
    if visible is not None:
        scores = jnp.where(visible, scores, NEGATIVE)
    best = jnp.max(scores, axis=1)
    # subtract first: a product before a sum could become one operation in some loops only
    weights = jnp.exp2((scores - best[:, None]) * scale)
    if visible is not None:
        weights = jnp.where(visible, weights, 0.0)
    weights = weights.astype(q[0].dtype)
    total = row_dot(weights, jnp.ones((weights.shape[1], MIN_ROWS), weights.dtype), transpose=False)
    mixed = (row_dot(weights, v, transpose=False) for v in kv[1])
    return best, jnp.max(total, axis=1), *mixed


def _add(earlier: Sums, later: Sums, scale: float) -> Sums:
    """Add the sums of a later block; the one with the lower score is scaled down."""
    is_higher = later[0] > earlier[0]
    best = jnp.maximum(earlier[0], later[0])
    decay = jnp.exp2((jnp.minimum(earlier[0], later[0]) - best) * scale)
    total = (
        jnp.where(is_higher, later[1], earlier[1])
        + jnp.where(is_higher, earlier[1], later[1]) * decay
    )
    is_higher, decay = is_higher[:, None], decay[:, None]
    mixed = (
        jnp.where(is_higher, y, x) + jnp.where(is_higher, x, y) * decay
        for x, y in zip(earlier[2:], later[2:], strict=True)
    )
    return best, total, *mixed


def specjax_invariant_shared(*refs: Any, block_rows: int, form: PagedForm) -> None:
    """Kernel body: blocks before ``seq_len``, which all rows of a request see.

    One program per (request and KV head, share of the blocks, tile of query rows). If there is room
    for one result, it is the sum of all blocks. Otherwise, each block has one, which is not written
    for blocks after ``seq_len``.
    """
    layer_ref, table_ref, lens_ref, q_ref, pool_ref, best_ref, total_ref, mixed_ref = refs
    rows, heads = q_ref.shape[1:3]
    kv_heads, num_kept, scale = pool_ref.shape[3], best_ref.shape[2], form.scale * LOG2E
    group = heads // kv_heads
    request, head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
    share, num_shares, tile = pl.program_id(1), pl.num_programs(1), pl.program_id(2)
    # rows after the last one repeat the first ones: they store the same values to the same places
    row = (tile * block_rows + jnp.arange(block_rows, dtype=jnp.int32)) % (rows * group)
    block = block_size(q_ref.shape[3])
    layer, num_blocks = layer_ref[0], lens_ref[request] // block
    dim_spans = head_spans(pool_ref)

    @pl.when(share < num_blocks)
    def _() -> None:
        member = head * group + row % group
        q = [
            for_products(q_ref[request, row // group, member, span], pool_ref) for span in dim_spans
        ]
        nothing = empty_sums(block_rows, *(span.size for span in dim_spans))

        def add_block(i: Array, sums: Sums) -> Sums:
            key = i * block + jnp.arange(block, dtype=jnp.int32)
            slot = slots_of(table_ref, request, key, form.page_size)
            kv = load_kv(pool_ref, layer, slot, head, q[0].dtype, form.implementation)
            return _add(sums, _block(q, kv, scale, None), scale)

        def keep(result: Any, sums: Sums) -> None:
            best_ref[request, head, result, row], total_ref[request, head, result, row] = sums[:2]
            for span, mixed in zip(dim_spans, sums[2:], strict=True):
                mixed_ref[request, head, result, row, span] = mixed

        def keep_block(j: Array, done: Array) -> Array:
            i = share + j * num_shares
            keep(i, add_block(i, nothing))
            return done

        if num_kept == 1:
            keep(0, jax.lax.fori_loop(0, num_blocks, add_block, nothing))
        else:
            count = pl.cdiv(num_blocks - share, num_shares)
            jax.lax.fori_loop(0, count, keep_block, jnp.int32(0))


def specjax_invariant_own(*refs: Any, form: PagedForm) -> None:
    """Kernel body: one program per (request and KV head, token) adds the token's other blocks.

    Without ``counts`` and ``paths``, the new tokens are a chain.
    """
    layer_ref, table_ref, lens_ref, q_ref, pool_ref, *input_refs, out_ref = refs
    best_ref, total_ref, mixed_ref, *path_refs = input_refs
    heads, kv_heads = q_ref.shape[2], pool_ref.shape[3]
    num_kept, scale = best_ref.shape[2], form.scale * LOG2E
    group = heads // kv_heads
    request, head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
    token, layer, seq_len = pl.program_id(1), layer_ref[0], lens_ref[request]
    block_rows = max(MIN_ROWS, power_of_two(group))
    member = jnp.arange(block_rows, dtype=jnp.int32) % group
    row = token * group + member
    place, dim_spans = (request, token, head * group + member), head_spans(pool_ref)
    q = [for_products(q_ref[*place, span], pool_ref) for span in dim_spans]
    block = block_size(q_ref.shape[3])
    shared = seq_len // block
    end = seq_len + (path_refs[0][request, token] if path_refs else token + 1)

    num_sums = jnp.minimum(shared, num_kept)

    def add_kept(i: Array, sums: Sums) -> Sums:
        loaded = []
        for j in range(KEPT_PER_STEP):
            at = jnp.minimum(i * KEPT_PER_STEP + j, num_sums - 1)
            best, total = best_ref[request, head, at, row], total_ref[request, head, at, row]
            best = jnp.where(i * KEPT_PER_STEP + j < num_sums, best, NEGATIVE)
            mixed = (mixed_ref[request, head, at, row, span] for span in dim_spans)
            loaded.append((best, total, *mixed))
        for block_sums in loaded:
            sums = _add(sums, block_sums, scale)
        return sums

    def step(i: Array, sums: Sums) -> Sums:
        position = i * block + jnp.arange(block, dtype=jnp.int32)
        # past the end, read the last key again and mask its score; the load needs no mask
        key = jnp.minimum(position, end - 1)
        if path_refs:
            offset = path_refs[1][request, token, jnp.maximum(key - seq_len, 0)]
            key = jnp.where(key < seq_len, key, seq_len + offset)
        slot = slots_of(table_ref, request, key, form.page_size)
        kv = load_kv(pool_ref, layer, slot, head, q[0].dtype, form.implementation)
        return _add(sums, _block(q, kv, scale, (position < end)[None, :]), scale)

    sums: Sums = empty_sums(block_rows, *(span.size for span in dim_spans))
    sums = jax.lax.fori_loop(0, pl.cdiv(num_sums, KEPT_PER_STEP), add_kept, sums)
    _, total, *mixed = jax.lax.fori_loop(shared, pl.cdiv(end, block), step, sums)
    for span, x in zip(dim_spans, mixed, strict=True):
        out_ref[*place, span] = (x / total[:, None]).astype(out_ref.dtype)


def specjax_invariant_prefill(*refs: Any, block_rows: int, form: PagedForm) -> None:
    """Kernel body: one program per (KV head, tile of query rows of one segment)."""
    layer_ref, map_ref, table_ref, q_ref, pool_ref, out_ref = refs
    group, scale = q_ref.shape[1] // pool_ref.shape[3], form.scale * LOG2E
    layer, head, tile = layer_ref[0], pl.program_id(0), pl.program_id(1)
    block = block_size(q_ref.shape[2])
    segment, first_row, tokens, end = (map_ref[tile, i] for i in range(4))

    @pl.when(segment >= 0)
    def _() -> None:
        # rows after the last complete group, and tokens after the last one, repeat others
        row = jnp.arange(block_rows, dtype=jnp.int32) % (block_rows // group * group)
        token = jnp.minimum(row // group, tokens - 1)
        member = head * group + row % group
        dim_spans = head_spans(pool_ref)
        q = [for_products(q_ref[first_row + token, member, span], pool_ref) for span in dim_spans]
        begin = end - tokens

        def step(i: Array, sums: Sums, *, is_masked: bool) -> Sums:
            position = i * block + jnp.arange(block, dtype=jnp.int32)
            key = jnp.minimum(position, end - 1) if is_masked else position
            slot = slots_of(table_ref, segment, key, form.page_size)
            kv = load_kv(pool_ref, layer, slot, head, q[0].dtype, form.implementation)
            visible = (position - begin)[None, :] <= token[:, None] if is_masked else None
            return _add(sums, _block(q, kv, scale, visible), scale)

        sums: Sums = empty_sums(block_rows, *(span.size for span in dim_spans))
        # the first token of the tile sees all keys in these blocks
        unmasked = jnp.maximum(begin + 1, 0) // block
        sums = jax.lax.fori_loop(0, unmasked, partial(step, is_masked=False), sums)
        masked = partial(step, is_masked=True)
        _, total, *mixed = jax.lax.fori_loop(unmasked, pl.cdiv(end, block), masked, sums)
        # rows of padding have no keys
        total = jnp.where(total > 0.0, total, 1.0)[:, None]
        for span, x in zip(dim_spans, mixed, strict=True):
            out_ref[first_row + token, member, span] = (x / total).astype(out_ref.dtype)


def _paths(tree_mask: Array) -> tuple[Array, Array]:
    """Number of new keys that each row sees, i32 ``[B, T]``, and their indices ``[B, T, U]``."""
    index = jnp.arange(tree_mask.shape[2], dtype=jnp.int32)
    before = tree_mask[..., None, :] & (index <= index[:, None])
    rank = jnp.where(tree_mask, before.sum(axis=-1, dtype=jnp.int32) - 1, -1)  # [B, T, U]
    is_at = rank[..., None, :] == index[:, None]  # [B, T, place, U]
    return tree_mask.sum(axis=-1, dtype=jnp.int32), jnp.where(is_at, index, 0).sum(axis=-1)


def _check(q: Array, inputs: PagedInputs) -> None:
    group, dim = q.shape[-2] // inputs.pool.shape[3], q.shape[-1]
    if dim not in HEAD_DIMS or inputs.pool.shape[4] < HEAD_DIMS[0] or group > MAX_ROWS:
        raise NotImplementedError(
            f"deterministic attention supports head dims of {HEAD_DIMS} (got {dim}; KV in words: "
            f"from 32) and at most {MAX_ROWS} query heads per KV head (got {group})"
        )
    options = {name: getattr(inputs, name) for name in ("window", "softcap", "sinks")}
    if names := [name for name, value in options.items() if value is not None]:
        raise NotImplementedError(f"deterministic attention has no {', no '.join(names)}")


def invariant_tree_attention(
    q: Array, inputs: PagedInputs, seq_lens: Array, tree_mask: Array | None, implementation: str
) -> Array:
    """The invariant form of :func:`~specjax.kernels.tree_attention.tree_attention`."""
    _check(q, inputs)
    (batch, rows, heads, dim), kv_heads = q.shape, inputs.pool.shape[3]
    num_rows = rows * heads // kv_heads
    block_rows = min(MAX_ROWS, max(MIN_ROWS, power_of_two(num_rows)))
    num_tiles = pl.cdiv(num_rows, block_rows)
    num_blocks = max(1, inputs.page_table.shape[1] * inputs.page_size // block_size(dim))
    is_enough = batch * kv_heads * num_tiles * block_rows >= MIN_ROWS * ENOUGH_PROGRAMS
    if is_enough and tree_mask is None:
        packed, counts = q.reshape(-1, heads, dim), jnp.full((batch,), rows, jnp.int32)
        prefill = partial(invariant_prefill_attention, block_rows=block_rows)
        return prefill(packed, inputs, seq_lens, counts, implementation).reshape(q.shape)
    num_kept, form = 1 if is_enough else num_blocks, inputs.form(q, implementation)
    operands = inputs.layer_operand, inputs.page_table, seq_lens, q, inputs.pool
    sums_shape = (batch, kv_heads, num_kept, num_rows)
    launch = partial(triton_call, num_warps=4, num_stages=2, implementation=implementation)
    sums = launch(
        partial(specjax_invariant_shared, block_rows=block_rows, form=form),
        grid=(batch * kv_heads, min(num_kept, MOST_SHARES), num_tiles),
        out_shape=tuple(
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in (sums_shape, sums_shape, (*sums_shape, dim))
        ),
    )(*operands)
    return launch(
        partial(specjax_invariant_own, form=form),
        grid=(batch * kv_heads, rows),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(*operands, *sums, *(() if tree_mask is None else _paths(tree_mask)))


def invariant_prefill_attention(
    q: Array,
    inputs: PagedInputs,
    starts: Array,
    counts: Array,
    implementation: str,
    block_rows: int | None = None,
) -> Array:
    """The invariant form of :func:`~specjax.kernels.prefill_attention.prefill_attention`.

    ``block_rows`` is the number of query rows (tokens x heads of a group) per program.
    """
    _check(q, inputs)
    rows, group = q.shape[0], q.shape[1] // inputs.pool.shape[3]
    if block_rows is None:
        block_rows = 64 if rows * group <= 2048 or q.shape[2] > 128 else 128
    work = tile_map(starts, counts, rows, block_rows // group)
    form = inputs.form(q, implementation)
    return triton_call(
        partial(specjax_invariant_prefill, block_rows=block_rows, form=form),
        grid=(inputs.pool.shape[3], work.shape[0]),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=4 if block_rows <= 64 else 8,
        num_stages=2,
        implementation=implementation,
    )(inputs.layer_operand, work, inputs.page_table, q, inputs.pool)

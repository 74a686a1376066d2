"""Attention of a block of new tokens over a paged KV pool, with a tree mask inside the block.

Axes: B requests, T query tokens (tree rows) per request, U new keys per request, N query heads, KV
key/value heads, H head dim, P pages per request. The U new keys of a request are in the slots of
positions ``seq_len .. seq_len + U - 1``. A row sees every key before ``seq_len``, and the new keys
that the mask selects. With a window W, a row sees no key W or more positions before its own, except
those of the first ``sink_tokens`` tokens. In a verified tree, all T rows are new keys. A tree level
that is being drafted also sees the new keys of the levels above it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import (
    INVARIANT,
    WIDEST,
    WORD,
    resolve,
    spans,
    takes_head_dim,
    triton_call,
)
from specjax.kernels.invariant_attention import invariant_tree_attention
from specjax.kernels.kv_format import for_products, from_pool, head_spans, load_kv, slots_of
from specjax.kernels.paged import (
    LOG2E,
    NEGATIVE,
    PagedForm,
    PagedInputs,
    add_keys,
    base2_scores,
    block_after,
    empty_sums,
    products,
    with_sinks,
)

# keys per step of "chunked"; with 256, a short context needs one step and no loop overhead
CHUNK = 256


def _offsets(seq_lens: Array, tree_mask: Array | None, rows: int, positions: Array | None) -> Array:
    """Positions i32 ``[B, T]`` of the rows after ``seq_lens``."""
    if positions is not None:
        return positions - seq_lens[:, None]
    start = 0 if tree_mask is None else tree_mask.shape[2] - rows
    return jnp.broadcast_to(start + jnp.arange(rows), (seq_lens.shape[0], rows))


def _visible(
    keys: Array,
    seq_lens: Array,
    tree_mask: Array | None,
    rows: int,
    oldest: Array | None,
    sink_tokens: int = 0,
) -> Array:
    """Bool ``[B, T, C]``: whether each row sees key positions ``keys [C]``.

    ``oldest`` i32 ``[B, T]`` is the position of the first key in a row's window.
    """
    offset = keys[None, :] - seq_lens[:, None]  # [B, C]
    if oldest is not None:
        near = (keys >= oldest[..., None]) | (keys < sink_tokens)
        return near & _visible(keys, seq_lens, tree_mask, rows, None)
    if tree_mask is None:
        return offset[:, None, :] <= jnp.arange(rows)[None, :, None]
    num_new = tree_mask.shape[2]
    inside = jnp.clip(offset, 0, num_new - 1)[:, None, :]
    inside = jnp.broadcast_to(inside, tree_mask.shape[:2] + keys.shape)
    in_tree = jnp.take_along_axis(tree_mask, inside, axis=2)
    return jnp.where((offset < 0)[:, None, :], True, in_tree & (offset < num_new)[:, None, :])


def _near(tree_mask: Array, window: int, num_sinks: Array) -> Array:
    """Keep only the last ``window`` keys of each row's path, and its first i32 ``[B]`` ones."""
    index = jnp.arange(tree_mask.shape[2])
    following = tree_mask[..., None, :] & (index >= index[:, None])
    count = following.sum(axis=-1, dtype=jnp.int32)
    length = tree_mask.sum(axis=-1, dtype=jnp.int32)[..., None]
    return tree_mask & ((count <= window) | (length - count < num_sinks[:, None, None]))


def _gather(inputs: PagedInputs, keys: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Keys and values ``[B, C, KV, H]`` at positions ``keys [C]`` of each request."""
    pool, page_size = inputs.pool, inputs.page_size
    num_slots = pool.shape[1]
    pages = inputs.page_table.at[:, keys // page_size].get(mode="fill", fill_value=0)
    slots = pages * page_size + keys % page_size
    # one index for layer and slot, because slicing out the layer first would copy it
    rows = from_pool(pool.reshape(-1, *pool.shape[2:])[inputs.layer * num_slots + slots], dtype)
    return rows[:, :, 0], rows[:, :, 1]


def _product(axes: str, x: Array, y: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(axes, x, y, precision=precision, preferred_element_type=jnp.float32)


def _scores(q: Array, k: Array, visible: Array, softcap: float | None) -> Array:
    """Masked float32 scores ``[B, T, KV, G, C]`` of grouped queries ``[B, T, KV, G, H]``."""
    scores = _product("btkgh,bckh->btkgc", q, k) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.where(visible[:, :, None, None, :], scores, -jnp.inf)


def _mix(weights: Array, v: Array) -> Array:
    """Float32 ``[B, T, KV, G, H]``: values weighted by ``[B, T, KV, G, C]``."""
    return _product("btkgc,bckh->btkgh", weights.astype(v.dtype), v)


def _dense_or_chunked(
    q: Array,
    inputs: PagedInputs,
    seq_lens: Array,
    tree_mask: Array | None,
    oldest: Array | None,
    *,
    is_chunked: bool,
) -> Array:
    """Attend to all keys of the page table at once, or in chunks up to the longest request."""
    batch, rows, _, dim = q.shape
    num_keys, sinks = inputs.page_table.shape[1] * inputs.page_size, inputs.sinks
    grouped = q.reshape(batch, rows, inputs.pool.shape[3], -1, dim)

    def scores_of(keys: Array) -> tuple[Array, Array]:
        k, v = _gather(inputs, keys, q.dtype)
        visible = _visible(keys, seq_lens, tree_mask, rows, oldest, inputs.sink_tokens)
        if oldest is not None:  # pages before all windows may belong to another request
            v = jnp.where(visible.any(axis=1)[:, :, None, None], v, 0)
        return _scores(grouped, k, visible, inputs.softcap), v

    if not is_chunked and sinks is None:
        scores, v = scores_of(jnp.arange(num_keys, dtype=jnp.int32))
        return _mix(jax.nn.softmax(scores, axis=-1), v).astype(q.dtype).reshape(q.shape)

    def chunk(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        best, total, mixed = carry
        if oldest is not None:
            i = block_after(i, begins)
        scores, v = scores_of(i * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32))
        new_best = jnp.maximum(best, scores.max(axis=-1))
        weights = jnp.exp(scores - new_best[..., None])
        scale = jnp.exp(best - new_best)
        total = total * scale + weights.sum(axis=-1)
        return new_best, total, mixed * scale[..., None] + _mix(weights, v)

    shape = grouped.shape[:-1]
    start = (
        jnp.full(shape, NEGATIVE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(grouped.shape, jnp.float32),
    )
    if sinks is not None:
        # a sink is a key without a value
        of_sinks = sinks.astype(jnp.float32).reshape(shape[2:])
        start = (jnp.broadcast_to(of_sinks, shape), jnp.ones(shape, jnp.float32), start[2])
    num_new = rows if tree_mask is None else tree_mask.shape[2]
    num_chunks = (jnp.max(seq_lens) + num_new + CHUNK - 1) // CHUNK
    if oldest is not None:
        skipped = jnp.maximum(jnp.min(oldest), 0) // CHUNK
        begins = jnp.minimum(-(-inputs.sink_tokens // CHUNK), skipped), skipped
        num_chunks -= skipped - begins[0]
    _, total, mixed = jax.lax.fori_loop(0, num_chunks, chunk, start)
    return (mixed / total[..., None]).astype(q.dtype).reshape(q.shape)


# maximum number of new keys if there is a mask, which then has four words per row
MAX_MASKED = 128
# rows per dot: the smallest tile of the tensor cores, and the maximum per pass over the keys
MIN_ROWS, MAX_ROWS = 16, 64


@dataclass(frozen=True)
class AttentionTiles:
    """Launch shape of the Pallas kernel; powers of two."""

    block_rows: int  # query rows (tokens x heads of a group) per program
    block_keys: int  # keys per loop step
    num_splits: int  # programs that share a request's context (split-K)
    num_warps: int  # warps (of 32 threads) per program
    num_stages: int  # loads in flight in the software pipeline

    @classmethod
    def choose(
        cls,
        *,
        batch: int,
        kv_heads: int,
        rows: int,
        context: int,
        dtype: jnp.dtype,
        kv_dtype: jnp.dtype | None = None,
        head_dim: int = 128,
    ) -> "AttentionTiles":
        """A launch shape for ``rows`` query rows per KV head over at most ``context`` keys."""
        block_rows = min(MAX_ROWS, max(MIN_ROWS, pl.next_power_of_2(rows)))
        programs = batch * kv_heads * -(-rows // block_rows)
        bfloat16 = dtype == jnp.bfloat16
        if programs >= 256:
            # Two programs per multiprocessor are enough without splits, which need a merge. B=32,
            # T=4, context 4096, H200: 154 us; 181 with two splits, 64-key blocks and three stages.
            # Words leave room for three stages: B=32, T=8, context 8192: 197 us instead of 215.
            block_keys, num_splits = 128 if bfloat16 else 64, 1
            num_stages = 3 if kv_dtype == WORD else 2
        else:
            block_keys, num_stages = 64 if bfloat16 else 32, 3
            # Four programs on each of 132 multiprocessors hide the latency of gathered loads. For
            # tall tiles, two are enough, because more splits have more sums to merge. B=8, T=16,
            # context 1,344, H200: 26 us per layer with four splits, 32 with eight.
            programs_wanted = 264 if block_rows == MAX_ROWS else 528
            splits = min(programs_wanted // programs, max(1, context // block_keys), 64)
            num_splits = pl.next_power_of_2(splits // 2 + 1)
        if head_dim == WIDEST:
            # queries, and keys and values in flight, take 192 KiB of 227 KiB of shared memory;
            # the sums of a tile fill the registers of eight warps by half
            block_keys, num_stages = (32, 2) if bfloat16 else (16, 1)
            return cls(block_rows, block_keys, num_splits, num_warps=8, num_stages=num_stages)
        return cls(block_rows, block_keys, num_splits, num_warps=4, num_stages=num_stages)


def _mask_words(tree_mask: Array) -> Array:
    """Pack a mask ``[B, T, U]`` into two or four i32 words per row; bit i is new key i."""
    batch, rows, num_new = tree_mask.shape
    num_words = 2 if num_new <= 64 else MAX_MASKED // 32
    padding = (0, 0), (0, 0), (0, 32 * num_words - num_new)
    bits = jnp.pad(tree_mask, padding).reshape(batch, rows, num_words, 32)
    powers = jnp.asarray((1 << np.arange(32, dtype=np.uint64)).astype(np.uint32))
    words = jnp.sum(jnp.where(bits, powers, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def specjax_tree_attention(
    *refs: Any, tiles: AttentionTiles, form: PagedForm, num_new: int, names: tuple[str, ...]
) -> None:
    """Kernel body: one program per (request and KV head, context split, tile of query rows).

    ``names`` are those of the optional inputs: words of the mask, positions of the rows, sinks.
    """
    layer_ref, table_ref, lens_ref, q_ref, pool_ref, *optional_refs = refs
    inputs, (out_ref, *partial_refs) = (
        dict(zip(names, optional_refs, strict=False)),
        optional_refs[len(names) :],
    )
    window, sink_tokens = form.window, form.sink_tokens
    rows, heads = q_ref.shape[1:3]
    kv_heads = pool_ref.shape[3]
    group, dim_spans = heads // kv_heads, head_spans(pool_ref)
    layer = layer_ref[0]
    request, head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
    split, tile = pl.program_id(1), pl.program_id(2)
    seq_len = lens_ref[request]

    row = tile * tiles.block_rows + jnp.arange(tiles.block_rows)
    # rows after the last one repeat the first ones: they store the same values to the same slots
    token, member = row % (rows * group) // group, head * group + row % group
    q = [for_products(q_ref[request, token, member, span], pool_ref) for span in dim_spans]
    words = []
    if "words" in inputs:
        words_ref = inputs["words"]
        words = [words_ref[request, token, i] for i in range(words_ref.shape[2])]
    # a causal tile needs no keys after its own last token
    last_token = jnp.minimum(((tile + 1) * tiles.block_rows - 1) // group, rows - 1)
    total = seq_len + (num_new if words else last_token + 1)

    blocks = (total + tiles.block_keys - 1) // tiles.block_keys
    has_positions = "positions" in inputs
    if window is not None:
        # of the first key in the window of each row, relative to ``seq_len``
        oldest = token + (num_new - rows - window + 1)
        if has_positions:
            oldest = inputs["positions"][request, token] - seq_len - window + 1
        begin = jnp.maximum(seq_len + jnp.min(oldest), 0)
        skipped = begin // tiles.block_keys
        blocks -= skipped
        if sink_tokens:
            begins = jnp.minimum(-(-sink_tokens // tiles.block_keys), skipped), skipped
            blocks += begins[0]
    share = (blocks + tiles.num_splits - 1) // tiles.num_splits
    block = split * share
    last = jnp.minimum(block + share, blocks)
    if window is not None and not sink_tokens:
        block, last = block + skipped, last + skipped

    def step(i: Array, carry: tuple[Array, ...], *, is_masked: bool) -> tuple[Array, ...]:
        if sink_tokens:
            i = block_after(i, begins)
        position = i * tiles.block_keys + jnp.arange(tiles.block_keys)
        # past the end, read the last key again and mask its score; the load needs no mask
        key = jnp.minimum(position, total - 1) if is_masked else position
        if window is not None:  # pages before all windows may belong to another request
            near = jnp.maximum(key, begin)
            key = jnp.where(key < sink_tokens, key, near) if sink_tokens else near
        slot = slots_of(table_ref, request, key, form.page_size)
        keys, values = load_kv(pool_ref, layer, slot, head, q[0].dtype, form.implementation)
        scores = base2_scores(products(q, keys), form.scale, form.softcap)
        visible = visible_keys(position) if is_masked else None
        if visible is not None:
            scores = jnp.where(visible, scores, NEGATIVE)
        return add_keys(carry, scores, values, visible)

    def visible_keys(position: Array) -> Array:
        offset = position - seq_len
        if words:
            word = words[0][:, None]
            for at, following in enumerate(words[1:], start=1):
                word = jnp.where((offset >= 32 * at)[None, :], following[:, None], word)
            shift = jnp.broadcast_to((jnp.maximum(offset, 0) & 31)[None, :], word.shape)
            bit = jax.lax.shift_right_logical(word, shift) & 1
            visible = (offset < 0)[None, :] | ((bit == 1) & (offset < num_new)[None, :])
        else:
            visible = offset[None, :] <= token[:, None]
        if window is not None:
            near = offset[None, :] >= oldest[:, None]
            if sink_tokens:
                near |= (position < sink_tokens)[None, :]
            # the mask of a tree leaves out new keys before the window
            visible &= near | (offset >= 0)[None, :] if has_positions else near
        return visible

    carry = empty_sums(tiles.block_rows, *(span.size for span in dim_spans))
    masked = partial(step, is_masked=True)
    if window is None and tiles.num_splits == 1:
        # Every row sees the keys before ``seq_len``. Without their masks, B=32, T=8, context 8192
        # takes 275 us instead of 291 (bfloat16, H200).
        unmasked = seq_len // tiles.block_keys
        carry = jax.lax.fori_loop(block, unmasked, partial(step, is_masked=False), carry)
        block = unmasked
    best, weight, *mixed = jax.lax.fori_loop(block, last, masked, carry)
    if not partial_refs:
        if "sinks" in inputs:
            weight, mixed = with_sinks(best, weight, mixed, inputs["sinks"][member])
        for span, x in zip(dim_spans, mixed, strict=True):
            out_ref[request, token, member, span] = (x / weight[:, None]).astype(out_ref.dtype)
        return
    max_ref, sum_ref = partial_refs
    for span, x in zip(dim_spans, mixed, strict=True):
        out_ref[request, head, split, row, span] = x
    max_ref[request, head, split, row] = best
    sum_ref[request, head, split, row] = weight


def specjax_merge_splits(mixed_ref: Any, max_ref: Any, sum_ref: Any, *refs: Any) -> None:
    """Kernel body: one program per (token, query head, request) merges the splits of a row."""
    *sink_refs, out_ref = refs
    heads, kv_heads = out_ref.shape[2], mixed_ref.shape[1]
    group = heads // kv_heads
    token, member, request = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head, row = member // group, token * group + member % group
    best = max_ref[request, head, :, row]
    highest = jnp.max(best)
    if sink_refs:
        score = sink_refs[0][member].astype(jnp.float32) * LOG2E
        highest = jnp.maximum(highest, score)
    decay = jnp.exp2(best - highest)
    weight = jnp.sum(sum_ref[request, head, :, row] * decay)
    if sink_refs:
        weight += jnp.exp2(score - highest)
    for span in spans(out_ref.shape[3]):
        mixed = jnp.sum(mixed_ref[request, head, :, row, span] * decay[:, None], axis=0)
        out_ref[request, token, member, span] = (mixed / weight).astype(out_ref.dtype)


def tree_attention(
    q: Array,
    inputs: PagedInputs,
    seq_lens: Array,
    tree_mask: Array | None,
    *,
    positions: Array | None = None,
    implementation: str | None = None,
    tiles: AttentionTiles | None = None,
) -> Array:
    """Attention of T tokens per request over the request's pages.

    Args:
        q: ``[B, T, N, H]``, rotated queries.
        inputs: the pool, the pages of the B requests and the options of the layer. With a window
            and without ``positions``, new keys after the row stay visible if the mask selects them.
        seq_lens: i32 ``[B]``, tokens before the new ones.
        tree_mask: bool ``[B, T, U]``, true if a row sees a new key; ``None`` means causal over the
            T new tokens. A row must see itself.
        positions: i32 ``[B, T]``, the positions of the rows of a tree, of which each sees its
            ancestors; only a window needs them. ``None`` means consecutive positions, the last ones
            of the U.
        implementation: ``"chunked"`` (a loop over the context), ``"pallas"`` (reads each page once
            for up to 64 query rows of a KV head), ``"xla"`` (all keys at once) or ``"invariant"``
            (kernels/invariant_attention.py; the new keys of a row are in the order of positions).
        tiles: launch shape of the Pallas kernel; ``None`` chooses one.

    Returns:
        ``[B, T, N, H]`` in the dtype of ``q``.

    Raises:
        ValueError: for mismatched shapes, a window below 1 or an unknown implementation.
        NotImplementedError: in the Pallas kernel, for a tree mask over more than ``MAX_MASKED``
            keys, or if the head dim is not 512 or a multiple of 16 (words: 32) up to 256. The
            invariant form also refuses the options of a layer.
    """
    inputs.check(q, 4)
    (batch, rows, heads, dim), pool, window = q.shape, inputs.pool, inputs.window
    if implementation in INVARIANT:
        return invariant_tree_attention(q, inputs, seq_lens, tree_mask, resolve(implementation))
    implementation = resolve(implementation, head_dim=dim, kv_dtype=pool.dtype, is_attention=True)
    num_new = rows if tree_mask is None else tree_mask.shape[2]
    if window is None or tree_mask is None:
        positions = None
    elif positions is not None and window < num_new:
        tree_mask = _near(tree_mask, window, inputs.sink_tokens - seq_lens)
    if implementation in ("xla", "chunked"):
        oldest = None
        if window is not None:
            offsets = _offsets(seq_lens, tree_mask, rows, positions)
            oldest = seq_lens[:, None] + offsets - window + 1
            if positions is not None:
                oldest = jnp.minimum(oldest, seq_lens[:, None])
        is_chunked = implementation == "chunked"
        return _dense_or_chunked(q, inputs, seq_lens, tree_mask, oldest, is_chunked=is_chunked)
    kv_heads = pool.shape[3]
    group = heads // kv_heads
    if (num_new > MAX_MASKED and tree_mask is not None) or not takes_head_dim(dim, pool.dtype):
        raise NotImplementedError(
            f"the Pallas kernel supports at most {MAX_MASKED} new keys with a tree mask (got "
            f"{num_new}), and head dims of 512 or multiples of 16 (KV in words: 32) up to 256 (got "
            f"{dim}); use implementation='xla'"
        )
    context = inputs.page_table.shape[1] * inputs.page_size
    if tiles is None:
        tiles = AttentionTiles.choose(
            batch=batch,
            kv_heads=kv_heads,
            rows=rows * group,
            context=context
            if window is None
            else min(context, inputs.sink_tokens + window + num_new),
            dtype=q.dtype,
            kv_dtype=pool.dtype,
            head_dim=dim,
        )
    row_tiles = -(-rows * group // tiles.block_rows)
    shape = (batch, kv_heads, tiles.num_splits, row_tiles * tiles.block_rows)
    output = jax.ShapeDtypeStruct(q.shape, q.dtype)
    partials = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*shape, dim), shape, shape)]
    words = None if tree_mask is None else _mask_words(tree_mask)
    # a sink is added once; several splits add it where they are merged
    sinks = inputs.sinks if tiles.num_splits == 1 else None
    optional = {"words": words, "positions": positions, "sinks": sinks}
    optional = {name: value for name, value in optional.items() if value is not None}
    out = triton_call(
        partial(
            specjax_tree_attention,
            tiles=tiles,
            form=inputs.form(q, implementation),
            num_new=num_new,
            names=tuple(optional),
        ),
        grid=(batch * kv_heads, tiles.num_splits, row_tiles),
        out_shape=output if tiles.num_splits == 1 else tuple(partials),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        implementation=implementation,
    )(inputs.layer_operand, inputs.page_table, seq_lens, q, pool, *optional.values())
    if tiles.num_splits == 1:
        return out
    return triton_call(
        specjax_merge_splits,
        grid=(rows, heads, batch),
        out_shape=output,
        num_warps=max(1, min(4, tiles.num_splits * dim // 1024)),
        implementation=implementation,
    )(*out, *(() if inputs.sinks is None else (inputs.sinks,)))

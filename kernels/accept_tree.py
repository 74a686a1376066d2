"""Accept drafted trees and update the next round's inputs, in one launch.

The kernel walks down each tree and writes the accepted tokens, their counts and the bonus token. It
also updates the length, bonus token, budget and history of each request slot. XLA needs a dozen
small kernels for this. A request has A tokens in the output, not T (SGLang change #26866). Axes: B
requests, T tree rows, S steps, A = S + 1 accept width, E end tokens, R request slots (slot 0 is
padding), C tokens of history per slot.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import load, power_of_two, resolve, store, triton_call


class SlotRows(NamedTuple):
    """The next round's inputs for every request slot, i32."""

    seq_lens: Array  # [R]
    bonus_tokens: Array  # [R]
    remaining: Array  # [R], maximum tokens still to generate
    tokens: Array  # [R, C], the history by position


class Accepted(NamedTuple):
    """The accepted path of each request; zeros for padding."""

    accept_index: Array  # i32 [B, A], tree rows on the path, root first, padded with -1
    # i32 [B, A + 3]: the target's tokens along the path, padded with 0 to A; then three counts:
    # proposed drafts, accepted drafts, and accepted tokens including the bonus token
    packed: Array
    bonus_tokens: Array  # i32 [B], the last accepted token


def _reference(*inputs: Array, rows: SlotRows, num_steps: int) -> tuple[Accepted, SlotRows]:
    draft_tokens, parents, num_proposed, target_tokens, end_token_ids, slots, seq_lens = inputs
    # child[b, i]: the first proposed child of row i that equals the target's token after row i
    index = jnp.arange(draft_tokens.shape[1], dtype=jnp.int32)
    is_real = (index <= num_proposed[:, None])[:, None, :]
    is_child = (parents[:, None, :] == index[:, None]) & is_real
    matches = is_child & (draft_tokens[:, None, :] == target_tokens[:, :, None])
    child = jnp.where(matches.any(-1), jnp.argmax(matches, -1).astype(jnp.int32), -1)
    node = jnp.where(slots > 0, 0, -1)
    path = [node]
    for _ in range(num_steps):
        step = jnp.take_along_axis(child, jnp.maximum(node, 0)[:, None], axis=1)[:, 0]
        node = jnp.where(node >= 0, step, -1)
        path.append(node)
    accept_index = jnp.stack(path, axis=1)
    is_accepted = accept_index >= 0
    counts = jnp.sum(is_accepted, axis=1, dtype=jnp.int32)
    targets = jnp.take_along_axis(target_tokens, jnp.maximum(accept_index, 0), axis=1)
    tokens = jnp.where(is_accepted, targets, 0)
    bonus = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    is_end = (tokens[:, :, None] == end_token_ids[:, None, :]) & is_accepted[:, :, None]
    remaining = jnp.where(is_end.any((1, 2)), 0, jnp.maximum(rows.remaining[slots] - counts, 0))
    places = seq_lens[:, None] + 1 + jnp.arange(num_steps + 1, dtype=jnp.int32)
    places = jnp.where(is_accepted, places, rows.tokens.shape[1])
    written = SlotRows(
        seq_lens=rows.seq_lens.at[slots].set(jnp.where(slots > 0, seq_lens + counts, 0)),
        bonus_tokens=rows.bonus_tokens.at[slots].set(bonus),
        remaining=rows.remaining.at[slots].set(jnp.where(slots > 0, remaining, 0)),
        tokens=rows.tokens.at[slots[:, None], places].set(tokens, mode="drop"),
    )
    figures = jnp.where(slots > 0, num_proposed, 0), jnp.maximum(counts - 1, 0), counts
    packed = jnp.concatenate([tokens, jnp.stack(figures, axis=1)], axis=1)
    return Accepted(accept_index, packed, bonus), written


def specjax_accept_tree(
    draft_ref: Any,
    parent_ref: Any,
    proposed_ref: Any,
    target_ref: Any,
    end_ref: Any,
    slot_ref: Any,
    len_ref: Any,
    *refs: Any,
) -> None:
    """Kernel body: one program per request, one lane per tree row or token.

    Rows of request slots are read and written through the outputs, which alias their inputs. Only
    padding requests share a slot, and their programs all write zeros.
    """
    index_ref, packed_ref, bonus_ref, lens_ref, bonuses_ref, remaining_ref, history_ref = refs[4:]
    request, num_rows, width = pl.program_id(0), draft_ref.shape[1], index_ref.shape[1]
    lanes, context = power_of_two(num_rows), history_ref.shape[1]
    zero = 0 * request  # traced: JAX 0.12 rejects a static slice beyond the end, masked or not
    row = jnp.arange(lanes, dtype=jnp.int32)
    in_tree = row < num_rows
    drafts = load(draft_ref.at[request, pl.ds(zero, lanes)], mask=in_tree, other=-1)
    parents = load(parent_ref.at[request, pl.ds(zero, lanes)], mask=in_tree, other=-1)
    slot, proposed, seq_len = slot_ref[request], proposed_ref[request], len_ref[request]
    is_real = in_tree & (row <= proposed)

    place = jnp.arange(power_of_two(width + 3), dtype=jnp.int32)
    nowhere = jnp.int32(-1)
    node = jnp.where(slot > 0, jnp.int32(0), nowhere)
    path = jnp.where(place == 0, node, nowhere)
    for depth in range(1, width):
        token = target_ref[request, jnp.maximum(node, 0)]
        matches = is_real & (parents == node) & (drafts == token)
        child = jnp.min(jnp.where(matches, row, jnp.int32(lanes)))
        node = jnp.where((node >= 0) & (child < lanes), child, nowhere)
        path = jnp.where(place == depth, node, path)
    is_accepted = path >= 0
    count = jnp.sum(is_accepted.astype(jnp.int32))
    drafted = jnp.maximum(count - 1, 0)
    targets = target_ref.at[request, jnp.maximum(path, 0)]
    tokens = load(targets, mask=is_accepted, other=0)
    bonus = jnp.sum(jnp.where(place == drafted, tokens, 0))

    store(index_ref.at[request, pl.ds(zero, len(place))], path, mask=place < width)
    packed = jnp.where(place == width, jnp.where(slot > 0, proposed, 0), tokens)
    packed = jnp.where(place == width + 1, drafted, packed)
    packed = jnp.where(place == width + 2, count, packed)
    store(packed_ref.at[request, pl.ds(zero, len(place))], packed, mask=place < width + 3)
    bonus_ref[request] = bonus

    is_end = tokens < 0  # all false
    for i in range(end_ref.shape[1]):
        is_end |= tokens == end_ref[request, i]
    has_ended = jnp.sum((is_end & is_accepted).astype(jnp.int32)) > 0
    remaining = jnp.maximum(remaining_ref[slot] - count, 0)
    lens_ref[slot] = jnp.where(slot > 0, seq_len + count, 0)
    bonuses_ref[slot] = bonus
    remaining_ref[slot] = jnp.where((slot > 0) & ~has_ended, remaining, 0)
    behind = seq_len + 1 + place
    # wrapped around, because masked lanes also need distinct positions (see backend.store)
    history = history_ref.at[slot, jax.lax.rem(behind, jnp.int32(context))]
    store(history, tokens, mask=is_accepted & (behind < context))


def accept_tree(
    draft_tokens: Array,
    parents: Array,
    num_proposed: Array,
    target_tokens: Array,
    end_token_ids: Array,
    slots: Array,
    seq_lens: Array,
    rows: SlotRows,
    *,
    num_steps: int,
    implementation: str | None = None,
) -> tuple[Accepted, SlotRows]:
    """Follow the target's tokens down the trees to depth S, and record the accepted path.

    From the root, the walk enters the first proposed child whose token equals the target's token at
    the current row. It ends if no child matches.

    Args:
        draft_tokens: i32 ``[B, T]``, root first.
        parents: i32 ``[B, T]``, rows; -1 for the root.
        num_proposed: i32 ``[B]``, number of drafts; rows after them are padding.
        target_tokens: i32 ``[B, T]``, the target's token after each row.
        end_token_ids: i32 ``[B, E]``, tokens that end a request, then -1.
        slots: i32 ``[B]``, distinct request slots; padding requests have slot 0.
        seq_lens: i32 ``[B]``, the position of each root.
        rows: inputs of all request slots; written in place if the caller donates them.
        num_steps: S.

    Returns:
        The accepted path and the updated rows: new lengths, last tokens, remaining budgets (0 after
        an end token), and the history with the accepted tokens that fit.
    """
    implementation = resolve(implementation)
    batch, num_rows = draft_tokens.shape
    trees, ints = (parents, target_tokens), (num_proposed, slots, seq_lens)
    received = [array.shape for array in (*trees, *ints)]
    if received != [(batch, num_rows)] * 2 + [(batch,)] * 3 or len(end_token_ids) != batch:
        raise ValueError(
            f"parents and target_tokens must be {[batch, num_rows]}; num_proposed, slots and "
            f"seq_lens [{batch}]; end_token_ids [{batch}, E]; got {received}, {end_token_ids.shape}"
        )
    inputs = draft_tokens, parents, num_proposed, target_tokens, end_token_ids, slots, seq_lens
    if implementation == "xla" or 0 in (batch, num_rows):
        return _reference(*inputs, rows=rows, num_steps=num_steps)
    width = num_steps + 1
    shapes = [(batch, width), (batch, width + 3), (batch,), *(array.shape for array in rows)]
    aliased = range(len(inputs), len(inputs) + len(rows))
    out = triton_call(
        specjax_accept_tree,
        grid=(batch,),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
        num_warps=1,
        implementation=implementation,
        input_output_aliases=dict(zip(aliased, range(3, len(shapes)), strict=True)),
    )(*inputs, *rows)
    return Accepted(*out[:3]), SlotRows(*out[3:])


# elements per program: each thread of 4 warps moves 16; several narrow rows share a program
TILE = 2048
MAX_COLUMNS = 1024


def _compact_reference(values: Array, accept_index: Array) -> Array:
    valid = accept_index >= 0
    # -1 would wrap to the last row
    rows = jnp.where(valid, accept_index, 0)
    rows = rows.reshape(*rows.shape, *(1,) * (values.ndim - 2))
    gathered = jnp.take_along_axis(values, rows, axis=1)
    return jnp.where(valid.reshape(rows.shape), gathered, jnp.zeros((), values.dtype))


def _tile(width: int, features: int) -> tuple[int, int]:
    """Rows and columns of one program's block."""
    columns = min(power_of_two(features), MAX_COLUMNS)
    return min(power_of_two(width), TILE // columns), columns


def specjax_compact_tree(values_ref: Any, index_ref: Any, out_ref: Any) -> None:
    """Kernel body: a gather in which one program stores each output element, once."""
    _, width, features = out_ref.shape
    num_rows, num_columns = _tile(width, features)
    first_column, first_row = pl.program_id(0) * num_columns, pl.program_id(1) * num_rows
    request = pl.program_id(2)
    in_width = first_row + jnp.arange(num_rows, dtype=jnp.int32) < width
    columns = first_column + jnp.arange(num_columns, dtype=jnp.int32)
    in_features = columns < features
    source = load(index_ref.at[request, pl.ds(first_row, num_rows)], mask=in_width, other=-1)
    shape = (num_rows, num_columns)
    values = load(
        values_ref.at[
            request,
            jax.lax.broadcast_in_dim(jnp.maximum(source, 0), shape, (0,)),
            jax.lax.broadcast_in_dim(columns, shape, (1,)),
        ],
        mask=(source >= 0)[:, None] & in_features[None, :],
        other=jnp.zeros((), values_ref.dtype),
    )
    store(
        out_ref.at[request, pl.ds(first_row, num_rows), pl.ds(first_column, num_columns)],
        values,
        mask=in_width[:, None] & in_features[None, :],
    )


def compact_tree(values: Array, accept_index: Array, *, implementation: str | None = None) -> Array:
    """Gather the accepted rows of each request into its first rows.

    All code after verification expects the accepted tokens in the first rows of a request. In a
    chain they are already there; in a tree they are not (SGLang changes #26866 and #26997).

    Args:
        values: ``[B, T, ...]``, one entry per tree row, any dtype.
        accept_index: i32 ``[B, A]``, rows ``0 .. T - 1`` of the accepted path in order, then -1.

    Returns:
        ``[B, A, ...]``: ``values`` at the accepted rows, zeros if ``accept_index`` is -1.
    """
    implementation = resolve(implementation)
    if values.ndim < 2 or accept_index.ndim != 2 or values.shape[0] != accept_index.shape[0]:
        raise ValueError(
            f"values {values.shape} must be [B, T, ...] and accept_index {accept_index.shape} "
            "[B, A] with the same B"
        )
    if implementation == "xla" or 0 in (values.size, accept_index.size):
        return _compact_reference(values, accept_index)
    batch, width = accept_index.shape
    features = math.prod(values.shape[2:])
    num_rows, num_columns = _tile(width, features)
    # the lowering types pointers to bool as one bit wide, so store whole bytes instead
    stored = values.astype(jnp.uint8) if values.dtype == jnp.bool_ else values
    out = triton_call(
        specjax_compact_tree,
        grid=(pl.cdiv(features, num_columns), pl.cdiv(width, num_rows), batch),
        out_shape=jax.ShapeDtypeStruct((batch, width, features), stored.dtype),
        num_warps=4 if num_rows * num_columns > 512 else 1,
        implementation=implementation,
    )(stored.reshape(*stored.shape[:2], features), accept_index)
    return out.astype(values.dtype).reshape(batch, width, *values.shape[2:])

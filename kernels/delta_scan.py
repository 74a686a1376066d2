"""The gated delta rule over rows in order, which also writes states: prompts, and plain rounds.

There are two forms. Row by row, results have the bits of verification and replay (delta_rule.py).
In matrix form, a group of rows is computed at a time: with a state S ``[V, K]`` before a group, G_i
the sum of the logarithms of decays up to its row i, and D_ij = exp(G_i - G_j) for j <= i,

    A = strictly lower part of (beta_i D_ij k_i . k_j)
    deltas = (I + A)^-1 (beta_i (v_i - exp(G_i) S k_i))
    outs = exp(G_i) S q_i + (D_ij q_i . k_j) deltas
    S' = exp(G_n) S + sum over i of exp(G_n - G_i) deltas_i k_i^T

(Yang et al., Gated Delta Networks, 2024). One launch computes the inverses of all groups, a second
one the rest. Groups start at the first row of each request. So if chunks of a prompt end at
multiples of a group, results do not depend on how a prompt is cut.

Axes: W rows of a pass, B requests, N groups of n rows, Hk query and key heads of size K, Hv value
heads of size V, L layers, S slots.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import INVARIANT, load, resolve, row_dot, store, triton_call
from specjax.kernels.delta_inputs import DeltaInputs, ReplayRows, RequestRows, layer_operand
from specjax.kernels.delta_rule import (
    NUM_WARPS,
    PART,
    DeltaPool,
    HeadRow,
    Parts,
    Tile,
    check,
    choose_width,
    cleared,
    head_rows,
    read_slots,
    slid,
    step,
    write_slots,
)
from specjax.kernels.paged import running_sums

# Rows of a group, a power of two of at least 16. In 24 layers with 32 value heads, a prompt of 4096
# tokens takes 16 ms; in groups of 64, it takes 59 ms (H200).
GROUP = 32
GROUP_WARPS = 4  # per program that computes groups


class Kept(NamedTuple):
    """States and windows to keep, as they are after some rows of each request.

    Slots are those of no request, nor a source. Numbers of rows are multiples of a group, or all.
    """

    slots: Any  # i32 [B], where they are written; 0: nowhere
    counts: Any  # i32 [B], number of rows


def _pairs(size: int) -> tuple[Array, Array]:
    """Row and column numbers that broadcast to ``[size, size]``."""
    number = jnp.arange(size, dtype=jnp.int32)
    return number[:, None], number[None]


def _decays(log_decays: Array) -> tuple[Array, Array]:
    """Sums of the logarithms ``[n]``, and the decay ``[n, n]`` from a row to a later one."""
    sums, (row, column) = jnp.cumsum(log_decays), _pairs(len(log_decays))
    # the exponential of the other half could overflow
    later = jnp.where(row >= column, sums[:, None] - sums[None], 0.0)
    return sums, jnp.where(row >= column, jnp.exp(later), 0.0)


def _inverse(keys: Array, betas: Array, log_decays: Array) -> Array:
    """The inverse f32 ``[n, n]`` of I + A.

    It is known for blocks of one row. Two neighbours form a block of twice the size: with the rows
    below the first block's columns R, its lower part is -X R Y for inverses X and Y of both.
    """
    row, column = _pairs(len(keys))
    coupled = betas[:, None] * _decays(log_decays)[1] * row_dot(keys, keys, transpose=True)
    inverse, size = jnp.where(row == column, 1.0, 0.0), 1
    while size < len(keys):
        is_lower = (row // size % 2 == 1) & (column // size == row // size - 1)
        product = row_dot(inverse, jnp.where(is_lower, coupled, 0.0), transpose=False)
        inverse -= row_dot(product, inverse, transpose=False)
        size *= 2
    return inverse


def _group(state: Array, rows: HeadRow, inverse: Array) -> tuple[Array, Array]:
    """The state ``[V, K]`` after n rows, and their outputs ``[n, V]``.

    Factors of products have the dtype of the keys, sums and states are float32.
    """
    dtype = rows.key.dtype

    def dot(x: Array, y: Array, *, transpose: bool = False) -> Array:
        return row_dot(x.astype(dtype), y.astype(dtype), transpose=transpose)

    sums, between = _decays(rows.log_decay)
    decays, total = jnp.exp(sums)[:, None], jnp.sum(rows.log_decay)
    change = rows.value.astype(jnp.float32) - decays * dot(rows.key, state, transpose=True)
    deltas = dot(inverse, rows.beta[:, None] * change)
    scores = between * dot(rows.query, rows.key, transpose=True)
    outs = decays * dot(rows.query, state, transpose=True) + dot(scores, deltas)
    left = rows.key.astype(jnp.float32) * jnp.exp(total - sums)[:, None]
    return state * jnp.exp(total) + dot(deltas.T, left), outs


def _groups(rows: RequestRows, num_rows: int, size: int) -> tuple[Array, Array, Array]:
    """The request i32 ``[N]`` and the first row i32 ``[N]`` of each group; B if it is not used.

    Also the number i32 ``[B]`` of the first group of each request.
    """
    counts = (rows.counts + size - 1) // size
    ends, batch = running_sums(counts), len(counts)
    number = jnp.arange(num_rows // size + min(batch, num_rows), dtype=jnp.int32)
    request = jnp.sum(number[:, None] >= ends, axis=1, dtype=jnp.int32)
    owner = jnp.minimum(request, batch - 1)
    firsts = ends - counts
    return request, rows.starts[owner] + (number - firsts[owner]) * size, firsts


def _reference(
    every: HeadRow, states: Array, rows: RequestRows, size: int, kept: Kept | None
) -> tuple[Array, Array]:
    """Outputs f32 ``[W, Hv, V]``, and the states ``[B or 2 B, ...]`` after all rows.

    The second half, if there is one, is that of kept states; ``size`` is that of groups.
    """
    total, (request, first, _) = len(every.value), _groups(rows, len(every.value), size)
    batch, num_states = len(rows.slots), len(states)
    owner = jnp.minimum(request, batch - 1)
    row = first[:, None] + jnp.arange(size, dtype=jnp.int32)
    ends = jnp.where(request < batch, (rows.starts + rows.counts)[owner], 0)
    row = jnp.where(row < ends[:, None], row, total)
    places = jnp.where(request < batch, request, num_states)[:, None]
    if kept is not None:
        is_kept = jnp.minimum(first + size, ends) == (rows.starts + kept.counts)[owner]
        copies = jnp.where(is_kept, batch + owner, num_states)
        places = jnp.concatenate([places, copies[:, None]], axis=1)

    def of_head(state: Array, of_rows: HeadRow) -> tuple[Array, Array]:
        if size == 1:
            (after,), _, out = step((state,), HeadRow(*(x[0] for x in of_rows)).in_parts())
            return after, out[None]
        inverse = _inverse(of_rows.key, of_rows.beta, of_rows.log_decay)
        return _group(state, of_rows, inverse)

    def compute(carry: tuple[Array, Array], group: tuple[Array, ...]) -> tuple[Any, None]:
        (states, outs), (owner, places, row) = carry, group
        of_rows = HeadRow(*(x.at[row].get(mode="fill", fill_value=0) for x in every))
        state, out = jax.vmap(of_head, (0, 1), (0, 1))(states[owner], of_rows)
        states = states.at[places].set(state, mode="drop")
        return (states, outs.at[row].set(out, mode="drop")), None

    # not the pool itself, which XLA would copy in each step
    carry = states, jnp.zeros(every.value.shape, jnp.float32)
    (states, outs), _ = jax.lax.scan(compute, carry, (owner, places, row))
    return outs, states


def _add_groups(
    add: Callable[[Array, Parts], Parts],
    size: int,
    part: int,
    tile: Tile,
    pool: DeltaPool,
    mixed: Any,
    layer: Array,
    rows: RequestRows,
    kept: Kept | None,
) -> None:
    """Add all groups to a tile of the state of a request, and write it and its window."""

    write = partial(tile.store_state, pool.states, layer)

    def add_and_keep(i: Array, state: Parts) -> Parts:
        state = add(i, state)
        if kept is not None:
            is_kept = jnp.minimum((i + 1) * size, rows.counts) == kept.counts
            pl.when(is_kept & (kept.slots > 0))(lambda: write(kept.slots, state))
        return state

    def slide(rows: RequestRows) -> None:
        tile.slide_window(pool, mixed, layer, rows, lambda i: rows.starts + i)

    state = tile.load_state(pool.states, layer, rows.sources, part)
    state = jax.lax.fori_loop(0, pl.cdiv(rows.counts, size), add_and_keep, state)
    write(rows.slots, state)
    if kept is not None:  # before the window that it reads is written
        of_kept = rows._replace(slots=kept.slots, counts=kept.counts)
        pl.when(kept.slots > 0)(lambda: slide(of_kept))
    slide(rows)


def specjax_delta_steps(*refs: Any, width: int) -> None:
    """Kernel body: a loop over the rows of a request, for a tile of its states."""
    layer_ref, requests, inputs, replay, pool_in, pool, outs_ref = refs
    del pool_in
    request, layer = pl.program_id(0), layer_ref[0]
    rows, kept = jax.tree.map(lambda ref: ref[request], requests)
    place, tile = layer % replay.keys.shape[0], Tile.of_program(width, outs_ref.shape[2])

    @pl.when(rows.counts > 0)
    def _() -> None:
        def add(i: Array, state: Parts) -> Parts:
            row = rows.starts + i
            state, _, out = step(state, tile.load_row(inputs, replay, place, row))
            store(outs_ref.at[row, tile.head, tile.columns], out)
            return state

        _add_groups(add, 1, PART, tile, pool, replay.mixed, layer, rows, kept)


def _load_gates(
    betas: Any, replay: ReplayRows, place: Array, row: Array, head: Array, mask: Array
) -> tuple[Array, Array]:
    """Betas and logarithms of decays ``[n]``; 0 for rows that are not real, so none matters."""
    log_decays = load(replay.log_decays.at[place, row, head], mask=mask, other=0.0)
    return load(betas.at[row, head], mask=mask, other=0.0), log_decays


def _load_rows(array: Any, index: tuple[Any, ...], lane: Array, mask: Array) -> Array:
    """Rows ``[n, lanes]``, which the second last of ``index [n]`` selects; zeros if masked."""
    *before, row, head = index
    where = *before, row[:, None], head, lane[None]
    mask = jnp.broadcast_to(mask[:, None], (len(row), len(lane)))
    return load(array.at[where], mask=mask, other=0)


def specjax_delta_inverse(*refs: Any, size: int) -> None:
    """Kernel body: one program per (group, value head)."""
    layer_ref, owners_ref, firsts_ref, rows, betas_ref, replay, inverses_ref = refs
    group, head = pl.program_id(0), pl.program_id(1)
    place, owner = layer_ref[0] % replay.keys.shape[0], owners_ref[group]

    @pl.when(owner < rows.slots.shape[0])
    def _() -> None:
        row = firsts_ref[group] + jnp.arange(size, dtype=jnp.int32)
        mask = row < rows.starts[owner] + rows.counts[owner]
        key_head = head // (replay.log_decays.shape[2] // replay.keys.shape[2])
        lane = jnp.arange(replay.keys.shape[3], dtype=jnp.int32)
        keys = _load_rows(replay.keys, (place, row, key_head), lane, mask)
        gates = _load_gates(betas_ref, replay, place, row, head, mask)
        number, other = _pairs(size)
        store(inverses_ref.at[group, head, number, other], _inverse(keys, *gates))


def specjax_delta_groups(*refs: Any, size: int, width: int) -> None:
    """Kernel body: a loop over the groups of a request, for a tile of its states."""
    layer_ref, requests, firsts_ref, inputs, inverses_ref, replay, pool_in, pool, outs_ref = refs
    del pool_in
    request, layer = pl.program_id(0), layer_ref[0]
    rows, kept = jax.tree.map(lambda ref: ref[request], requests)
    place, tile = layer % replay.keys.shape[0], Tile.of_program(width, outs_ref.shape[2])

    @pl.when(rows.counts > 0)
    def _() -> None:
        lane = jnp.arange(replay.keys.shape[3], dtype=jnp.int32)
        key_head = tile.head // (outs_ref.shape[1] // replay.keys.shape[2])
        number, other = _pairs(size)

        def add(i: Array, state: Parts) -> Parts:
            row = rows.starts + i * size + jnp.arange(size, dtype=jnp.int32)
            mask = row < rows.starts + rows.counts
            of_rows = HeadRow(
                _load_rows(inputs.queries, (row, key_head), lane, mask),
                _load_rows(replay.keys, (place, row, key_head), lane, mask),
                _load_rows(inputs.values, (row, tile.head), tile.columns, mask),
                *_load_gates(inputs.betas, replay, place, row, tile.head, mask),
            )
            inverse = inverses_ref[firsts_ref[request] + i, tile.head, number, other]
            after, outs = _group(state[0], of_rows, inverse)
            target = outs_ref.at[row[:, None], tile.head, tile.columns[None]]
            store(target, outs, mask=jnp.broadcast_to(mask[:, None], outs.shape))
            return (after,)

        _add_groups(add, size, pool.states.shape[4], tile, pool, replay.mixed, layer, rows, kept)


def delta_scan(
    inputs: DeltaInputs,
    replay: ReplayRows,
    pool: DeltaPool,
    layer: int | Array,
    rows: RequestRows,
    kept: Kept | None = None,
    *,
    group: int = GROUP,
    implementation: str | None = None,
    width: int | None = None,
) -> tuple[Array, DeltaPool]:
    """Compute rows in order, and write the states and windows after them.

    Args:
        inputs: queries, values and betas of the W rows.
        replay: their channels, keys and decays in ``layer``, or in the only layer.
        pool: written in place if it is donated.
        layer: the layer of the pool.
        rows: any number of rows per request. A source must not be the slot of another request.
        kept: states that are also written elsewhere.
        group: rows that are computed at a time, a power of two of at least 16; or 1: row by row,
            with the bits of ``delta_verify``, as in plain rounds and invariant implementations.

    Returns:
        Outputs f32 ``[W, Hv, V]``, zeros in rows without a request; and the pool.

    Raises:
        ValueError: for mismatched shapes, another group or an unknown implementation.
    """
    check(pool, replay, inputs)
    if group != 1 and (group < 16 or group.bit_count() != 1):
        raise ValueError(f"{group=} must be 1, or a power of two of at least 16")
    group = 1 if implementation in INVARIANT else group
    implementation, rows = resolve(implementation), rows.live()
    total, value_heads, value_dim = inputs.values.shape
    if implementation == "xla" or not pool.has_kernels or total == 0:
        place = layer % len(replay.keys)
        every = head_rows(inputs, replay.keys[place], replay.log_decays[place])
        written = rows
        if kept is not None:
            copies = rows._replace(slots=kept.slots, counts=kept.counts).live()
            written = jax.tree.map(lambda *x: jnp.concatenate(x), rows, copies)
        states, windows = (read_slots(x, layer, written) for x in pool)
        outs, states = _reference(every, states, rows, group, kept)
        values = states, slid(windows, replay.mixed[place], written)
        pairs = zip(pool, values, strict=True)
        return outs, DeltaPool(*(write_slots(x, layer, written, y) for x, y in pairs))
    call = partial(triton_call, implementation=implementation)
    spec, index, read = jax.ShapeDtypeStruct, layer_operand(layer), replay._replace(deltas=None)
    if group > 1:
        width, num_warps = width or min(value_dim, 32), GROUP_WARPS
        owners, first_rows, firsts = _groups(rows, total, group)
        inverses = call(
            partial(specjax_delta_inverse, size=group),
            grid=(len(owners), value_heads),
            out_shape=spec((len(owners), value_heads, group, group), jnp.float32),
            num_warps=num_warps,
        )(index, owners, first_rows, rows, inputs.betas, read._replace(mixed=None))
        body: Any = partial(specjax_delta_groups, size=group, width=width)
        operands: tuple[Any, ...] = index, (rows, kept), firsts, inputs, inverses, read, pool
    else:
        width, num_warps = width or choose_width(pool.states.shape[4], value_dim), NUM_WARPS
        body = partial(specjax_delta_steps, width=width)
        operands = index, (rows, kept), inputs, read, pool
    place = len(jax.tree.leaves(operands)) - 2
    pool, outs = call(
        body,
        grid=(len(rows.slots), value_heads, value_dim // width),
        out_shape=(
            jax.tree.map(lambda x: spec(x.shape, x.dtype), pool),
            spec((total, value_heads, value_dim), jnp.float32),
        ),
        num_warps=num_warps,
        input_output_aliases={place: 0, place + 1: 1},
    )(*operands)
    return cleared(outs, rows), pool

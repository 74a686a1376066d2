"""Moving the KV rows of an accepted path to where a chain would have written them.

A verified tree leaves its accepted rows scattered over the T slots of a request; the next round
expects them at the slots behind ``seq_len`` (SGLang changes #26866 and #26997, whose size is B * A,
never B * ``num_draft_tokens``). A chain needs no move. Axes: L layers, B requests, A accept width,
KV key/value heads, H head dim, W = 2 * KV * H entries of one token in one layer.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from specjax.kernels.backend import check_implementation, load, power_of_two, store, triton_call

# A thread reads 16 bytes a row, the widest load there is, and holds all A rows in registers between
# load and store: 128 of its 255.
BYTES_A_ROW, BYTES_A_PROGRAM = 16 * 32, 128 * 4 * 32


def _reference(pool: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    num_slots = pool.shape[1]
    live = _live(source, destination, num_slots).reshape(-1)
    # -1 wraps around even with mode="drop", so what is skipped goes out of range upwards
    target = jnp.where(live, destination.reshape(-1), num_slots)
    rows = pool[:, jnp.where(live, source.reshape(-1), 0)]
    return pool.at[:, target].set(rows, mode="drop")


def _live(source: jax.Array, destination: jax.Array, num_slots: int) -> jax.Array:
    """Which entries move: both slots exist and differ."""
    known = (source >= 0) & (source < num_slots) & (destination >= 0) & (destination < num_slots)
    return known & (source != destination)


def _block(width: int, num_rows: int, itemsize: int) -> int:
    """Columns of one program, a power of two."""
    fits = min(BYTES_A_ROW, BYTES_A_PROGRAM // power_of_two(num_rows)) // itemsize
    return min(power_of_two(width), max(fits, 32))


def specjax_move_kv(pool_in: Any, source_ref: Any, destination_ref: Any, pool_ref: Any) -> None:
    """Kernel body: one program a (column block, layer, request).

    It loads its columns of all A rows before it stores any, so rows of one request may overlap. One
    warp: a column is loaded and stored by the same thread, in program order, without a barrier.
    Programs share no element. Reads go through the output, the same memory as ``pool_in``.
    """
    del pool_in
    num_slots, width = pool_ref.shape[1:]
    num_rows = source_ref.shape[1]
    block = _block(width, num_rows, pool_ref.dtype.itemsize)
    start, layer, request = pl.program_id(0) * block, pl.program_id(1), pl.program_id(2)
    inside = start + jnp.arange(block, dtype=jnp.int32) < width
    columns = pl.ds(start, block)
    moves = []
    for j in range(num_rows):
        source, destination = source_ref[request, j], destination_ref[request, j]
        mask = inside & _live(source, destination, num_slots)
        slot = jnp.clip(source, 0, num_slots - 1)
        zero = jnp.zeros((), pool_ref.dtype)
        row = load(pool_ref.at[layer, slot, columns], mask=mask, other=zero)
        moves.append((jnp.clip(destination, 0, num_slots - 1), row, mask))
    for slot, row, mask in moves:
        store(pool_ref.at[layer, slot, columns], row, mask=mask)


def move_kv(
    pool: jax.Array,
    source: jax.Array,
    destination: jax.Array,
    *,
    implementation: str = "xla",
    interpret: bool | None = None,
) -> jax.Array:
    """Copy KV rows of all layers from slot to slot, as if all were read before any is written.

    In place where the caller donates ``pool``; otherwise XLA copies it first.

    Args:
        pool: ``[L, slots, 2, KV, H]``.
        source: i32 ``[B, A]``, slots to read; -1 skips the entry.
        destination: i32 ``[B, A]``, slots to write. Those of the entries that move are distinct,
            and none is a source of another request.

    Returns:
        The pool with ``pool[:, destination[b, j]] = pool[:, source[b, j]]``. Entries with a slot
        outside ``0 .. slots - 1`` in either array write nothing.
    """
    check_implementation(implementation)
    if pool.ndim != 5 or source.ndim != 2 or source.shape != destination.shape:
        raise ValueError(
            f"pool {pool.shape} must be [L, slots, 2, KV, H], source {source.shape} and "
            f"destination {destination.shape} both [B, A]"
        )
    if implementation == "xla" or 0 in (pool.size, source.size):
        return _reference(pool, source, destination)
    layers, num_slots = pool.shape[:2]
    batch, num_rows = source.shape
    width = math.prod(pool.shape[2:])
    block = _block(width, num_rows, pool.dtype.itemsize)
    flat = triton_call(
        specjax_move_kv,
        grid=(pl.cdiv(width, block), layers, batch),
        out_shape=jax.ShapeDtypeStruct((layers, num_slots, width), pool.dtype),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        input_output_aliases={0: 0},
    )(pool.reshape(layers, num_slots, width), source, destination)
    return flat.reshape(pool.shape)

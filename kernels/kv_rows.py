"""Read, write and move the KV of single tokens in a pool.

A pool's tokens are scattered over pages, but KV to be sent elsewhere is dense. XLA gathers and
scatters at 0.3 TB/s, a twelfth of the copy rate of an H200. The accepted tokens of a verified tree
are scattered over the request's T slots, but the next round expects them directly after
``seq_len``. The move has B * A entries, not B * T (SGLang #26866, #26997). A chain needs no move.

Axes: L layers, N KV indices of the pool, W tokens; B requests, A accept width, KV key/value heads,
H head dim.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import WORD, load, power_of_two, resolve, store, triton_call

# elements per program: each thread of 4 warps moves 16
MAX_COLUMNS = 2048


def finite_or_zero(values: Array) -> Array:
    """Replace non-finite values by 0, because a NaN times a mask of 0 is still NaN."""
    if values.dtype == WORD:  # e4m3 has no infinity; these bits of a byte are its NaN
        for nan, other in ((0x7F, 0xFF00), (0x7F00, 0xFF)):
            is_nan = values & WORD.type(nan) == nan
            values = jnp.where(is_nan, values & WORD.type(other), values)
        return values
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        return values
    # a test in float32 is exact for all 16-bit values and lowers on every backend
    is_finite = jnp.abs(values.astype(jnp.float32)) < jnp.inf
    return jnp.where(is_finite, values, jnp.zeros_like(values))


def _block(width: int) -> int:
    return min(power_of_two(width), MAX_COLUMNS)


def _place(width: int) -> tuple[Array, Any, Any, Array]:
    """Mask and slice of this program's columns, its row, and its layer."""
    block = _block(width)
    start = pl.program_id(0) * block
    inside = start + jnp.arange(block, dtype=jnp.int32) < width
    return inside, pl.ds(start, block), pl.program_id(1), pl.program_id(2)


def _uses_xla(pool: Array, implementation: str) -> bool:
    """Whether XLA runs instead of a kernel, which cannot address 2 to 4 GiB of bytes."""
    return implementation == "xla" or (pool.size > 2**31 and pool.nbytes <= 2**32)


def specjax_gather_rows(pool_ref: Any, index_ref: Any, out_ref: Any) -> None:
    """Kernel body: one program per (column block, row, layer)."""
    inside, columns, row, layer = _place(pool_ref.shape[2])
    source = jnp.clip(index_ref[row], 0, pool_ref.shape[1] - 1)
    values = load(
        pool_ref.at[layer, source, columns], mask=inside, other=jnp.zeros((), pool_ref.dtype)
    )
    store(out_ref.at[layer, row, columns], values, mask=inside)


def specjax_scatter_rows(pool_in: Any, index_ref: Any, rows_ref: Any, pool_ref: Any) -> None:
    """Kernel body: one program per (column block, row, layer); programs write distinct elements."""
    del pool_in
    inside, columns, row, layer = _place(pool_ref.shape[2])
    target = index_ref[row]

    @pl.when((target >= 0) & (target < pool_ref.shape[1]))
    def _() -> None:
        zero = jnp.zeros((), rows_ref.dtype)
        values = load(rows_ref.at[layer, row, columns], mask=inside, other=zero)
        store(pool_ref.at[layer, target, columns], finite_or_zero(values), mask=inside)


def _check(pool: Array, index: Array) -> None:
    if pool.ndim < 2 or index.ndim != 1:
        raise ValueError(f"pool {pool.shape} must be [L, N, ...] and index {index.shape} [W]")


def gather_rows(pool: Array, index: Array, *, implementation: str | None = None) -> Array:
    """KV rows ``[L, W, ...]`` of a pool ``[L, N, ...]`` at indices i32 ``[W]`` below N."""
    implementation = resolve(implementation)
    _check(pool, index)
    shape = (pool.shape[0], index.shape[0], *pool.shape[2:])
    if _uses_xla(pool, implementation) or 0 in shape:
        return pool[:, index]
    width = math.prod(pool.shape[2:])
    flat = triton_call(
        specjax_gather_rows,
        grid=(pl.cdiv(width, _block(width)), shape[1], shape[0]),
        out_shape=jax.ShapeDtypeStruct((*shape[:2], width), pool.dtype),
        num_warps=4,
        implementation=implementation,
    )(pool.reshape(*pool.shape[:2], width), index)
    return flat.reshape(shape)


def scatter_rows(
    pool: Array, index: Array, rows: Array, *, implementation: str | None = None
) -> Array:
    """Write KV rows to a pool; non-finite values become 0.

    Writes in place if the caller donates ``pool``; otherwise XLA copies it first.

    Args:
        pool: ``[L, N, ...]``.
        index: i32 ``[W]``, at least 0. Indices below N are distinct; others drop their rows.
        rows: ``[L, W, ...]`` of the pool's dtype.
    """
    implementation = resolve(implementation)
    _check(pool, index)
    expected = (pool.shape[0], index.shape[0], *pool.shape[2:])
    if rows.shape != expected or rows.dtype != pool.dtype:
        raise ValueError(f"rows {rows.dtype}{rows.shape} must be {pool.dtype}{expected}")
    if _uses_xla(pool, implementation) or 0 in rows.shape:
        rows = finite_or_zero(rows)
        return pool.at[:, index].set(rows, mode="drop", unique_indices=True)
    width = math.prod(pool.shape[2:])
    flat = triton_call(
        specjax_scatter_rows,
        grid=(pl.cdiv(width, _block(width)), rows.shape[1], rows.shape[0]),
        out_shape=jax.ShapeDtypeStruct((*pool.shape[:2], width), pool.dtype),
        num_warps=4,
        implementation=implementation,
        input_output_aliases={0: 0},
    )(pool.reshape(*pool.shape[:2], width), index, rows.reshape(*rows.shape[:2], width))
    return flat.reshape(pool.shape)


# A thread reads 16 bytes per row, the widest possible load. Between load and store it holds all A
# rows in 128 of its 255 registers.
BYTES_A_ROW, BYTES_A_PROGRAM = 16 * 32, 128 * 4 * 32


def _move_reference(pool: Array, source: Array, destination: Array) -> Array:
    num_slots = pool.shape[1]
    live = _live(source, destination, num_slots).reshape(-1)
    # -1 wraps around even with mode="drop", so skipped entries get an index past the end
    target = jnp.where(live, destination.reshape(-1), num_slots)
    rows = pool[:, jnp.where(live, source.reshape(-1), 0)]
    return pool.at[:, target].set(rows, mode="drop")


def _live(source: Array, destination: Array, num_slots: int) -> Array:
    """Whether each entry moves: both slots exist and differ."""
    exists = (source >= 0) & (source < num_slots) & (destination >= 0) & (destination < num_slots)
    return exists & (source != destination)


def _move_block(width: int, num_rows: int, itemsize: int) -> int:
    """Columns per program, a power of two."""
    fits = min(BYTES_A_ROW, BYTES_A_PROGRAM // power_of_two(num_rows)) // itemsize
    return min(power_of_two(width), max(fits, 32))


def specjax_move_kv(pool_in: Any, source_ref: Any, destination_ref: Any, pool_ref: Any) -> None:
    """Kernel body: one program per (column block, layer, request).

    It loads its columns of all A rows before it stores any, so rows of one request may overlap. It
    has one warp: the same thread loads and stores a column, in program order, without a barrier.
    Programs share no elements. Reads go through the output, which aliases ``pool_in``.
    """
    del pool_in
    num_slots, width = pool_ref.shape[1:]
    num_rows = source_ref.shape[1]
    block = _move_block(width, num_rows, pool_ref.dtype.itemsize)
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
    pool: Array, source: Array, destination: Array, *, implementation: str | None = None
) -> Array:
    """Copy KV rows of all layers between slots, as if all rows were read before any is written.

    Writes in place if the caller donates ``pool``; otherwise XLA copies it first.

    Args:
        pool: ``[L, slots, ...]``.
        source: i32 ``[B, A]``, slots to read; -1 skips the entry.
        destination: i32 ``[B, A]``, slots to write. Destinations of moved entries are distinct,
            and none is a source of another request.

    Returns:
        The pool with ``pool[:, destination[b, j]] = pool[:, source[b, j]]``. Entries with a slot
        outside ``0 .. slots - 1`` in either array write nothing.
    """
    implementation = resolve(implementation)
    if pool.ndim < 3 or source.ndim != 2 or source.shape != destination.shape:
        raise ValueError(
            f"pool {pool.shape} must be [L, slots, ...], source {source.shape} and destination "
            f"{destination.shape} both [B, A]"
        )
    if _uses_xla(pool, implementation) or 0 in (pool.size, source.size):
        return _move_reference(pool, source, destination)
    layers, num_slots = pool.shape[:2]
    batch, num_rows = source.shape
    width = math.prod(pool.shape[2:])
    block = _move_block(width, num_rows, pool.dtype.itemsize)
    flat = triton_call(
        specjax_move_kv,
        grid=(pl.cdiv(width, block), layers, batch),
        out_shape=jax.ShapeDtypeStruct((layers, num_slots, width), pool.dtype),
        num_warps=1,
        implementation=implementation,
        input_output_aliases={0: 0},
    )(pool.reshape(layers, num_slots, width), source, destination)
    return flat.reshape(pool.shape)

"""Matrix products of XLA, and products whose rows have the same bits in any batch.

XLA sums a product in another order if the number of rows changes. In the invariant implementations,
the parts into which the inner axis is split follow from the matrix only, and each part is summed in
ascending order, 16 inputs at a time. The number of rows chooses only the size of a tile, which does
not affect a sum. Axes: R rows, I inputs, O outputs, P partial sums.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.add_norm import ordered_sum
from specjax.kernels.backend import (
    INVARIANT,
    load,
    power_of_two,
    resolve,
    row_dot,
    store,
    triton_call,
)

# row tiles that share the same columns before the next columns are read, so that they stay in L2
GROUP = 8
MIN_ROWS, MAX_ROWS = 16, 128  # limits of a tile's height; tensor cores need 16
LEAST_WIDTH, MOST_DEPTH = 64, 64
MAX_PARTS = 9
# Programs of few rows for which a matrix is split: two for each of 132 multiprocessors. A tile is
# narrower if there are fewer than the second number.
WANTED_PROGRAMS, LEAST_PROGRAMS = 264, 96


@dataclass(frozen=True)
class DotTiles:
    """Launch shape; sizes are powers of two of at least 16."""

    height: int  # rows per tile
    width: int  # outputs per tile
    depth: int  # inputs per loop step
    num_warps: int  # warps (of 32 threads) per program
    num_stages: int  # loads in flight in the software pipeline

    @classmethod
    def choose(cls, rows: int, in_size: int, out_size: int, num_sums: int) -> "DotTiles":
        """The fastest of 60 shapes on average over the products of an 8B model (H100)."""
        height = min(MAX_ROWS, max(MIN_ROWS, power_of_two(rows)))
        width = LEAST_WIDTH if rows <= 32 else 128 if rows <= 128 else 256
        tiles = num_sums * pl.cdiv(rows, height)
        while width > LEAST_WIDTH and (
            out_size % width or tiles * (out_size // width) < LEAST_PROGRAMS
        ):
            width //= 2
        if out_size < width:
            width = max(16, power_of_two(out_size))
        size = in_size // num_sums
        depth = min(MOST_DEPTH, size & -size)
        is_large = height * width > 128 * 128
        # three loads in flight are enough where many programs share a multiprocessor
        return cls(height, width, depth, 8 if is_large else 4, 4 if is_large or num_sums > 1 else 3)


def num_parts(in_size: int, out_size: int) -> int:
    """Number of partial sums P of a matrix, whatever the rows."""
    steps, remainder = divmod(in_size, MOST_DEPTH)
    most = 1 if remainder else min(MAX_PARTS, WANTED_PROGRAMS // pl.cdiv(out_size, LEAST_WIDTH))
    return next((count for count in range(most, 1, -1) if steps % count == 0), 1)


def _reference(x: Array, kernel: Array, num_sums: int) -> Array:
    shape = (num_sums, x.shape[1] // num_sums)
    lhs = x.reshape(-1, *shape).astype(jnp.float32)
    rhs = kernel.reshape(*shape, -1).astype(jnp.float32)
    return jnp.einsum("rpi,pio->pro", lhs, rhs, precision=jax.lax.Precision.HIGHEST)


def specjax_invariant_dot(
    x_ref: Any, kernel_ref: Any, out_ref: Any, *, tiles: DotTiles, is_transposed: bool
) -> None:
    """Kernel body: one program per tile of rows, tile of outputs and partial sum.

    Rows after the last one are zeros, and outputs after the last one repeat it; neither is stored.
    """
    num_sums, num_rows, num_outputs = out_ref.shape
    size = x_ref.shape[1] // num_sums
    num_tiles, num_columns = pl.cdiv(num_rows, tiles.height), pl.cdiv(num_outputs, tiles.width)
    program, in_group = pl.program_id(0), GROUP * num_columns * num_sums
    first_tile = program // in_group * GROUP
    in_column = jnp.minimum(num_tiles - first_tile, GROUP)
    tile, index = first_tile + program % in_group % in_column, program % in_group // in_column
    column, number = index % num_columns, index // num_columns
    rows = tile * tiles.height + jnp.arange(tiles.height, dtype=jnp.int32)
    columns = column * tiles.width + jnp.arange(tiles.width, dtype=jnp.int32)
    own_rows = jnp.minimum(rows, num_rows - 1)[:, None]
    # Read no row twice: if all programs read the same part of the L2 cache, a plain round of one
    # row takes 1.35 of XLA's time (8B shape, H200) instead of 1.01 (H100).
    is_row = (rows < num_rows)[:, None]
    mask = (
        jnp.broadcast_to(is_row, (tiles.height, tiles.depth)) if num_rows % tiles.height else None
    )
    # without a limit, the compiler knows that they are adjacent, and loads 16 bytes at a time
    own_columns = jnp.minimum(columns, num_outputs - 1) if num_outputs % tiles.width else columns

    def step(i: Any, sums: Array) -> Array:
        inputs = number * size + i * tiles.depth + jnp.arange(tiles.depth, dtype=jnp.int32)
        lhs = load(
            x_ref.at[own_rows, inputs[None, :]], mask=mask, other=None if mask is None else 0.0
        )
        if is_transposed:
            rhs = kernel_ref[own_columns[:, None], inputs[None, :]]
        else:
            rhs = kernel_ref[inputs[:, None], own_columns[None, :]]
        return sums + row_dot(lhs, rhs.astype(lhs.dtype), transpose=is_transposed)

    zeros = jnp.zeros((tiles.height, tiles.width), jnp.float32)
    sums = jax.lax.fori_loop(0, size // tiles.depth, step, zeros)
    is_own = is_row & (columns < num_outputs)[None, :]
    out = sums.astype(out_ref.dtype)
    store(out_ref.at[number, rows[:, None], columns[None, :]], out, mask=is_own)


def invariant_dot(
    x: Array,
    kernel: Array,
    *,
    is_transposed: bool = False,
    implementation: str | None = None,
    dtype: jnp.dtype | type | None = None,
    tiles: DotTiles | None = None,
) -> Array:
    """Partial sums of a matrix product, of which a row has the same bits in any batch.

    Args:
        x: ``[..., I]``.
        kernel: ``[I, O]``, or ``[O, I]`` if ``is_transposed``; it is cast to the dtype of ``x``. I
            must be a multiple of 16.
        dtype: dtype of the result if P is 1; by default float32, as always for several sums.
        tiles: launch shape of the Pallas kernel; ``None`` chooses one.

    Returns:
        ``[P, ..., O]``; added in ascending order, they are the product. P follows from I and O.
    """
    implementation = resolve(implementation)
    shape, x = x.shape, x.reshape(-1, x.shape[-1])
    (num_rows, in_size), out_size = x.shape, kernel.shape[0 if is_transposed else 1]
    if kernel.shape != ((out_size, in_size) if is_transposed else (in_size, out_size)):
        raise ValueError(f"x {x.shape} does not fit kernel {kernel.shape}, {is_transposed=}")
    if in_size % 16:
        raise ValueError(f"the number of inputs {in_size} must be a multiple of 16")
    num_sums = num_parts(in_size, out_size)
    dtype = jnp.float32 if dtype is None or num_sums > 1 else dtype
    if implementation == "xla" or x.size == 0:
        sums = _reference(x, kernel.T if is_transposed else kernel, num_sums).astype(dtype)
        return sums.reshape(num_sums, *shape[:-1], out_size)
    tiles = DotTiles.choose(num_rows, in_size, out_size, num_sums) if tiles is None else tiles
    columns = pl.cdiv(out_size, tiles.width)
    sums = triton_call(
        partial(specjax_invariant_dot, tiles=tiles, is_transposed=is_transposed),
        grid=(columns * num_sums * pl.cdiv(num_rows, tiles.height),),
        out_shape=jax.ShapeDtypeStruct((num_sums, num_rows, out_size), dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        implementation=implementation,
    )(x, kernel)
    return sums.reshape(num_sums, *shape[:-1], out_size)


def precision_for(dtype: jnp.dtype) -> jax.lax.Precision:
    """Precision of matrix products: IEEE float32 for float32, otherwise JAX's default."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def plain_dot(
    x: Array,
    kernel: Array,
    out_dtype: jnp.dtype | type,
    *,
    is_transposed: bool = False,
    implementation: str | None = None,
) -> Array:
    """``x [..., I] @ kernel [I, O]`` (``[O, I]`` if ``is_transposed``), summed in float32.

    A kernel ``[I, O]`` is cast to the dtype of ``x``.
    """
    if implementation in INVARIANT:
        how: dict[str, Any] = {"is_transposed": is_transposed, "implementation": implementation}
        return ordered_sum(invariant_dot(x, kernel, dtype=out_dtype, **how)).astype(out_dtype)
    how = {"precision": precision_for(x.dtype), "preferred_element_type": out_dtype}
    if is_transposed:
        return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (1,)), ((), ())), **how)
    return jnp.matmul(x, kernel.astype(x.dtype), **how)


# limits for splitting a product along its inner axis: rows, and columns of all parts together
MAX_SPLIT_ROWS = 63
MAX_SPLIT_COLUMNS = 36864


def num_partial_sums(rows: int, in_size: int, out_size: int) -> int:
    """Number of partial sums, up to 8, into which a matrix product with few rows is split.

    Without a split, a matrix with few columns keeps too few multiprocessors busy. XLA would also
    split such products (into 4 or 8 parts at the Llama-3.1-8B shape), but add the parts in another
    launch. From 64 rows on, a split costs more than it gains. A single row is left to XLA.
    """
    num_sums = 8
    while num_sums > 1 and (
        rows == 1
        or rows > MAX_SPLIT_ROWS
        or num_sums * out_size > MAX_SPLIT_COLUMNS
        or in_size % num_sums
        or in_size // num_sums < 64
    ):
        num_sums //= 2
    return num_sums


def partial_sums(x: Array, kernel: Array, implementation: str | None = None) -> Array:
    """Partial sums f32 ``[P, ..., O]`` of :func:`plain_dot`, or its result if a split is slower."""
    if implementation in INVARIANT:
        return invariant_dot(x, kernel, implementation=implementation)
    size, out_size = kernel.shape
    is_exact = x.dtype == jnp.float32
    num_sums = 1 if is_exact else num_partial_sums(x.size // size, size, out_size)
    if num_sums == 1:
        return plain_dot(x, kernel, x.dtype)
    sums = jnp.einsum(
        "rpi,pio->pro",
        x.reshape(-1, num_sums, size // num_sums),
        kernel.astype(x.dtype).reshape(num_sums, size // num_sums, out_size),
        preferred_element_type=jnp.float32,
    )
    return sums.reshape(num_sums, *x.shape[:-1], out_size)

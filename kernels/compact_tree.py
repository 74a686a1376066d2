"""Compaction of per-node outputs of a verified tree to the front of each request's rows.

Everything behind verification (draft extend, result processing, KV commit) takes the accepted
tokens to be the first ``num_accepted_tokens`` rows of a request. A chain has them there already;
a tree has not (SGLang changes #26866 and #26997). Axes: B requests, T tree rows, A accept width,
F entries of one row.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from specjax.kernels.backend import check_implementation, load, power_of_two, store, triton_call

# entries of one program: 4 warps move 16 elements a thread; narrow rows share a program
TILE = 2048
MAX_COLUMNS = 1024


def _reference(values: jax.Array, accept_index: jax.Array) -> jax.Array:
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
    """Kernel body: a pure gather, so that each output element is stored once by one program."""
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


def compact_tree(
    values: jax.Array,
    accept_index: jax.Array,
    *,
    implementation: str = "xla",
    interpret: bool | None = None,
) -> jax.Array:
    """Gather the accepted path of each request to the front.

    Args:
        values: ``[B, T, ...]``, one entry a tree row, any dtype.
        accept_index: i32 ``[B, A]``, rows ``0 .. T - 1`` of the accepted path in order, then -1.

    Returns:
        ``[B, A, ...]``: ``values`` at the accepted rows, zeros where ``accept_index`` is -1.
    """
    check_implementation(implementation)
    if values.ndim < 2 or accept_index.ndim != 2 or values.shape[0] != accept_index.shape[0]:
        raise ValueError(
            f"values {values.shape} must be [B, T, ...] and accept_index {accept_index.shape} "
            "[B, A] with the same B"
        )
    if implementation == "xla" or 0 in (values.size, accept_index.size):
        return _reference(values, accept_index)
    batch, width = accept_index.shape
    features = math.prod(values.shape[2:])
    num_rows, num_columns = _tile(width, features)
    # the lowering types pointers to bool as one bit wide; whole bytes leave nothing to its choice
    stored = values.astype(jnp.uint8) if values.dtype == jnp.bool_ else values
    out = triton_call(
        specjax_compact_tree,
        grid=(pl.cdiv(features, num_columns), pl.cdiv(width, num_rows), batch),
        out_shape=jax.ShapeDtypeStruct((batch, width, features), stored.dtype),
        num_warps=4 if num_rows * num_columns > 512 else 1,
        num_stages=1,
        interpret=interpret,
    )(stored.reshape(*stored.shape[:2], features), accept_index)
    return out.astype(values.dtype).reshape(batch, width, *values.shape[2:])

"""Residual addition and RMS normalisation in one launch.

XLA needs two launches (a reduction, then a product), 64 times per pass of the Llama-3.1-8B shape.
The summand may be the partial sums of a matrix product that was split along its inner axis. Adding
these up separately would need another launch. Axes: R rows, D hidden, P partial sums.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import INVARIANT, power_of_two, resolve, spans, triton_call


def rms_norm(x: Array, scale: Array, eps: float, implementation: str | None = None) -> Array:
    """Root-mean-square normalisation of ``x [..., D]``, computed in float32; keeps the dtype.

    XLA computes it, except in the invariant implementations.
    """
    if implementation in INVARIANT:
        zeros = jnp.zeros_like(x)
        return add_norm(x, zeros, scale, eps=eps, implementation=implementation)[1]
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return scaled(x32 * jax.lax.rsqrt(variance + eps), scale, x.dtype)


def scaled(x: Array, scale: Array, dtype: jnp.dtype) -> Array:
    """Multiply float32 normalised values by a scale, which is of ``dtype`` or float32."""
    return x.astype(dtype) * scale if scale.dtype == dtype else (x * scale).astype(dtype)


def whole(x: Array, ndim: int, dtype: jnp.dtype) -> Array:
    """Return ``x``. If it has ``ndim + 1`` axes, sum its leading axis of partial sums first."""
    return x if x.ndim == ndim else ordered_sum(x).astype(dtype)


def ordered_sum(sums: Array) -> Array:
    """Add up partial sums ``[P, ...]`` in ascending order, whatever their shape."""
    total = sums[0]
    for partial_sum in sums[1:]:
        total = total + partial_sum
    return total


def with_offset(scale: Array, offset: float) -> Array:
    """``scale + offset`` in float32, because bfloat16 would round 1 + w and so lose most of w."""
    return scale.astype(jnp.float32) + offset if offset else scale


def _reference(
    x: Array, delta: Array, scale: Array, eps: float, offset: float
) -> tuple[Array, Array]:
    total = x + whole(delta, x.ndim, x.dtype)
    return total, rms_norm(total, with_offset(scale, offset), eps)


def specjax_add_norm(*refs: Any, eps: float, offset: float) -> None:
    """Kernel body: one program per row, which it reads in parts of powers of two."""
    x_ref, delta_ref, scale_ref, sum_ref, normed_ref = refs
    size, row = x_ref.shape[1], pl.program_id(0)
    totals, squares = [], jnp.float32(0.0)
    for span in spans(size):
        # partial sums are float32 and are added in the same order for any number of rows
        delta = delta_ref[0, row, span]
        for i in range(1, delta_ref.shape[0]):
            delta += delta_ref[i, row, span]
        total = x_ref[row, span] + delta.astype(x_ref.dtype)
        sum_ref[row, span] = total
        total32 = total.astype(jnp.float32)
        squares += jnp.sum(total32 * total32)
        totals.append((span, total32))
    inverse = jax.lax.rsqrt(squares / size + eps)
    for span, total32 in totals:
        factor = with_offset(scale_ref[span], offset)
        normed_ref[row, span] = scaled(total32 * inverse, factor, x_ref.dtype)


def add_norm(
    x: Array,
    delta: Array,
    scale: Array,
    *,
    eps: float,
    offset: float = 0.0,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Add to the residual stream and normalise the sum.

    Args:
        x: ``[..., D]``, the residual stream.
        delta: ``[..., D]``, the output of a block, or f32 ``[P, ..., D]``, its partial sums.
        scale: ``[D]``, in the dtype of ``x`` or float32.
        eps: added to the mean square.
        offset: added to ``scale``, in float32.

    Returns:
        ``x + delta`` and its norm times ``scale + offset``, both ``[..., D]`` in the dtype of
        ``x``. The mean square is computed in float32 from the sum as stored.
    """
    implementation = resolve(implementation)
    if x.shape not in (delta.shape, delta.shape[1:]) or scale.shape != x.shape[-1:]:
        raise ValueError(
            f"delta {delta.shape} must be x's shape {x.shape}, optionally with a leading axis of "
            f"partial sums; scale {scale.shape} must be {x.shape[-1:]}"
        )
    if implementation == "xla" or x.size == 0:
        return _reference(x, delta, scale, eps, offset)
    size = x.shape[-1]
    shape = jax.ShapeDtypeStruct((x.size // size, size), x.dtype)
    total, normed = triton_call(
        partial(specjax_add_norm, eps=eps, offset=offset),
        grid=(shape.shape[0],),
        out_shape=(shape, shape),
        # each thread loads 16 bytes at a time
        num_warps=min(16, max(1, power_of_two(size) * x.dtype.itemsize // 512)),
        implementation=implementation,
    )(x.reshape(shape.shape), delta.reshape(-1, *shape.shape), scale)
    return total.reshape(x.shape), normed.reshape(x.shape)

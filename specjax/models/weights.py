"""Plain and quantised weights, and matrix products that read both.

A plain weight is an array ``[in, out]``. A quantised one is a :class:`QuantArray`, stored as
``[out, in]`` as in checkpoints, because XLA reads that order faster: at the Llama-3.1-8B shape, the
matrix products in a pass take 2.38 ms instead of 3.19 (8-bit floats, 2 rows, one H200).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kernels.add_norm import ordered_sum
from specjax.kernels.backend import INVARIANT
from specjax.kernels.invariant_dot import invariant_dot


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantArray:
    """A matrix ``values * scale`` whose values have fewer bits than the activations."""

    values: Array  # 8-bit dtype, [out, in]
    scale: Array  # f32 [out, 1]

    def __getitem__(self, index: Array | slice) -> "QuantArray":
        """Select outputs, which are rows of ``values``."""
        return QuantArray(self.values[index], self.scale[index])


Kernel = Array | QuantArray


def is_quantised(dtype: jnp.dtype) -> bool:
    """Whether a matrix of this dtype is a :class:`QuantArray`."""
    return jnp.dtype(dtype).itemsize == 1


def zero_kernel(in_size: int, out_size: int, dtype: jnp.dtype) -> Kernel:
    if is_quantised(dtype):
        shape = (out_size, in_size)
        return QuantArray(jnp.zeros(shape, dtype), jnp.zeros((out_size, 1), jnp.float32))
    return jnp.zeros((in_size, out_size), dtype)


def take_outputs(kernel: Kernel, index: Array | slice) -> Kernel:
    """The part of a kernel that computes selected outputs."""
    return kernel[index] if isinstance(kernel, QuantArray) else kernel[:, index]


def precision_for(dtype: jnp.dtype) -> jax.lax.Precision:
    """Precision of matrix products: IEEE float32 for float32, otherwise JAX's default."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def dot(
    x: Array,
    kernel: Kernel,
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
) -> Array:
    """Cast the kernel to the dtype of ``x [..., in]``; return their product, summed in float32."""
    precision, out = precision_for(x.dtype), out_dtype or x.dtype
    if implementation in INVARIANT:
        return ordered_sum(_invariant_sums(x, kernel, implementation, dtype=out)).astype(out)
    if isinstance(kernel, QuantArray):
        sums = dot_transposed(x, kernel.values.astype(x.dtype))
        return (sums * kernel.scale[:, 0]).astype(out)
    kernel = kernel.astype(x.dtype)
    return jnp.matmul(x, kernel, precision=precision, preferred_element_type=out)


def dot_transposed(x: Array, table: Array, implementation: str | None = None) -> Array:
    """Float32 ``x [..., in] @ table [out, in].T``."""
    if implementation in INVARIANT:
        return ordered_sum(_invariant_sums(x, table, implementation, is_transposed=True))
    return jax.lax.dot_general(
        x,
        table,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision_for(x.dtype),
        preferred_element_type=jnp.float32,
    )


def _invariant_sums(x: Array, kernel: Kernel, implementation: str | None, **options: Any) -> Array:
    """Partial sums ``[P, ..., out]`` of a product with ``x [..., in]``, invariant by row."""
    assert not isinstance(kernel, QuantArray)  # an engine refuses them
    rows = x.reshape(-1, x.shape[-1])
    sums = invariant_dot(rows, kernel, implementation=implementation, **options)
    return sums.reshape(sums.shape[0], *x.shape[:-1], sums.shape[-1])


# limits for splitting a product along its inner axis: rows, and columns of all parts together
MAX_SPLIT_ROWS = 63
MAX_SPLIT_COLUMNS = 36864


def num_partial_sums(rows: int, in_size: int, out_size: int) -> int:
    """Number of partial sums, up to 8, into which a matrix product with few rows is split.

    Without a split, a matrix with few columns keeps too few multiprocessors busy. XLA would also
    split such products (into 4 or 8 parts at the Llama-3.1-8B shape), but add the parts in another
    launch. From 64 rows on, a split costs more than it gains. A single row is left to XLA.
    """
    parts = 8
    while parts > 1 and (
        rows == 1
        or rows > MAX_SPLIT_ROWS
        or parts * out_size > MAX_SPLIT_COLUMNS
        or in_size % parts
        or in_size // parts < 64
    ):
        parts //= 2
    return parts


def partial_dot(x: Array, kernel: Kernel, implementation: str | None = None) -> Array:
    """Partial sums f32 ``[P, ..., out]`` of :func:`dot`, or its result if a split is slower."""
    if implementation in INVARIANT:
        return _invariant_sums(x, kernel, implementation)
    if isinstance(kernel, QuantArray) or x.dtype == jnp.float32:
        return dot(x, kernel)
    size, out_size = kernel.shape
    parts = num_partial_sums(x.size // size, size, out_size)
    if parts == 1:
        return dot(x, kernel)
    sums = jnp.einsum(
        "rpi,pio->pro",
        x.reshape(-1, parts, size // parts),
        kernel.astype(x.dtype).reshape(parts, size // parts, out_size),
        preferred_element_type=jnp.float32,
    )
    return sums.reshape(parts, *x.shape[:-1], out_size)

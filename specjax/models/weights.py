"""Plain and quantised weights, and matrix products that read both.

A plain weight is an array ``[in, out]``. A quantised one is a :class:`QuantArray`, whose inputs are
the last axis as in checkpoints, because XLA reads that order faster: at the Llama-3.1-8B shape, the
matrix products in a pass take 2.38 ms instead of 3.19 (8-bit floats, 2 rows, one H200).

If groups of inputs have scales of their own, XLA scales the values in the kernel of the product,
with an option that specjax/runtime/functions.py sets, but only if it does not split the product
itself. So the parts of a split product are stored apart: P parts of J inputs, I = P * J. The
products of 32 layers then take 2.5 ms at 2 rows and 4.1 at 32 (INT4, groups of 128, one H200).
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.config import Dtypes, Quantization
from specjax.kernels.add_norm import ordered_sum
from specjax.kernels.dot import MAX_SPLIT_COLUMNS, partial_sums, plain_dot, precision_for


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantArray:
    """A matrix ``values * scale + offset``, stored as ``format`` says."""

    values: Array  # [P, out, J]; inputs after the last one are 0
    # [P, out, G] of the G groups of a part; f32, or with several groups in the dtype of activations
    scale: Array
    offset: Array | None  # f32 [P, out, G] if the format has zero points
    format: Quantization = field(metadata={"static": True})

    @property
    def layout(self) -> "QuantLayout":
        """How its inputs are cut."""
        num_parts, _, size = self.values.shape
        return QuantLayout(num_parts, self.scale.shape[-1], size)

    def __getitem__(self, index: Array | slice) -> "QuantArray":
        """Select outputs."""
        offset = None if self.offset is None else self.offset[:, index]
        return QuantArray(self.values[:, index], self.scale[:, index], offset, self.format)


Kernel = Array | QuantArray


@dataclass(frozen=True)
class QuantLayout:
    """How the inputs of a quantised matrix are cut."""

    parts: int
    groups: int  # per part
    size: int  # inputs per part

    @classmethod
    def of(
        cls, format: Quantization, in_size: int, out_size: int, num_parts: int = 8
    ) -> "QuantLayout":
        """``num_parts`` is the largest number of parts."""
        if format.group is None:  # XLA splits the product itself
            return cls(1, 1, in_size)
        groups = -(-in_size // format.group)
        while num_parts > 1 and (num_parts * out_size > MAX_SPLIT_COLUMNS or groups % num_parts):
            num_parts //= 2
        return cls(num_parts, groups // num_parts, groups // num_parts * format.group)

    def cut(self, matrix: Any) -> Any:
        """Values ``[out, in]``, or scales ``[out, groups]``, as a QuantArray has them."""
        rows, columns = matrix.shape
        width = self.groups if columns == self.parts * self.groups else self.size
        if missing := self.parts * width - columns:
            # concatenated, because numpy cannot pad 4-bit integers
            zeros = np.zeros((rows, missing), matrix.dtype)
            matrix = np.concatenate([matrix, zeros], axis=1)
        return matrix.reshape(rows, self.parts, width).swapaxes(0, 1)


def abstract_kernel(in_size: int, out_size: int, dtypes: Dtypes, num_parts: int = 8) -> Any:
    """The shapes and dtypes of a matrix, whole or quantised, with at most ``num_parts`` parts."""
    array: Any = jax.ShapeDtypeStruct
    if (format := dtypes.quantization) is None:
        return array((in_size, out_size), dtypes.activations)
    layout = QuantLayout.of(format, in_size, out_size, num_parts)
    values = array((layout.parts, out_size, layout.size), format.dtype)
    shape = layout.parts, out_size, layout.groups
    scale = array(shape, jnp.float32 if format.group is None else dtypes.activations)
    offset = array(shape, jnp.float32) if format.has_zeros else None
    return QuantArray(values, scale, offset, format)


def take_outputs(kernel: Kernel, index: Array | slice) -> Kernel:
    """The part of a kernel that computes selected outputs."""
    return kernel[index] if isinstance(kernel, QuantArray) else kernel[:, index]


def dot(
    x: Array,
    kernel: Kernel,
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
) -> Array:
    """Cast the kernel to the dtype of ``x [..., in]``; return their product, summed in float32."""
    out = out_dtype or x.dtype
    if isinstance(kernel, QuantArray):
        return ordered_sum(_quantised_sums(x, kernel, out)).astype(out)
    return plain_dot(x, kernel, out, implementation=implementation)


# from this number of rows on, products of two 8-bit operands are faster (3.5 ms at 128 rows instead
# of 5.1 for the layers of the Llama-3.1-8B shape on one H200)
LEAST_8BIT_ROWS = 64
# up to this number of rows, XLA's own kernels read quantised matrices; for more rows, it converts
# each matrix first
MAX_FUSED_ROWS = 512


def _quantised_sums(x: Array, kernel: QuantArray, out_dtype: jnp.dtype) -> Array:
    """Partial sums ``[P, ..., out]`` of a product with ``x [..., in]``, in float32 for few rows.

    Their total has the precision of ``out_dtype``.
    """
    values, format, (num_parts, _, size) = kernel.values, kernel.format, kernel.values.shape
    num_rows = x.size // x.shape[-1]
    # in float32, sums of many rows would take twice the memory, and a tenth of a prefill
    wide = jnp.float32 if num_rows <= MAX_FUSED_ROWS else out_dtype
    if format.group is None:
        factor = kernel.scale[0, :, 0]
        if not format.rounds_activations:
            sums = plain_dot(x, values[0].astype(x.dtype), wide, is_transposed=True)
            return (sums.astype(jnp.float32) * factor)[None]
        rounded, row_scale = round_rows(x, format.dtype)
        if num_rows >= LEAST_8BIT_ROWS:
            is_float = jnp.issubdtype(format.dtype, jnp.floating)
            out = wide if is_float else jnp.int32
            axes = (((x.ndim - 1,), (1,)), ((), ()))
            # By default, cuBLAS adds up 8-bit floats in about 14 bits. That is enough for results
            # in bfloat16, and prefill takes 9 % less time.
            is_exact = is_float and out_dtype == jnp.float32
            exact = jax.lax.Precision.HIGHEST if is_exact else None
            sums = jax.lax.dot_general(
                rounded, values[0], axes, precision=exact, preferred_element_type=out
            )
        else:  # the same values, which bfloat16 holds exactly
            operands = rounded.astype(x.dtype), values[0].astype(x.dtype)
            sums = plain_dot(*operands, jnp.float32, is_transposed=True)
        return (sums.astype(jnp.float32) * row_scale * factor)[None]
    rows = x.reshape(-1, x.shape[-1])
    if missing := num_parts * size - rows.shape[1]:
        rows = jnp.pad(rows, ((0, 0), (0, missing)))
    shape, count = values.shape, kernel.scale.shape[-1]
    scale = kernel.scale.astype(x.dtype)[..., None]
    scale = jnp.broadcast_to(scale, (*shape[:2], count, size // count))
    matrix = values.astype(x.dtype) * scale.reshape(shape)
    if num_rows > MAX_FUSED_ROWS:
        joined = matrix.swapaxes(0, 1).reshape(shape[1], -1)
        sums = plain_dot(rows, joined, wide, is_transposed=True)[None]
    else:
        sums = _batched(rows.reshape(-1, num_parts, size).swapaxes(0, 1), matrix)
    if kernel.offset is not None:
        grouped = rows.astype(jnp.float32).reshape(-1, num_parts, count, size // count).sum(axis=-1)
        of_offsets = _batched(grouped.swapaxes(0, 1), kernel.offset)
        of_offsets = of_offsets if len(sums) == num_parts else of_offsets.sum(axis=0, keepdims=True)
        sums = sums.astype(jnp.float32) + of_offsets
    return sums.reshape(len(sums), *x.shape[:-1], -1)


def _batched(lhs: Array, rhs: Array) -> Array:
    """Float32 products of ``lhs [P, R, J]`` and ``rhs [P, out, J]``."""
    return jax.lax.dot_general(
        lhs,
        rhs,
        (((2,), (2,)), ((0,), (0,))),
        precision=precision_for(lhs.dtype),
        preferred_element_type=jnp.float32,
    )


def largest(dtype: jnp.dtype) -> float:
    """The largest value of a dtype."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return float(jnp.finfo(dtype).max if is_float else jnp.iinfo(dtype).max)


def round_rows(x: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Round the rows of ``x [..., D]`` to an 8-bit dtype; return them and scales ``[..., 1]``."""
    most, wide = largest(dtype), x.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=-1, keepdims=True) / most
    scale = jnp.where(scale == 0.0, 1.0, scale)
    values = jnp.clip(wide / scale, -most, most)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.round(values).astype(dtype), scale
    # Rounded here, because on a GPU, XLA removes a pair of casts, to e4m3 and to a wider dtype.
    # Values below 2^-6 are multiples of 2^-9, others have 3 bits after the leading one.
    small = jnp.round(values * 2**9) / 2**9
    large = jax.lax.reduce_precision(values, exponent_bits=8, mantissa_bits=3)
    return jnp.where(jnp.abs(values) < 2**-6, small, large).astype(dtype), scale


def partial_dot(x: Array, kernel: Kernel, implementation: str | None = None) -> Array:
    """Partial sums f32 ``[P, ..., out]`` of :func:`dot`, or its result if a split is slower."""
    if not isinstance(kernel, QuantArray):
        return partial_sums(x, kernel, implementation)
    if len(kernel.values) == 1 or x.dtype == jnp.float32:
        return dot(x, kernel)
    sums = _quantised_sums(x, kernel, x.dtype)
    return sums if len(sums) > 1 else sums[0].astype(x.dtype)

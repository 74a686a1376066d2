"""MXFP4: values of 4 bits (e2m1), of which 32 neighbours share a power of two (E8M0).

Packed for kernels, byte c of a row with K values has value c in its low half and value c + K / 2 in
its high half: both halves multiply neighbouring inputs, so no value moves to another lane. K is a
multiple of 64, so that the values of a scale are in the same half. Source: OCP Microscaling Formats
(MX), version 1.0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from specjax.kernels.backend import inline_ptx

GROUP = 32  # values with the same scale
SPREAD = 8.5625**0.5  # root mean square of all 16 values
_NAN = 255  # a scale

# The values in a half of four packed bytes, as bfloat16. The bytes go into 16 bits each, of which a
# mask keeps one half. A product copies its bits to the last ones of the exponent and to the sign.
# Times 2^126, the difference of the exponents' biases, these numbers, of which some are subnormal,
# are the values.
_TO_VALUES = """{{
    .reg .b32 x, y, factor, zero;
    mov.b32 factor, 0x7e807e80; mov.b32 zero, 0x80008000;
    prmt.b32 x, $2, 0, 0x4140; prmt.b32 y, $2, 0, 0x4342;
    and.b32 x, x, {mask}; mul.lo.u32 x, x, {shifts}; and.b32 x, x, 0x81c081c0;
    and.b32 y, y, {mask}; mul.lo.u32 y, y, {shifts}; and.b32 y, y, 0x81c081c0;
    fma.rn.bf16x2 $0, x, factor, zero; fma.rn.bf16x2 $1, y, factor, zero;
}}"""
PTX = (
    _TO_VALUES.format(mask="0x000f000f", shifts="0x1040"),
    _TO_VALUES.format(mask="0x00f000f0", shifts="0x104"),
)


def values_of(
    codes: Array, half: int, dtype: jnp.dtype | type, implementation: str = "xla"
) -> Array:
    """The values in a half of packed bytes u8, without their scales.

    On a GPU, bfloat16 takes own instructions: 2.5 per value instead of 7 (compiled for sm_90). They
    read four neighbours at once, which is right only for the second operand of a product.

    The code's three low bits, as last bits of the exponent of 2 and first bit of the mantissa, give
    g = 2, 3, 4, 6, 8, 12, 16 and 24. Values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 = min(g / 4, g / 2 - 1).
    No number is subnormal, which a device may flush.
    """
    if implementation == "pallas" and dtype == jnp.bfloat16:
        (wide,) = inline_ptx(
            PTX[half],
            args=[codes],
            constraints="=r,=r,r",
            pack=4,
            result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
        )
        return wide
    bits = codes.astype(jnp.int32)
    low, sign = (bits << (22 - 4 * half)) & (7 << 22), (bits << (28 - 4 * half)) & -(2**31)
    size = jax.lax.bitcast_convert_type(low | 0x40000000, jnp.float32)
    size = jnp.minimum(0.25 * size, 0.5 * size - 1.0)
    signed = jax.lax.bitcast_convert_type(size, jnp.int32) | sign
    return jax.lax.bitcast_convert_type(signed, jnp.float32).astype(dtype)


def powers_of(scales: Array) -> Array:
    """The powers of two f32 that scales u8 are, exact in bfloat16 too; that of 0 is 0."""
    return jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)


def scaled(
    codes: Array, scales: Array, half: int, dtype: jnp.dtype | type, implementation: str
) -> Array:
    """Values in a half of packed u8 ``[out, J]`` times scales u8 ``[out]``; they are exact."""
    powers = powers_of(scales).astype(dtype)[:, None]
    return values_of(codes, half, dtype, implementation) * powers


def unpacked(codes: Array, scales: Array) -> Array:
    """Values f32 ``[..., K]`` of packed u8 ``[..., K / 2]`` with scales u8 ``[..., K / 32]``."""
    values = jnp.concatenate([values_of(codes, half, jnp.float32) for half in range(2)], axis=-1)
    return values * jnp.repeat(powers_of(scales), GROUP, axis=-1)


def check_scales(name: str, shape: tuple[int, ...], scales: Array | None) -> None:
    """Raise ValueError if a matrix ``[..., K]`` cannot be packed with these scales."""
    expected = (*shape[:-1], shape[-1] // GROUP)
    if shape[-1] % (2 * GROUP) or scales is None or scales.shape != expected:
        raise ValueError(
            f"{name} {shape} in MXFP4 needs {2 * GROUP} n inputs and scales {expected}; they are "
            f"{None if scales is None else scales.shape}"
        )


def _packed(
    blocks: np.ndarray, merge: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Pack blocks ``[E, ..., K / 32, bytes]``, of which ``merge`` joins those of both halves."""
    *shape, count, _ = blocks.shape
    if blocks.dtype != np.uint8 or count % 2:
        raise ValueError(
            f"blocks are {blocks.dtype}, {count} per row; they must be uint8, and even"
        )
    out = np.empty((*shape, count * GROUP // 2), np.uint8)
    for packed, each in zip(out, blocks, strict=True):  # temporary arrays are those of an expert
        packed[...] = merge(each[..., : count // 2, :], each[..., count // 2 :, :]).reshape(
            packed.shape
        )
    return out


def pack(blocks: np.ndarray) -> np.ndarray:
    """Pack u8 ``[E, ..., K / 32, 16]``, whose byte b has the values 2 b (low) and 2 b + 1."""

    def merge(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.stack([first & 15 | second << 4, first >> 4 | second & 0xF0], axis=-1)

    return _packed(blocks, merge)


def pack_ggml(blocks: np.ndarray) -> np.ndarray:
    """Pack u8 ``[E, ..., K / 32, 17]``: after a scale, byte j has values j (low) and j + 16."""

    def merge(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        first, second = first[..., 1:], second[..., 1:]
        return np.concatenate([first & 15 | second << 4, first >> 4 | second & 0xF0], axis=-1)

    return _packed(blocks, merge)


def scales_of(scales: np.ndarray) -> np.ndarray:
    """Check scales u8; raises ValueError if one is NaN."""
    if scales.dtype != np.uint8 or (scales == _NAN).any():
        raise ValueError(f"scales are {scales.dtype}; they must be uint8, and not {_NAN} (NaN)")
    return scales


def ggml_scales(blocks: np.ndarray) -> np.ndarray:
    """The scales ``[..., K / 32]`` of blocks u8 ``[..., K / 32, 17]``."""
    return scales_of(blocks[..., 0])

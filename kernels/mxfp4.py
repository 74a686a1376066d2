"""MXFP4: values of 4 bits (e2m1), of which 32 neighbours share a power of two (E8M0).

Packed for kernels, four bytes of a row with K values have the values c to c + 3 and c + K / 2 to
c + K / 2 + 3, so that each half of a row multiplies neighbouring inputs, and no value moves to
another lane. In the first and the last two bytes, the bits of the values c and c + 1 are where
bfloat16 has its sign, the last two bits of its exponent and the first bit of its mantissa, and
those of the others are where a shift or two bring them there:

    bit        15  14  13  12  11 10 9  8 7 6  5 4 3  2 1 0
    sign of     0   2   3   1
    size of                    3        0      1      2

0 and 1 are values of the first half, c and c + 2, or c + 1 and c + 3; 2 and 3 are those of the
second half. K is a multiple of 64, so that the values of a scale are in the same half. Source: OCP
Microscaling Formats (MX), version 1.0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from specjax.kernels.backend import inline_ptx

GROUP = 32  # values with the same scale
SPREAD = 8.5625**0.5  # root mean square of all 16 values
# Of scales: 2, because a factor of 2^126 must not overflow. Weights of real models are far smaller.
LARGEST = 128
# places of the sign and of the last bit of the size in 16 bits, by half of a row and pair of values
_PLACES = (((15, 6), (12, 3)), ((14, 0), (13, 9)))
# The values in a half of four packed bytes, as bfloat16, divided by 2^126, the difference of the
# exponents' biases. A factor of 66 shifts by 1 and by 6.
_HEAD = "{ .reg .b32 x, y; "
PTX = (
    _HEAD + "and.b32 $0, $2, 0x81c081c0; shl.b32 x, $2, 3; and.b32 $1, x, 0x81c081c0; }",
    _HEAD + "and.b32 x, $2, 0x40074007; mul.lo.u32 x, x, 66; and.b32 $0, x, 0x81c081c0; "
    "shl.b32 x, $2, 2; and.b32 x, x, 0x80008000; shr.u32 y, $2, 3; and.b32 y, y, 0x01c001c0; "
    "or.b32 $1, x, y; }",
)


def values_of(packed: Array, half: int) -> Array:
    """The values f32 in a half of packed bytes u8 ``[..., J]``, without their scales.

    The size of a value, as last bits of the exponent of 2 and first bit of the mantissa, gives
    g = 2, 3, 4, 6, 8, 12, 16 and 24. Values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 = min(g / 4, g / 2 - 1).
    """
    octets = packed.astype(jnp.int32).reshape(*packed.shape[:-1], -1, 2, 2)
    lanes = octets[..., 0] | octets[..., 1] << 8
    signs, sizes = (
        jnp.stack([lanes >> places[i] for places in _PLACES[half]], axis=-2).reshape(packed.shape)
        for i in range(2)
    )
    wide = jax.lax.bitcast_convert_type((sizes & 7) << 22 | 0x40000000, jnp.float32)
    wide = jnp.minimum(0.25 * wide, 0.5 * wide - 1.0)
    signed = jax.lax.bitcast_convert_type(wide, jnp.int32) | (signs & 1) << 31
    return jax.lax.bitcast_convert_type(signed, jnp.float32)


def powers_of(scales: Array) -> Array:
    """The powers of two f32 that scales u8 are; that of 0 is 0."""
    return jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)


def scaled(
    packed: Array, scales: Array, half: int, dtype: jnp.dtype | type, implementation: str
) -> Array:
    """Values in a half of packed u8 ``[out, J]`` times scales u8 ``[out]``; bfloat16 is exact.

    On a GPU, own instructions take 1.7 operations per value instead of 7 (compiled for sm_90). They
    read four neighbours at once, which is right only for the second operand of a product.
    """
    if implementation != "pallas":
        return (values_of(packed, half) * powers_of(scales)[:, None]).astype(dtype)
    (small,) = inline_ptx(
        PTX[half],
        args=[packed],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, jnp.bfloat16)],
    )
    exponents = (scales.astype(jnp.int32) + 126) << 7
    factors = jax.lax.bitcast_convert_type(exponents.astype(jnp.int16), jnp.bfloat16)
    return (small * factors[:, None]).astype(dtype)


def unpacked(packed: Array, scales: Array) -> Array:
    """Values f32 ``[..., K]`` of packed u8 ``[..., K / 2]`` with scales u8 ``[..., K / 32]``."""
    values = jnp.concatenate([values_of(packed, half) for half in range(2)], axis=-1)
    return values * jnp.repeat(powers_of(scales), GROUP, axis=-1)


def check_scales(name: str, shape: tuple[int, ...], scales: Array | None) -> None:
    """Raise ValueError if a matrix ``[..., K]`` cannot be packed with these scales."""
    expected = (*shape[:-1], shape[-1] // GROUP)
    if shape[-1] % (2 * GROUP) or scales is None or scales.shape != expected:
        raise ValueError(
            f"{name} {shape} in MXFP4 needs {2 * GROUP} n inputs and scales {expected}; they are "
            f"{None if scales is None else scales.shape}"
        )


def _packed(blocks: np.ndarray, codes_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Pack blocks ``[E, ..., K / 32, bytes]``, from which ``codes_of`` makes ``[..., K]``."""
    *shape, count, _ = blocks.shape
    if blocks.dtype != np.uint8 or count % 2:
        raise ValueError(
            f"blocks are {blocks.dtype}, {count} per row; they must be uint8, and even"
        )
    out = np.empty((*shape, count * GROUP // 2), np.uint8)
    for packed, each in zip(out, blocks, strict=True):  # temporary arrays are those of an expert
        codes = codes_of(each).reshape(*packed.shape[:-1], 2, -1, 2, 2).astype(np.uint16)
        lanes = np.zeros((*packed.shape[:-1], packed.shape[-1] // 4, 2), "<u2")
        for half, pairs in enumerate(_PLACES):
            for pair, (sign, size) in enumerate(pairs):
                code = codes[..., half, :, pair, :]
                lanes |= code >> 3 << sign | (code & 7) << size
        packed[...] = lanes.view(np.uint8).reshape(packed.shape)
    return out


def pack(blocks: np.ndarray) -> np.ndarray:
    """Pack u8 ``[E, ..., K / 32, 16]``, whose byte b has the values 2 b (low) and 2 b + 1."""
    return _packed(blocks, lambda each: np.stack([each & 15, each >> 4], axis=-1))


def pack_ggml(blocks: np.ndarray) -> np.ndarray:
    """Pack u8 ``[E, ..., K / 32, 17]``: after a scale, byte j has values j (low) and j + 16."""

    def codes_of(each: np.ndarray) -> np.ndarray:
        return np.concatenate([each[..., 1:] & 15, each[..., 1:] >> 4], axis=-1)

    return _packed(blocks, codes_of)


def scales_of(scales: np.ndarray) -> np.ndarray:
    """Check scales u8; raises ValueError if one is too large, or NaN (255)."""
    if scales.dtype != np.uint8 or (scales > LARGEST).any():
        found = f"{scales.dtype} up to {scales.max(initial=0)}"
        raise ValueError(f"scales are {found}; they must be uint8 up to {LARGEST}")
    return scales


def ggml_scales(blocks: np.ndarray) -> np.ndarray:
    """The scales ``[..., K / 32]`` of blocks u8 ``[..., K / 32, 17]``."""
    return scales_of(blocks[..., 0])

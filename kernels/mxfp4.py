"""MXFP4: values of 4 bits (e2m1), of which 32 neighbours share a power of two (E8M0).

Packed for kernels, the matrices of E experts are words u16 ``[E, C, outputs, 32]`` of C blocks of
128 inputs: word j of a block has the inputs j, 32 + j, 64 + j and 96 + j, so that each of its four
values is for neighbouring inputs in neighbouring words, and no value moves to another lane. The
blocks of some outputs are neighbours in memory. The bits of the first value are where bfloat16 has
its sign, the last two bits of its exponent and the first bit of its mantissa, and a shift or two
bring those of the others there:

    bit        15  14  13  12  11 10 9  8 7 6  5 4 3  2 1 0
    sign of     0   2   3   1
    size of                    3        0      1      2

Scales are words u32 ``[E, C, outputs]``, with a byte for each 32 inputs. If the number of inputs is
no multiple of 128, the last block ends with zeros. Source: OCP Microscaling Formats (MX), version
1.0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from specjax.kernels.backend import inline_ptx, load, row_dot

GROUP, BLOCK = 32, 128  # values with the same scale, and inputs of a word's block
SPREAD = 8.5625**0.5  # root mean square of all 16 values
# Of scales: 2, because a factor of 2^126 must not overflow. Weights of real models are far smaller.
LARGEST = 128
# Added to scales: unpacked values lack a factor of 2^126, the difference of the exponents' biases.
BIAS = 126
# places of the sign and of the last bit of the size of each value in a word
_PLACES = (15, 6), (12, 3), (14, 0), (13, 9)
# Value i of two words, as two bfloat16 divided by 2^126. A factor of 66 shifts by 1 and by 6.
PTX = tuple(
    f"{{ .reg .b32 x, y; {code} }}"
    for code in (
        "and.b32 $0, $1, 0x81c081c0;",
        "shl.b32 x, $1, 3; and.b32 $0, x, 0x81c081c0;",
        "and.b32 x, $1, 0x40074007; mul.lo.u32 x, x, 66; and.b32 $0, x, 0x81c081c0;",
        "shl.b32 x, $1, 2; and.b32 x, x, 0x80008000; shr.u32 y, $1, 3; and.b32 y, y, 0x01c001c0; "
        "or.b32 $0, x, y;",
    )
)


def value_of(words: Array, i: int) -> Array:
    """Value i f32 of each word u16, without its scale.

    The size of a value, as last bits of the exponent of 2 and first bit of the mantissa, gives
    g = 2, 3, 4, 6, 8, 12, 16 and 24. Values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 = min(g / 4, g / 2 - 1).
    """
    sign, size = (words.astype(jnp.int32) >> place for place in _PLACES[i])
    wide = jax.lax.bitcast_convert_type((size & 7) << 22 | 0x40000000, jnp.float32)
    wide = jnp.minimum(0.25 * wide, 0.5 * wide - 1.0)
    signed = jax.lax.bitcast_convert_type(wide, jnp.int32) | (sign & 1) << 31
    return jax.lax.bitcast_convert_type(signed, jnp.float32)


def scaled(
    words: Array, scales: Array, i: int, dtype: jnp.dtype | type, implementation: str
) -> Array:
    """Value i of words u16 ``[outputs, 32]`` times scales u32 ``[outputs]``; bfloat16 is exact.

    On a GPU, own instructions take 1.7 operations per value instead of 7 (compiled for sm_90).
    """
    if implementation != "pallas":
        exponents = (scales >> (8 * i)).astype(jnp.int32) & 255
        powers = _power(exponents - BIAS)
        return (value_of(words, i) * powers[:, None]).astype(dtype)
    (small,) = inline_ptx(
        PTX[i],
        args=[words],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    # two bytes become the exponents of two bfloat16 at once
    pair = (scales << 7 if i % 2 == 0 else scales >> 1) & jnp.uint32(0x7F807F80)
    bits = (pair >> 16 if i >= 2 else pair).astype(jnp.uint16)
    return (small * jax.lax.bitcast_convert_type(bits, jnp.bfloat16)[:, None]).astype(dtype)


def _power(exponents: Array) -> Array:
    """2^(e - 127) f32 of i32; that of 0 is 0."""
    return jax.lax.bitcast_convert_type(exponents << 23, jnp.float32)


def unpacked(words: Array, scales: Array, size: int) -> Array:
    """Values f32 ``[E, outputs, size]`` of packed matrices with ``size`` inputs."""
    values = jnp.stack([value_of(words, i) for i in range(4)], axis=-2)  # [E, C, outputs, 4, 32]
    octets = scales[..., None] >> jnp.arange(0, 32, 8, dtype=jnp.uint32)  # [E, C, outputs, 4]
    powers = _power((octets & 255).astype(jnp.int32) - BIAS)
    values = (values * powers[..., None]).swapaxes(1, 2)
    return values.reshape(*values.shape[:2], -1)[..., :size]


class PackedMatrix(NamedTuple):
    """The packed matrices of all experts; arrays, or references to them."""

    values: Any
    scales: Any
    biases: Any  # [E, outputs] or None

    @property
    def num_outputs(self) -> int:
        return self.values.shape[2]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if they are not matrices ``[E, outputs, inputs]`` of this shape."""
        num_experts, outputs, size = shape
        blocks = -(-size // BLOCK)
        for what, array, expected in (
            ("", self.values, (num_experts, blocks, outputs, BLOCK // 4)),
            ("the scales of ", self.scales, (num_experts, blocks, outputs)),
        ):
            if array is None or array.shape != expected:
                actual = None if array is None else array.shape
                raise ValueError(f"{what}{name} {shape} in MXFP4 must be {expected}, not {actual}")

    def product(self, x: Array) -> Array:
        """Products f32 ``[R, outputs]`` of rows with the matrix of one expert, by XLA."""
        (matrix,) = unpacked(self.values[None], self.scales[None], x.shape[1])
        return jnp.matmul(x.astype(jnp.float32), matrix.T, precision=jax.lax.Precision.HIGHEST)

    def step_bytes(self, height: int, num_outputs: int, itemsize: int) -> int:
        """Bytes that a loop step reads for a tile of rows and outputs."""
        return (BLOCK // 2 + 4) * num_outputs + BLOCK * height * itemsize

    def products(
        self,
        x_ref: Any,
        rows: Array,
        is_live: Array,
        expert: Array,
        outputs: tuple[Array, ...],
        implementation: str,
    ) -> list[Array]:
        """Products f32 ``[height, width]`` of rows with some outputs of an expert's matrix.

        The matrix is the first operand of the tensor cores' products, so that values go from their
        words to registers in the order in which the products take them.
        """
        size, lane = x_ref.shape[1], jnp.arange(BLOCK // 4, dtype=jnp.int32)

        def step(block: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            words = [self.values[expert, block, x[:, None], lane[None, :]] for x in outputs]
            scales = [self.scales[expert, block, x] for x in outputs]
            totals = list(sums)
            # one matrix after the other, which needs fewer registers
            for j, pair in enumerate(zip(words, scales, strict=True)):
                for i in range(4):
                    inputs = block * BLOCK + i * GROUP + lane
                    mask = is_live[:, None] & (inputs < size)[None, :]
                    x = load(x_ref.at[rows[:, None], inputs[None, :]], mask=mask, other=0.0)
                    matrix = scaled(*pair, i, x.dtype, implementation)
                    totals[j] += row_dot(matrix, x, transpose=True)
            return tuple(totals)

        zeros = (jnp.zeros((len(outputs[0]), len(rows)), jnp.float32),) * len(outputs)
        sums = jax.lax.fori_loop(0, self.values.shape[1], step, zeros)
        return [total.T for total in sums]


def _packed(blocks: np.ndarray, codes_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Pack blocks ``[E, outputs, K / 32, bytes]``, from which ``codes_of`` makes ``[..., 32]``."""
    num_experts, outputs, groups, _ = blocks.shape
    if blocks.dtype != np.uint8:
        raise ValueError(f"blocks are {blocks.dtype}; they must be uint8")
    count = -(-groups // 4)
    out = np.zeros((num_experts, count, outputs, GROUP), np.uint16)
    for packed, each in zip(out, blocks, strict=True):  # temporary arrays are those of an expert
        codes = codes_of(each).swapaxes(0, 1)  # [groups, outputs, 32]
        for i, (sign, size) in enumerate(_PLACES):
            code = codes[i::4].astype(np.uint16)
            packed[: len(code)] |= code >> 3 << sign | (code & 7) << size
    return out


def pack(blocks: np.ndarray) -> np.ndarray:
    """Pack u8 ``[E, outputs, K / 32, 16]``; byte b has the values 2 b (low) and 2 b + 1."""

    def codes_of(each: np.ndarray) -> np.ndarray:
        return np.stack([each & 15, each >> 4], axis=-1).reshape(*each.shape[:-1], -1)

    return _packed(blocks, codes_of)


def pack_ggml(blocks: np.ndarray) -> np.ndarray:
    """Pack u8 ``[E, outputs, K / 32, 17]``: after a scale, byte j has values j (low), j + 16."""

    def codes_of(each: np.ndarray) -> np.ndarray:
        return np.concatenate([each[..., 1:] & 15, each[..., 1:] >> 4], axis=-1)

    return _packed(blocks, codes_of)


def pack_scales(scales: np.ndarray) -> np.ndarray:
    """Pack scales u8 ``[E, outputs, K / 32]``; raises ValueError for a too large one, or NaN."""
    if scales.dtype != np.uint8 or (scales > LARGEST).any():
        stated = f"{scales.dtype} up to {scales.max(initial=0)}"
        raise ValueError(f"scales are {stated}; they must be uint8 up to {LARGEST}")
    groups = scales.shape[-1]
    octets = np.pad(scales + np.uint8(BIAS), ((0, 0), (0, 0), (0, -groups % 4)))
    return np.ascontiguousarray(octets.view("<u4").swapaxes(1, 2))


def pack_ggml_scales(blocks: np.ndarray) -> np.ndarray:
    """Pack the scales of blocks u8 ``[E, outputs, K / 32, 17]``."""
    return pack_scales(blocks[..., 0])

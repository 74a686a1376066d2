"""MXFP4 against a table of its values, and the layouts of files."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels import mxfp4

TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def stored(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[2, 3, 192]`` and scales ``[2, 3, 6]`` of two matrices."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(16, size=(2, 3, 192), dtype=np.uint8)
    return codes, rng.integers(3, 129, (2, 3, 6), np.uint8)


def expected_of(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return TABLE[codes] * np.repeat(powers, 32, axis=-1)


def words_of(codes: np.ndarray) -> np.ndarray:
    """Pack codes ``[4, 32 n]``: words ``[32 n]``, the outputs of a block in turn."""
    pairs = codes.reshape(4, -1, 32).swapaxes(0, 1).reshape(1, -1, 4, 16, 2)
    return mxfp4.pack(pairs[..., 0] | pairs[..., 1] << 4).reshape(-1)


@pytest.mark.parametrize("i", range(4))
def test_values(i: int) -> None:
    """All values are exact, also the sign of zero, whatever the others are."""
    codes = np.random.default_rng(0).integers(16, size=(4, 4096), dtype=np.uint8)
    found = np.asarray(mxfp4.value_of(jnp.asarray(words_of(codes)), i))
    np.testing.assert_array_equal(found.view(np.uint32), TABLE[codes[i]].view(np.uint32))


def run_ptx(text: str, word: int) -> np.ndarray:
    """Run instructions on 32 bits; return two bfloat16."""
    named, operations = {"$1": word}, {"and": "__and__", "or": "__or__", "mul": "__mul__"}
    operations |= {"shl": "__lshift__", "shr": "__rshift__"}
    for line in text.strip("{} ").split(";"):
        name, *places = line.replace(",", " ").split() or [".reg"]
        if name != ".reg":
            a, b = (named[x] if x in named else int(x, 0) for x in places[1:])
            result = getattr(a, operations[name.partition(".")[0]])(b)
            named[places[0]] = result & 0xFFFFFFFF
    return np.array([named["$0"]], np.uint32).view(jnp.bfloat16)


@pytest.mark.parametrize("i", range(4))
def test_own_instructions(i: int) -> None:
    codes = np.random.default_rng(1).integers(16, size=(4, 2048), dtype=np.uint8)
    pairs = words_of(codes).view(np.uint32)
    found = np.concatenate([run_ptx(mxfp4.PTX[i], int(pair)) for pair in pairs])
    found = found.astype(np.float32) * np.float32(2) ** 126
    np.testing.assert_array_equal(found.view(np.uint32), TABLE[codes[i]].view(np.uint32))


def test_scales() -> None:
    """A scale of 0 is too small for float32; whether kernels read its values as 0 is not fixed."""
    scales = np.arange(1, 129, dtype=np.uint8).reshape(1, 1, 128)
    blocks = np.full((1, 1, 128, 16), 0x22, np.uint8)  # ones
    words, packed = map(jnp.asarray, (mxfp4.pack(blocks), mxfp4.pack_scales(scales)))
    found = np.asarray(mxfp4.unpacked(words, packed, 4096))
    expected = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    np.testing.assert_array_equal(found, np.repeat(expected, 32, axis=-1))


def test_blocks_of_pairs() -> None:
    codes, scales = stored()
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(2, 3, 6, 16)
    packed = jnp.asarray(mxfp4.pack(blocks)), jnp.asarray(mxfp4.pack_scales(scales))
    found = mxfp4.unpacked(*packed, 192)
    np.testing.assert_array_equal(found, expected_of(codes, scales))


def test_blocks_of_gguf() -> None:
    """The gguf library reads the same values."""
    codes, scales = stored(1)
    by_block = codes.reshape(2, 3, 6, 2, 16)
    halves = by_block[..., 0, :] | by_block[..., 1, :] << 4
    blocks = np.concatenate([scales[..., None], halves], axis=-1)
    packed = jnp.asarray(mxfp4.pack_ggml(blocks)), jnp.asarray(mxfp4.pack_ggml_scales(blocks))
    found = mxfp4.unpacked(*packed, 192)
    np.testing.assert_array_equal(found, expected_of(codes, scales))
    kind = gguf.GGMLQuantizationType.MXFP4
    read = gguf.quants.dequantize(blocks.reshape(6, -1), kind).reshape(codes.shape)
    np.testing.assert_array_equal(found, read)


def test_blocks_that_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="float64; they must be uint8"):
        mxfp4.pack(np.zeros((1, 1, 2, 16)))


@pytest.mark.parametrize("scales", [np.full(3, 129, np.uint8), np.ones(3, np.float32)])
def test_scales_that_cannot_be_used(scales: np.ndarray) -> None:
    with pytest.raises(ValueError, match="must be uint8 up to 128"):
        mxfp4.pack_scales(scales)

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
    return codes, rng.integers(3, 253, (2, 3, 6), np.uint8)


def expected_of(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return TABLE[codes] * np.repeat(powers, 32, axis=-1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("half", [0, 1])
def test_codes(half: int, dtype: str) -> None:
    """All values are exact, also the sign of zero, whatever the other half is."""
    codes = np.arange(256, dtype=np.uint8)
    found = np.asarray(mxfp4.values_of(jnp.asarray(codes), half, dtype).astype("float32"))
    expected = TABLE[codes >> 4 if half else codes & 15]
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def run_ptx(text: str, word: int) -> np.ndarray:
    """Run instructions on a word of 32 bits; return two words of two bfloat16 each."""
    named = {"$2": word}
    for line in text.strip("{} \n").split(";"):
        name, *places = line.replace(",", " ").split() or ["", ""]
        if name in ("", ".reg"):
            continue
        a, *others = (named[x] if x in named else int(x, 0) for x in places[1:])
        if name == "prmt.b32":
            octets = a.to_bytes(4, "little") + others[0].to_bytes(4, "little")
            picked = (octets[others[1] >> shift & 7] for shift in range(0, 16, 4))
            result = int.from_bytes(bytes(picked), "little")
        elif name == "fma.rn.bf16x2":
            lanes = np.array([a, *others], np.uint32).view(jnp.bfloat16).astype(np.float64)
            x, y, z = lanes.reshape(3, 2)
            result = (x * y + z).astype(jnp.bfloat16).view(np.uint32)[0]
        else:
            values = {"mov.b32": a, "and.b32": a & others[0] if others else 0}
            result = values[name] if name in values else a * others[0] & 0xFFFFFFFF
        named[places[0]] = int(result)
    return np.array([named["$0"], named["$1"]], np.uint32).view(jnp.bfloat16)


@pytest.mark.parametrize("half", [0, 1])
def test_own_instructions(half: int) -> None:
    for first in range(0, 256, 4):
        codes = np.arange(first, first + 4, dtype=np.uint8)
        found = run_ptx(mxfp4.PTX[half], int(codes.view(np.uint32)[0])).astype(np.float32)
        expected = TABLE[codes >> 4 if half else codes & 15]
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_scales() -> None:
    scales = np.arange(255, dtype=np.uint8)
    found = np.asarray(mxfp4.powers_of(jnp.asarray(scales)))
    expected = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    np.testing.assert_array_equal(found[1:], expected[1:])
    assert found[0] == 0


def test_blocks_of_pairs() -> None:
    codes, scales = stored()
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(2, 3, 6, 16)
    found = mxfp4.unpacked(jnp.asarray(mxfp4.pack(blocks)), jnp.asarray(scales))
    np.testing.assert_array_equal(found, expected_of(codes, scales))


def test_blocks_of_gguf() -> None:
    """The gguf library reads the same values."""
    codes, scales = stored(1)
    by_block = codes.reshape(2, 3, 6, 2, 16)
    halves = by_block[..., 0, :] | by_block[..., 1, :] << 4
    blocks = np.concatenate([scales[..., None], halves], axis=-1)
    found = mxfp4.unpacked(
        jnp.asarray(mxfp4.pack_ggml(blocks)), jnp.asarray(mxfp4.ggml_scales(blocks))
    )
    np.testing.assert_array_equal(found, expected_of(codes, scales))
    kind = gguf.GGMLQuantizationType.MXFP4
    read = gguf.quants.dequantize(blocks.reshape(6, -1), kind).reshape(codes.shape)
    np.testing.assert_array_equal(found, read)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [(np.zeros((1, 3, 16), np.uint8), "uint8, 3 per row"), (np.zeros((1, 2, 16)), "float64, 2")],
)
def test_blocks_that_cannot_be_packed(blocks: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mxfp4.pack(blocks)


@pytest.mark.parametrize("scales", [np.full(3, 255, np.uint8), np.ones(3, np.float32)])
def test_scales_that_are_no_powers(scales: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"must be uint8, and not 255 \(NaN\)"):
        mxfp4.scales_of(scales)

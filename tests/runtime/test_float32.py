"""float32 means IEEE float32: no product is rounded to TF32, which has 11 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.models.layers import Embedding
from specjax.models.weights import dot

# errors of a product of 1,024 terms: 2e-7 to 5e-7 in float32, 2.5e-4 in TF32
TOLERANCE = 2e-6
SIZE, OUT = 1024, 768
RNG = np.random.default_rng(3)
KERNEL = RNG.normal(size=(SIZE, OUT)).astype(np.float32)
# on a GPU these sizes use different kernels: matrix-vector, split, and full tiles
DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def error(ours: jax.Array, exact: np.ndarray) -> float:
    return float(np.abs(np.asarray(ours, np.float64) - exact).max() / np.abs(exact).max())


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2, 8, 63, 64, 256])
def test_products_are_exact_to_float32(rows: int, device: str) -> None:
    assert jax.default_backend() == device
    x = RNG.normal(size=(rows, SIZE)).astype(np.float32)
    exact = x.astype(np.float64) @ KERNEL.astype(np.float64)
    assert error(jax.jit(dot)(jnp.asarray(x), jnp.asarray(KERNEL)), exact) < TOLERANCE
    embed = Embedding(OUT, SIZE, "table", dtype=jnp.dtype("float32"))
    embed.table = nnx.Param(jnp.asarray(KERNEL.T))
    table = KERNEL.T.astype(np.float64)
    assert error(jax.jit(embed.attend)(jnp.asarray(x)), x.astype(np.float64) @ table.T) < TOLERANCE


@pytest.mark.gpu
def test_the_bound_tells_tf32_apart() -> None:
    x = RNG.normal(size=(256, SIZE)).astype(np.float32)
    rounded = jax.jit(jnp.matmul)(jnp.asarray(x), jnp.asarray(KERNEL))
    assert error(rounded, x.astype(np.float64) @ KERNEL.astype(np.float64)) > 10 * TOLERANCE

"""Residual addition and norm, compared with numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.add_norm import add_norm

from .runs import RUNS, run_jitted

# XLA may keep the sum unrounded: three roundings to bfloat16, each by at most 2**-8 of the value
BOUNDS = {"float32": 2e-6, "bfloat16": 3.1 * 2**-8}


def brute_force(x, delta, scale, eps):
    """The sum, rounded to the dtype, and its norm in float64."""
    total = (x + delta).astype(x.dtype)
    wide = total.astype(np.float64)
    mean = (wide**2).mean(axis=-1, keepdims=True)
    return total, wide / np.sqrt(mean + eps) * scale.astype(np.float64)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("shape", "dtype", "eps"),
    [
        ((3, 5, 64), "float32", 1e-5),
        ((2, 1, 576), "bfloat16", 1e-5),
        ((7, 96), "bfloat16", 10.0),
        ((1, 4096), "float32", 10.0),
    ],
    ids=str,
)
def test_equals_brute_force(shape, dtype, eps, run):
    rng = np.random.default_rng(0)
    x, delta = (np.asarray(jnp.asarray(rng.standard_normal(shape) * 3, dtype)) for _ in range(2))
    scale = np.asarray(jnp.asarray(1 + rng.standard_normal(shape[-1]), dtype))
    total, normed = run_jitted(add_norm, {"eps": eps, **run}, x, delta, scale)
    expected_total, expected = brute_force(x, delta, scale, eps)
    assert total.dtype == normed.dtype == x.dtype
    np.testing.assert_array_equal(total, expected_total)
    error = np.abs(normed.astype(np.float64) - expected)
    assert (error <= BOUNDS[dtype] * np.abs(expected) + 1e-6).all()


@pytest.mark.parametrize("run", RUNS)
def test_a_float32_scale_is_not_rounded(run):
    """A scale 1 + w of bfloat16 values keeps w."""
    x = np.asarray(jnp.asarray(np.random.default_rng(0).standard_normal((2, 96)) * 3, jnp.bfloat16))
    w = np.float32(np.linspace(1e-3, 0.03, 96))
    _, normed = run_jitted(add_norm, {"eps": 1e-6, **run}, x, np.zeros_like(x), 1 + w)
    wide = x.astype(np.float32)
    _, plain = run_jitted(add_norm, {"eps": 1e-6, **run}, wide, np.zeros_like(wide), 1 + w)
    assert normed.dtype == x.dtype
    np.testing.assert_array_equal(normed, plain.astype(x.dtype))


@pytest.mark.parametrize("run", RUNS)
def test_an_offset_is_added_in_float32(run):
    """As if the scale had been float32 values 1 + w."""
    x, w = np.random.default_rng(0).standard_normal((2, 2, 96)) * [[[3.0]], [[0.01]]]
    x, w = (np.asarray(jnp.asarray(y, jnp.bfloat16)) for y in (x, w[0]))
    options = {"eps": 1e-6, **run}
    got = run_jitted(add_norm, {"offset": 1.0, **options}, x, np.zeros_like(x), w)
    expected = run_jitted(add_norm, options, x, np.zeros_like(x), 1 + w.astype(np.float32))
    np.testing.assert_array_equal(got[1], expected[1])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("size", [96, 4096])
def test_partial_sums(size, run):
    rng = np.random.default_rng(2)
    x = np.asarray(jnp.asarray(rng.standard_normal((2, 3, size)), jnp.bfloat16))
    parts = rng.standard_normal((8, 2, 3, size)).astype(np.float32)
    scale = np.ones(size, x.dtype)
    total, normed = run_jitted(add_norm, {"eps": 1e-5, **run}, x, parts, scale)
    wide = parts.astype(np.float64).sum(axis=0) + x.astype(np.float64)
    np.testing.assert_allclose(total.astype(np.float64), wide, rtol=2**-7, atol=2**-6)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(normed.astype(np.float64), expected, rtol=2**-6, atol=2**-7)


def test_rows_do_not_depend_on_their_number():
    """A verify of many rows gives bitwise the same as each row alone."""
    rng = np.random.default_rng(1)
    x, delta = (rng.standard_normal((6, 96)).astype(np.float32) for _ in range(2))
    scale = np.ones(96, np.float32)
    options = {"eps": 1e-5, "implementation": "interpret"}
    whole = run_jitted(add_norm, options, x, delta, scale)[1]
    for i in range(6):
        one = run_jitted(add_norm, options, x[i : i + 1], delta[i : i + 1], scale)[1]
        np.testing.assert_array_equal(one[0], whole[i])

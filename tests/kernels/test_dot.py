"""Deterministic matrix products: values, and on a GPU the bits of their rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.dot import invariant_dot, num_parts, plain_dot

from ..support.lowering import lower_for_cuda
from .runs import RUNS, run_jitted

# rows, inputs, outputs, and whether the matrix is transposed
CASES = [
    (1, 128, 96, False),
    (5, 256, 80, True),
    (37, 192, 64, False),
    (3, 80, 48, False),
    (300, 128, 200, False),
    (16, 1024, 61, True),
]
# inputs and outputs of the products of SmolLM2-135M, Llama-3.1-8B and Qwen3-8B
SIZES = [
    *((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)),
    *((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)),
    *((4096, 24576), (12288, 4096), (4096, 151936)),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_partial_sums_equal_those_of_integers(case, run):
    rows, in_size, out_size, is_transposed = case
    rng = np.random.default_rng(0)
    shape = (out_size, in_size) if is_transposed else (in_size, out_size)
    x, kernel = (rng.integers(-4, 5, s).astype(jnp.bfloat16) for s in ((rows, in_size), shape))
    parts = num_parts(in_size, out_size)
    left, right = x.astype(np.float32), kernel.astype(np.float32)
    left = left.reshape(rows, parts, -1)
    right = (right.T if is_transposed else right).reshape(parts, -1, out_size)
    sums = run_jitted(partial(invariant_dot, is_transposed=is_transposed), run, x, kernel)
    np.testing.assert_array_equal(sums, np.einsum("rpi,pio->pro", left, right))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_several_axes_by_invariant_kernels(is_transposed):
    rng, how = np.random.default_rng(0), "invariant-interpret"
    x, kernel = (rng.integers(-4, 5, s).astype(np.float32) for s in ((2, 3, 128), (128, 48)))
    stored = kernel.T if is_transposed else kernel
    call = partial(plain_dot, is_transposed=is_transposed, implementation=how)
    out = jax.jit(call, static_argnums=2)(x, stored, jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    assert num_parts(*kernel.shape) > 1
    np.testing.assert_array_equal(out, (x @ kernel).astype(jnp.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bits_do_not_depend_on_the_number_of_rows_or_the_place(size):
    in_size, out_size = size
    is_transposed = size == (576, 49152)
    shape = (out_size, in_size) if is_transposed else size
    most = 8192 if out_size < 100000 else 512
    kernel = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (most, in_size), jnp.bfloat16)
    dot = jax.jit(partial(invariant_dot, is_transposed=is_transposed, implementation="pallas"))
    expected = dot(x, kernel)
    for rows in (1, 2, 7, 16, 17, 32, 48, 64, 100, 128, 200, 256, 512, 1000, 2048, 4096):
        if rows < most:
            first = most - rows - rows % 5
            sums = dot(x[first : first + rows], kernel)
            assert bool((sums == expected[:, first : first + rows]).all()), rows
    # every place in a tile
    rolled = dot(jnp.roll(x[:256], 77, axis=0), kernel)
    assert bool((rolled == jnp.roll(expected[:, :256], 77, axis=1)).all())
    reference = jnp.sum(
        invariant_dot(x[:64], kernel, is_transposed=is_transposed, implementation="xla"), 0
    )
    assert float(jnp.abs(expected[:, :64].sum(0) - reference).max()) < 2e-2


def test_kernel_lowers_for_cuda():
    for rows in (1, 64, 300):
        for in_size, out_size in SIZES[:2]:
            inputs = [
                jax.ShapeDtypeStruct(s, jnp.bfloat16)
                for s in ((rows, in_size), (in_size, out_size))
            ]
            text = lower_for_cuda(partial(invariant_dot, implementation="pallas"), *inputs)
            assert "specjax_invariant_dot" in text


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must be a multiple of 16"):
        invariant_dot(jnp.zeros((2, 40)), jnp.zeros((40, 8)))
    with pytest.raises(ValueError, match="does not fit"):
        invariant_dot(jnp.zeros((2, 64)), jnp.zeros((128, 8)))

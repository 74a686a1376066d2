"""Draws of every implementation, compared with the noise of jax.random."""

import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.draw_tokens import draw_tokens, position_noise

from .runs import RUNS, run_jitted


def case(rows, size):
    rng = np.random.default_rng(size)
    logits = (3 * rng.normal(size=(rows, size))).astype(np.float32)
    logits[1, :3] = -np.inf
    temperatures = rng.choice([0.0, 0.3, 1.0, 4.0], size=rows).astype(np.float32)
    temperatures[:2] = 0.0, 1.0
    thresholds = np.where(rng.random(rows) < 0.5, -np.inf, 0.5).astype(np.float32)
    seeds = rng.integers(0, 2**32, size=(rows, 2), dtype=np.uint32)
    return logits, temperatures, thresholds, seeds, rng.integers(0, 9999, rows).astype(np.int32)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("rows", "size", "num_tokens"), [(40, 61, None), (8, 9000, None), (8, 61, 200)]
)
def test_equals_numpy(run, rows, size, num_tokens):
    """Columns are tokens, or stand for a subset of tokens and use their noise."""
    logits, temperatures, thresholds, seeds, positions = arguments = case(rows, size)
    ids = np.arange(size)
    if num_tokens is not None:
        ids = np.random.default_rng(1).choice(num_tokens, size, replace=False)
        arguments = (*arguments, ids.astype(np.int32))
    found = run_jitted(draw_tokens, run, *arguments)
    keys = jnp.asarray(seeds), jnp.asarray(positions)
    noise = np.asarray(position_noise(*keys, num_tokens or size), np.float64)[:, ids]
    for row, temperature, limit, own, token in zip(
        logits, temperatures, thresholds, noise, found, strict=True
    ):
        if temperature == 0:
            assert token == np.argmax(row)
            continue
        noisy = np.where(row >= limit, row / temperature + own, -np.inf)
        # logarithms of the two libraries may differ in the last bit
        assert noisy[token] >= noisy.max() - 1e-5


@pytest.mark.parametrize("run", RUNS)
def test_the_lowest_of_equal_tokens_is_the_best(run):
    logits = np.zeros((2, 9000), np.float32)
    logits[0, [7, 5000]] = logits[1, [4500, 8999]] = 2.0
    zeros = np.zeros(2, np.float32)
    arguments = zeros, -np.inf + zeros, np.zeros((2, 2), np.uint32), np.zeros(2, np.int32)
    assert run_jitted(draw_tokens, run, logits, *arguments).tolist() == [7, 4500]


@pytest.mark.parametrize("run", RUNS)
def test_nan_gives_a_token_of_the_vocabulary(run):
    logits = np.full((2, 70), np.nan, np.float32)
    arguments = np.array([0, 1], np.float32), np.full(2, -np.inf, np.float32)
    found = run_jitted(
        draw_tokens, run, logits, *arguments, np.zeros((2, 2), np.uint32), np.zeros(2, np.int32)
    )
    assert ((found >= 0) & (found < 70)).all()

"""Reported log-probabilities: of the raw logits, or of the sampling distribution."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from specjax.sampling.draw import SamplingConfig, target_tokens
from specjax.sampling.logit_processor import LogitInputs
from specjax.sampling.params import SamplingParams
from specjax.speculative.tree import chain_input

from ..support.sampling_tables import sampling_rows


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_processed_ones_are_those_of_the_distribution_that_is_drawn_from(temperature):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(1, 2, 19)).astype(np.float32)
    bias = {7: 30.0, 3: 29.5, 5: 29.9}
    params = SamplingParams(temperature=temperature, top_k=2, logit_bias=bias)
    tree = chain_input(jnp.ones((1, 2), jnp.int32), jnp.array([3], jnp.int32))
    table = sampling_rows([params], 19, top_logprobs=3)
    history, slots = jnp.ones((4, 9), jnp.int32), jnp.array([2], jnp.int32)
    config = SamplingConfig(max_top_logprobs=3, processed=True)
    tokens, logprobs = target_tokens(
        jnp.asarray(logits), tree, LogitInputs(table, history, slots), config
    )
    shifted = logits.astype(np.float64)
    for token, value in bias.items():
        shifted[..., token] += value
    if temperature:
        shifted /= temperature
        second = np.sort(shifted, axis=-1)[..., -2:-1]
        shifted = np.where(shifted >= second - 1e-6, shifted, -np.inf)
    truth = log_softmax(shifted, axis=-1)
    chosen = np.take_along_axis(truth, np.asarray(tokens)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(logprobs.chosen, chosen, atol=1e-4)
    best = np.argsort(-truth, axis=-1, kind="stable")[..., :2]
    np.testing.assert_array_equal(np.asarray(logprobs.top_ids)[..., :2], best)
    assert np.isneginf(np.asarray(logprobs.top_values)[..., 2]).all() == bool(temperature)

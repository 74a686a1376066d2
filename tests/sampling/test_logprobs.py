"""Log-probabilities of chosen and best tokens against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from specjax.sampling.draw import target_tokens
from specjax.sampling.logprobs import token_logprobs
from specjax.sampling.params import SamplingParams
from specjax.speculative.tree import chain_input

from ..speculative.tables import sampling_rows

jit_logprobs = jax.jit(token_logprobs, static_argnums=3)


@pytest.mark.parametrize("num_top", [1, 5, 17])
@pytest.mark.parametrize("asked", [(0, 0), (0, 2), (-1, 1)])
def test_values_and_best_tokens(num_top, asked):
    rng = np.random.default_rng(num_top)
    logits = (5 * rng.normal(size=(2, 3, 17)) + 100).astype(np.float32)
    logits[0, 0, 4:6] = 130.0  # equal: the lower id comes first
    tokens = rng.integers(0, 17, size=(2, 3)).astype(np.int32)
    found = jit_logprobs(logits, tokens, jnp.array(asked, jnp.int32), num_top)
    truth = log_softmax(logits.astype(np.float64), axis=-1)
    chosen = np.take_along_axis(truth, tokens[:, :, None], axis=-1)[:, :, 0]
    np.testing.assert_allclose(found.chosen, chosen, atol=1e-4)
    if max(asked) <= 0:
        assert not np.any(found.top_ids)
        assert not np.any(found.top_values)
        return
    best = np.argsort(-logits, axis=-1, kind="stable")[:, :, :num_top]
    np.testing.assert_array_equal(found.top_ids, best)
    np.testing.assert_allclose(
        found.top_values, np.take_along_axis(truth, best, axis=-1), atol=1e-4
    )


def test_they_are_those_of_the_raw_logits():
    """Penalties, bias, temperature and filters choose the token, but do not change its value."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(2, 2, 19)), jnp.float32)
    params = SamplingParams(temperature=0.3, top_k=4, logit_bias={7: 30.0}, repetition_penalty=1.5)
    tree = chain_input(jnp.ones((2, 2), jnp.int32), jnp.array([3, 5], jnp.int32))
    table = sampling_rows([params, params], 19, top_logprobs=2)
    history, slots = jnp.ones((4, 9), jnp.int32), jnp.array([2, 3], jnp.int32)
    tokens, logprobs = target_tokens(logits, tree, table, history, slots, num_top=3)
    assert np.all(np.asarray(tokens) == 7)
    truth = log_softmax(np.asarray(logits, np.float64), axis=-1)
    np.testing.assert_allclose(logprobs.chosen, truth[:, :, 7], atol=1e-5)
    np.testing.assert_array_equal(logprobs.top_ids, np.argsort(-truth, axis=-1)[:, :, :3])

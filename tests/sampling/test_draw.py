"""Sampling: noise depends only on seed and position; greedy rows; extreme logits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.draw_tokens import draw_tokens
from specjax.kernels.filter_logits import logit_thresholds

from specjax.sampling.draw import SamplingConfig, target_tokens
from specjax.sampling.logit_processor import LogitInputs
from specjax.sampling.params import SamplingParams
from specjax.speculative.tree import chain_input

from ..support.sampling_tables import sampling_rows


@jax.jit
def jit_sample(logits, positions, table):
    """Tokens i32 ``[B, T]`` drawn for absolute positions i32 ``[B, T]``, one row at a time."""
    batch, rows, vocab_size = logits.shape

    def per_row(values):
        return jnp.repeat(values, rows, axis=0)

    flat, temperatures = logits.reshape(-1, vocab_size), per_row(table.temperatures)
    limits = (per_row(limit) for limit in (table.top_ks, table.top_ps, table.min_ps))
    thresholds = logit_thresholds(flat, temperatures, *limits)
    seeds = per_row(table.seeds)
    tokens = draw_tokens(flat, temperatures, thresholds, seeds, positions.reshape(-1))
    return tokens.reshape(batch, rows)


SEEDED = SamplingParams()
GREEDY = SamplingParams(temperature=0.0)


def test_noise_depends_on_seed_and_position_only():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(3, 4, 50)), jnp.float32)
    positions = jnp.asarray(rng.integers(0, 99, size=(3, 4)), jnp.int32)
    rows = [SEEDED, replace(SEEDED, top_k=50), replace(SEEDED, top_p=0.999)]
    table = sampling_rows(rows, 50)
    together = np.asarray(jit_sample(logits, positions, table))
    for b in range(3):
        for t in range(4):
            alone = jit_sample(
                logits[b : b + 1, t : t + 1],
                positions[b : b + 1, t : t + 1],
                sampling_rows(rows[b : b + 1], 50, seed=b),
            )
            assert int(alone[0, 0]) == together[b, t]
    for other in (
        jit_sample(logits, positions + 1, table),
        jit_sample(logits, positions, replace(table, seeds=table.seeds + jnp.uint32(1))),
        jit_sample(logits, positions, replace(table, seeds=table.seeds[:, ::-1] + jnp.uint32(7))),
    ):
        assert np.any(np.asarray(other) != together)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.01, 1e-6, 1e30])
def test_extreme_logits_are_drawn_equally_alone_and_with_filtered_rows(temperature):
    """They overflow; a NaN in the filters, which other rows enable, would change the tokens."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(6, 2, 40)).astype(np.float32)
    logits[0] *= 1e38
    logits[1, :, :7] = 3e38
    logits[2, :, ::2] = -3e38
    logits[3, :, 9:12] = np.inf
    logits[4] = -3.4e38
    logits[:5, :, :5] = -np.inf  # forbidden
    params = SamplingParams(temperature=temperature)
    logits, positions = jnp.asarray(logits), jnp.full((6, 2), 8, jnp.int32)
    alone = np.asarray(jit_sample(logits, positions, sampling_rows([params] * 6, 40)))
    filtered = replace(params, top_p=0.9, top_k=11, min_p=0.01)
    beside = jit_sample(logits, positions, sampling_rows([params] * 5 + [filtered], 40))
    np.testing.assert_array_equal(alone[:5], np.asarray(beside)[:5])
    assert (alone[:5] >= 5).all()
    assert np.isin(alone[3], [9, 10, 11]).all()
    rows = jit_sample(logits, positions, sampling_rows([filtered] * 6, 40))
    assert (np.asarray(rows)[:5] >= 5).all()


def test_greedy_rows_stay_greedy_next_to_sampled_ones():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(64, 1, 30)), jnp.float32)
    hot = SamplingParams(temperature=5.0)
    drawn = jit_sample(logits, jnp.zeros((64, 1), jnp.int32), sampling_rows([GREEDY, hot] * 32, 30))
    best = np.argmax(np.asarray(logits), axis=-1)
    assert np.array_equal(np.asarray(drawn)[::2], best[::2])
    assert np.any(np.asarray(drawn)[1::2] != best[1::2])


def test_filters_of_greedy_rows_are_off():
    """They would have no effect, and cost a pass over the logits for the whole batch."""
    table = sampling_rows([SamplingParams(temperature=0.7, top_k=1, top_p=0.5, min_p=0.1)], 30)
    assert float(table.temperatures[0]) == 0
    assert (int(table.top_ks[0]), float(table.top_ps[0]), float(table.min_ps[0])) == (30, 1, 0)


@pytest.mark.slow
def test_the_greedy_form_takes_the_best_token_and_nothing_else():
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(3, 2, 30)), jnp.float32)
    tree = chain_input(jnp.ones((3, 2), jnp.int32), jnp.array([4, 0, 9], jnp.int32))
    slots, history = jnp.arange(3, dtype=jnp.int32), jnp.zeros((3, 16), jnp.int32)
    for greedy in (False, True):
        tokens, logprobs = target_tokens(
            logits,
            tree,
            LogitInputs(sampling_rows([GREEDY] * 3, 30), history, slots),
            SamplingConfig(max_top_logprobs=4, greedy=greedy),
        )
        assert np.array_equal(tokens, np.argmax(np.asarray(logits), axis=-1))
        assert (logprobs is None) == greedy

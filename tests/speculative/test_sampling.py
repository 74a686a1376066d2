"""Sampling: filters against a sort in numpy, frequencies against the softmax, keyed noise."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from specjax.speculative.sampling import filter_logits, sample
from specjax.types import SamplingTable

jit_filter, jit_sample = jax.jit(filter_logits), jax.jit(sample)


def table(n, temperature=1.0, top_k=10**6, top_p=1.0, seeds=None):
    seeds = np.arange(n) if seeds is None else np.asarray(seeds)
    return SamplingTable(
        temperatures=jnp.full(n, temperature, jnp.float32),
        top_ks=jnp.full(n, top_k, jnp.int32),
        top_ps=jnp.full(n, top_p, jnp.float32),
        seeds=jnp.asarray(np.stack([np.zeros(n), seeds], axis=1), jnp.uint32),
        end_token_ids=jnp.full((n, 1), -1, jnp.int32),
    )


def kept_by_sorting(logits, top_k, top_p):
    """Tokens that survive top-k, then top-p on what is left."""
    order = np.argsort(-logits, kind="stable")[: min(top_k, len(logits))]
    probs = np.exp(logits[order] - logits.max())
    probs /= probs.sum()
    kept, total = set(), 0.0
    for token, p in zip(order, probs, strict=True):
        if kept and total >= top_p:
            break
        kept.add(int(token))
        total += p
    return kept


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 25), st.floats(0.05, 1.0))
def test_filters_equal_sorting(seed, top_k, top_p):
    logits = np.random.default_rng(seed).normal(size=20).astype(np.float32) * 3
    kept = jit_filter(
        jnp.asarray(logits)[None], jnp.array([top_k]), jnp.array([top_p], jnp.float32)
    )
    assert set(np.flatnonzero(np.isfinite(np.asarray(kept)[0])).tolist()) == kept_by_sorting(
        logits, top_k, top_p
    )


def test_filters_are_per_row():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    kept = filter_logits(logits, jnp.array([1, 8, 3]), jnp.array([1.0, 1.0, 1e-6], jnp.float32))
    assert np.isfinite(np.asarray(kept)).sum(axis=1).tolist() == [1, 8, 1]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 100, 1.0), (0.5, 100, 1.0), (1.5, 4, 1.0), (1.0, 100, 0.7), (0.8, 5, 0.8)],
)
def test_frequencies_match_the_softmax(temperature, top_k, top_p):
    n = 20_000
    logits = np.random.default_rng(3).normal(size=9).astype(np.float32)
    drawn = sample(
        jnp.broadcast_to(jnp.asarray(logits), (n, 1, 9)),
        jnp.full((n, 1), 17, jnp.int32),
        table(n, temperature, top_k, top_p),
    )
    kept = sorted(kept_by_sorting(logits / temperature, top_k, top_p))
    probs = np.exp(logits[kept].astype(np.float64) / temperature)
    counts = np.bincount(np.asarray(drawn)[:, 0], minlength=9)
    assert counts.sum() == counts[kept].sum()
    assert chisquare(counts[kept], n * probs / probs.sum()).pvalue > 1e-4


def test_noise_depends_on_seed_and_position_only():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(3, 4, 50)), jnp.float32)
    positions = jnp.asarray(rng.integers(0, 99, size=(3, 4)), jnp.int32)
    together = np.asarray(sample(logits, positions, table(3, seeds=[4, 5, 6])))
    for b in range(3):
        for t in range(4):
            alone = jit_sample(
                logits[b : b + 1, t : t + 1],
                positions[b : b + 1, t : t + 1],
                table(1, seeds=[4 + b]),
            )
            assert int(alone[0, 0]) == together[b, t]
    other = sample(logits, positions + 1, table(3, seeds=[4, 5, 6]))
    assert np.any(np.asarray(other) != together)


def test_greedy_rows_stay_greedy_beside_sampled_ones():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(64, 1, 30)), jnp.float32)
    mixed = table(64, temperature=5.0)
    cold = jnp.where(jnp.arange(64) % 2 == 0, 0.0, 5.0)
    drawn = sample(
        logits,
        jnp.zeros((64, 1), jnp.int32),
        replace(mixed, temperatures=cold),
    )
    best = np.argmax(np.asarray(logits), axis=-1)
    assert np.array_equal(np.asarray(drawn)[::2], best[::2])
    assert np.any(np.asarray(drawn)[1::2] != best[1::2])

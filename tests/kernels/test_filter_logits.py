"""Filters without a sort keep exactly the tokens that sorting keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from specjax.kernels.filter_logits import kept_logits, logit_thresholds

from specjax.testing import kept_by_sorting

from .runs import RUNS, run_jitted

INF = np.inf


def kept_rows(logits, top_ks, top_ps, min_ps, run, temperature=1.0):
    """Tokens of each row that the tested function keeps."""
    logits = np.asarray(logits, np.float32)
    limits = np.asarray(top_ks, np.int32), *(np.asarray(x, np.float32) for x in (top_ps, min_ps))
    temperatures = np.full(len(logits), temperature, np.float32)
    thresholds = run_jitted(logit_thresholds, run, logits, temperatures, *limits)
    return [
        set(np.flatnonzero((row >= limit) & (row > -INF)).tolist())
        for row, limit in zip(logits, thresholds, strict=True)
    ]


def kept(logits, top_k, top_p, min_p, run):
    """Kept tokens of one row."""
    return kept_rows([logits], [top_k], [top_p], [min_p], run)[0]


# few distinct values give ties; the wide ones cover many exponents and both signs, without
# subnormal floats, which count as zero
TIED = st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 2.0, -INF])
WIDE = st.floats(-80, 80, width=32, allow_subnormal=False)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.lists(TIED, min_size=12, max_size=12),
        st.lists(WIDE, min_size=12, max_size=12),
        st.lists(st.one_of(TIED, WIDE), min_size=12, max_size=12),
    ),
    st.integers(1, 15),
    st.one_of(st.just(1.0), st.floats(2**-20, 1, exclude_max=True, width=32)),
    st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
)
def test_filters_equal_sorting(run, logits, top_k, top_p, min_p):
    assume(max(logits) > -INF)
    expected, gap = kept_by_sorting(logits, top_k, top_p, min_p)
    assume(gap > 1e-5)
    assert kept(logits, top_k, top_p, min_p, run) == expected


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("logits", "top_k", "top_p", "min_p", "expected"),
    [
        ([1, 3, 2, 3, 0], 1, 1.0, 0.0, {1, 3}),  # ties with the last kept token are kept
        ([1, 3, 2, 3, 0], 3, 1.0, 0.0, {1, 2, 3}),
        ([0, 0, 0, 0], 4, 0.25, 0.0, {0, 1, 2, 3}),  # the smallest set, and all ties with it
        ([0, 0, -INF, -INF], 4, 0.5, 0.0, {0, 1}),
        ([5, 0, 0, 0], 2, 0.5, 0.0, {0}),
        ([-INF, -INF, 2, -INF], 3, 0.9, 0.0, {2}),
        ([4, -INF, 2, -INF], 9, 1.0, 0.0, {0, 2}),
        ([-200, -100, -300], 3, 1e-6, 0.0, {1}),  # always at least one token
        ([-200, -100, -300], 3, 1e-45, 1.0, {1}),
        ([1, 0, -1], 3, 1.0, 1.0, {0}),
        ([0, np.log(0.5), np.log(0.25)], 3, 1.0, 0.49, {0, 1}),
        ([7], 1, 0.1, 0.3, {0}),  # a vocabulary of one token
        ([7], 5, 1.0, 0.0, {0}),
        ([0, 90], 2, 1.0, 0.0, {0, 1}),  # unlikely tokens are not dropped
        # top-p is relative to what top-k keeps: 0.6 of [4, 3, 2] / 9, not of [4, 3, 2, 1] / 10
        (np.log([4, 3, 2, 1]), 3, 0.75, 0.0, {0, 1}),
        (np.log([4, 3, 2, 1]), 4, 0.75, 0.0, {0, 1, 2}),
        # min-p is relative to the best token, whatever top-p keeps
        (np.log([4, 3, 2, 1]), 4, 0.6, 0.4, {0, 1}),
        (np.log([4, 3, 2, 1]), 4, 1.0, 0.4, {0, 1, 2}),
    ],
)
def test_cases(run, logits, top_k, top_p, min_p, expected):
    assert kept(logits, top_k, top_p, min_p, run) == expected


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("temperature", "size"), [(0.5, 40), (0.7, 20000), (0.7, 40), (1.3, 40)])
def test_rows_are_filtered_on_their_own(run, size, temperature):
    """Also with several blocks of the vocabulary and a temperature."""
    logits = np.random.default_rng(0).normal(size=(6, size)).astype(np.float32)
    top_ks = [1, size, 3, size, 7, size + 9]
    top_ps, min_ps = [1.0, 1.0, 1e-6, 0.5, 0.8, 1.0], [0.0, 0.0, 0.0, 0.0, 0.5, 0.1]
    found = kept_rows(logits, top_ks, top_ps, min_ps, run, temperature)
    for row, *limits, rows in zip(logits, top_ks, top_ps, min_ps, found, strict=True):
        assert rows == kept_by_sorting(row / np.float64(temperature), *limits)[0]
    assert len(found[1]) == size


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("temperature", [0.7, 1.1, 1e-30, 1e30])
def test_the_best_token_is_kept_at_any_temperature(run, temperature):
    """However division rounds, if only the best token is kept."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(50, 70)).astype(np.float32)
    logits[:, 17] = 30 * temperature + rng.random(50)
    limits = [1] * 25 + [70] * 25, [1.0] * 25 + [0.9] * 25, [0.0] * 25 + [1.0] * 25
    found = kept_rows(logits, *limits, run, temperature)
    assert all(np.argmax(row) in rows for row, rows in zip(logits, found, strict=True))
    temperatures = np.full(50, temperature, np.float32)
    thresholds = np.max(logits, axis=1)
    kept = jax.jit(kept_logits)(logits, temperatures[:, None], thresholds[:, None])
    assert np.isfinite(kept).any(axis=1).all()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("lowest", "spread"), [(-10, 2.5), (-1e9, 0.0), (-INF, 0.0), (0.0, 0.0), (1e37, 1e37)]
)
def test_logits_of_any_scale(run, lowest, spread):
    """Twenty likely logits, and others that are far lower, forbidden, equal or of another sign."""
    rng = np.random.default_rng(4)
    logits = np.float32(lowest) + np.float32(spread) * rng.normal(size=(3, 500)).astype(np.float32)
    logits[:, ::25] = rng.permutation(np.linspace(-3, 3, 20)).astype(np.float32)
    top_ks, top_ps = [7, 500, 50], [1.0, 0.8, 0.9]
    found = kept_rows(logits, top_ks, top_ps, [0.0] * 3, run)
    for row, *limits, rows in zip(logits, top_ks, top_ps, found, strict=True):
        assert rows == kept_by_sorting(row.astype(np.float64), *limits)[0]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(1, 1.0, 0.0), (4, 0.9, 0.0), (4, 1.0, 0.5), (2, 0.9, 0.1)]
)
def test_an_infinite_logit_is_the_best(run, top_k, top_p, min_p):
    found = kept([0, 1, INF, 2], top_k, top_p, min_p, run)
    assert 2 in found
    assert len(found) <= top_k


@pytest.mark.parametrize("run", RUNS)
def test_greedy_rows_are_not_filtered(run):
    row = np.array([[1.0, 2.0]], np.float32)
    limits = np.array([1], np.int32), np.array([0.1], np.float32), np.array([1.0], np.float32)
    assert run_jitted(logit_thresholds, run, row, np.zeros(1, np.float32), *limits) == -INF


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFC00000])
def test_nan_counts_as_forbidden(run, bits):
    row = np.random.default_rng(0).normal(size=100).astype(np.float32)
    expected = kept_by_sorting(np.where(np.arange(100) % 7 == 3, -INF, row), 20, 0.8)[0]
    row.view(np.uint32)[3::7] = bits
    assert kept(row, 20, 0.8, 0.0, run) == expected
    # all tokens: any threshold is correct
    kept(np.full(100, row[3]), 20, 0.8, 0.1, run)


def test_nothing_is_sorted():
    """A sort of the vocabulary takes 50 ms for six rows of 49152 on a CPU; these 8 do not."""
    ones = jnp.ones(2)
    arguments = (jnp.zeros((2, 64)), ones, jnp.ones(2, jnp.int32), ones, jnp.zeros(2))
    text = jax.jit(logit_thresholds).lower(*arguments).as_text()
    assert "while" in text
    assert "sort" not in text
    assert "top_k" not in text

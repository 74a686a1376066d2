"""Filters without a sort keep exactly what sorting keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specjax.sampling.filters import filter_logits, top_k_threshold

from ..speculative.reference import kept_by_sorting

jit_filter = jax.jit(filter_logits)
INF = np.inf


def kept(logits, top_k, top_p=1.0, min_p=0.0):
    """Tokens that the function under test keeps of one row."""
    out = jit_filter(
        jnp.asarray(logits, jnp.float32)[None],
        jnp.array([top_k], jnp.int32),
        jnp.array([top_p], jnp.float32),
        jnp.array([min_p], jnp.float32),
    )
    out = np.asarray(out)[0]
    finite = np.isfinite(out)
    np.testing.assert_array_equal(out[finite], np.asarray(logits, np.float32)[finite])
    return set(np.flatnonzero(finite).tolist())


# few distinct values make ties; the wide ones are spread over many exponents and both signs, but
# for subnormal floats, which count as zero
TIED = st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 2.0, -INF])
WIDE = st.floats(-80, 80, width=32, allow_subnormal=False)


@settings(max_examples=300, deadline=None)
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
def test_filters_equal_sorting(logits, top_k, top_p, min_p):
    assume(max(logits) > -INF)
    expected, gap = kept_by_sorting(logits, top_k, top_p, min_p)
    assume(gap > 1e-5)
    assert kept(logits, top_k, top_p, min_p) == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 1100), st.floats(2**-7, 1.0, width=32))
def test_filters_equal_sorting_on_larger_vocabularies(seed, top_k, top_p):
    logits = np.random.default_rng(seed).normal(size=1000).astype(np.float32) * 4
    expected, gap = kept_by_sorting(logits, top_k, top_p)
    assume(gap > 1e-6)
    assert kept(logits, top_k, top_p) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, max_value=2.0**127), min_size=8, max_size=8))
def test_the_kth_largest_of_any_floats(logits):
    """The threshold is a logit, bit for bit; subnormal floats count as zero."""
    row = np.array(logits, np.float32)
    row[np.abs(row) < np.finfo(np.float32).tiny] = 0.0
    rows = jnp.asarray(np.tile(row, (8, 1)))
    found = jax.jit(top_k_threshold)(rows, jnp.arange(1, 9, dtype=jnp.int32))
    np.testing.assert_array_equal(np.asarray(found) + 0.0, np.sort(row)[::-1] + 0.0)


@pytest.mark.parametrize(
    ("logits", "top_k", "top_p", "min_p", "expected"),
    [
        ([1, 3, 2, 3, 0], 1, 1.0, 0.0, {1, 3}),  # ties with the last kept one stay
        ([1, 3, 2, 3, 0], 3, 1.0, 0.0, {1, 2, 3}),
        ([0, 0, 0, 0], 4, 0.25, 0.0, {0, 1, 2, 3}),  # the smallest set and all that tie with it
        ([0, 0, -INF, -INF], 4, 0.5, 0.0, {0, 1}),
        ([5, 0, 0, 0], 2, 0.5, 0.0, {0}),
        ([-INF, -INF, 2, -INF], 3, 0.9, 0.0, {2}),
        ([4, -INF, 2, -INF], 9, 1.0, 0.0, {0, 2}),
        ([-200, -100, -300], 3, 1e-6, 0.0, {1}),  # never less than one token
        ([-200, -100, -300], 3, 1e-45, 1.0, {1}),
        ([1, 0, -1], 3, 1.0, 1.0, {0}),
        ([0, np.log(0.5), np.log(0.25)], 3, 1.0, 0.49, {0, 1}),
        ([7], 1, 0.1, 0.3, {0}),  # a vocabulary of one
        ([7], 5, 1.0, 0.0, {0}),
        ([0, 90], 2, 1.0, 0.0, {0, 1}),  # nothing is dropped for being unlikely
        # top-p is a share of what top-k left: 0.6 of [4, 3, 2] / 9, not of [4, 3, 2, 1] / 10
        (np.log([4, 3, 2, 1]), 3, 0.75, 0.0, {0, 1}),
        (np.log([4, 3, 2, 1]), 4, 0.75, 0.0, {0, 1, 2}),
        # min-p is a share of the best token, whatever top-p left
        (np.log([4, 3, 2, 1]), 4, 0.6, 0.4, {0, 1}),
        (np.log([4, 3, 2, 1]), 4, 1.0, 0.4, {0, 1, 2}),
    ],
)
def test_cases(logits, top_k, top_p, min_p, expected):
    assert kept(logits, top_k, top_p, min_p) == expected


def test_rows_are_filtered_on_their_own():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 40)).astype(np.float32)
    top_ks = [1, 40, 3, 40, 7, 99]
    top_ps = np.array([1.0, 1.0, 1e-6, 0.5, 0.8, 1.0], np.float32)
    min_ps = np.array([0.0, 0.0, 0.0, 0.0, 0.5, 0.1], np.float32)
    out = jit_filter(jnp.asarray(logits), jnp.array(top_ks), jnp.asarray(top_ps), min_ps)
    for row, *limits, found in zip(logits, top_ks, top_ps, min_ps, np.asarray(out), strict=True):
        assert set(np.flatnonzero(np.isfinite(found)).tolist()) == kept_by_sorting(row, *limits)[0]
    assert np.isfinite(np.asarray(out)[1]).all()


def test_nothing_is_sorted():
    """A sort of the vocabulary takes 50 ms for six rows of 49152 on a CPU; these 8 do not."""
    text = jit_filter.lower(
        jnp.zeros((2, 64)), jnp.ones(2, jnp.int32), jnp.ones(2), jnp.zeros(2)
    ).as_text()
    assert "while" in text
    assert "sort" not in text
    assert "top_k" not in text

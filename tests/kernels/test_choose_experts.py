"""Experts and weights of every implementation, compared with numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, softmax
from specjax.kernels.choose_experts import choose_experts

from .runs import RUNS, run_jitted

DEEPSEEK = {"scoring": "sigmoid", "scale": 2.5, "num_groups": 4, "top_groups": 2}


def expected(
    logits, bias, is_real, top_k, scoring="softmax", is_normalised=True, scale=1.0, **groups
):
    """Ids and weights, computed in float64 row by row."""
    ids, weights = np.full((len(logits), top_k), -1), np.zeros((len(logits), top_k))
    num_groups, top_groups = groups.get("num_groups", 1), groups.get("top_groups", 1)
    for i in np.flatnonzero(is_real):
        row = logits[i].astype(np.float64)
        scores = softmax(row) if scoring == "softmax" else expit(row)
        ranks = (scores + bias).reshape(num_groups, -1)
        sums = np.sort(ranks, axis=1)[:, -2:].sum(axis=1)
        for group in np.argsort(-sums, kind="stable")[top_groups:]:
            ranks[group] = -np.inf
        ids[i] = np.argsort(-ranks.ravel(), kind="stable")[:top_k]
        weights[i] = scores[ids[i]] * scale
        if is_normalised:
            weights[i] /= scores[ids[i]].sum()
    return ids, weights


def check(run, logits, bias, is_real, **options):
    arguments = logits, *(np.asarray(x) for x in (bias, is_real))
    ids, weights = run_jitted(with_arrays, run | options, *arguments)
    truth, shares = expected(*arguments, **options)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, truth)
    np.testing.assert_allclose(weights, shares, rtol=2e-6, atol=1e-12)


def with_arrays(logits, bias, is_real, **options):
    return choose_experts(logits, bias=bias, is_real=is_real, **options)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (16, {"top_k": 3, **DEEPSEEK}),
        (6, {"top_k": 1}),
        (8, {"top_k": 8, "is_normalised": False}),
        (60, {"top_k": 2, "is_normalised": False, "scale": 16.0}),
        (128, {"top_k": 8}),
        (128, {"top_k": 8, "scoring": "sigmoid", "is_normalised": False}),
        (60, {"top_k": 8, "scoring": "sigmoid", "num_groups": 5, "top_groups": 3}),
        (256, {"top_k": 8, **DEEPSEEK, "num_groups": 8, "top_groups": 4}),
        (512, {"top_k": 10, "scoring": "softmax"}),
    ],
)
def test_equals_numpy(run, size, options):
    rng = np.random.default_rng(size)
    logits = (2 * rng.normal(size=(7, size))).astype(np.float32)
    bias = (rng.normal(size=size) / 2).astype(np.float32)
    check(run, logits, bias, np.arange(7) != 4, **options)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("options", [{}, DEEPSEEK])
def test_of_equal_scores_the_lowest_ids_are_chosen(run, options):
    """Scores are equal within and across groups, and equal groups are in ascending order, too."""
    logits = np.zeros((4, 12), np.float32)
    logits[1, 5:] = 1.0
    logits[2, [3, 4, 10, 11]] = 2.0
    logits[3] = -200.0  # the exponential of the others underflows
    logits[3, 7] = 0.0
    check(run, logits, np.zeros(12, np.float32), np.ones(4, bool), top_k=5, **options)


@pytest.mark.parametrize("run", RUNS)
def test_defaults_neither_bias_nor_drop_rows(run):
    logits = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    ids, weights = run_jitted(choose_experts, run | {"top_k": 2}, logits)
    truth, shares = expected(logits, np.zeros(6), np.ones(3, bool), 2)
    np.testing.assert_array_equal(ids, truth)
    np.testing.assert_allclose(weights, shares, rtol=2e-6)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("options", [{"num_groups": 4, "top_groups": 2}, {}])
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_real_rows_choose_distinct_experts_whatever_the_logits(run, options, value):
    logits = np.zeros((3, 12), np.float32)
    logits[0], logits[1, 3:], logits[2, 7] = value, value, value
    ids, _ = run_jitted(choose_experts, run | options | {"top_k": 6}, logits)
    for row in ids:
        assert len({*row.tolist()} & {*range(12)}) == 6
        assert len({*(row // 3)}) <= options.get("top_groups", 4)


@pytest.mark.parametrize("run", RUNS[1:])
def test_a_row_has_the_same_bits_in_any_batch(run):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(17, 60)).astype(np.float32)
    how = run | {"top_k": 4, "scoring": "softmax"}
    ids, weights = run_jitted(choose_experts, how, logits)
    for rows in (slice(5, 6), slice(2, 4)):
        own_ids, own_weights = run_jitted(choose_experts, how, logits[rows])
        np.testing.assert_array_equal(own_ids, ids[rows])
        np.testing.assert_array_equal(own_weights, weights[rows])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 13}, "top_k=13 .* 12"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 7, "num_groups": 4, "top_groups": 2}, "top_k=7 .* 6"),
        ({"top_k": 1, "num_groups": 5}, "num_groups=5 .* 12"),
        ({"top_k": 1, "num_groups": 12}, "num_groups=12 .* 12"),
        ({"top_k": 1, "num_groups": 2, "top_groups": 3}, "top_groups=3 .* 2"),
        ({"top_k": 1, "scoring": "relu"}, "'relu' .*sigmoid"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        choose_experts(jnp.zeros((2, 12)), **options)

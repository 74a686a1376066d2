"""The online estimate of which drafts survive, against known chances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.adaptive.survival import KEPT_REQUESTS, SurvivalEstimator

DEPTH = 5


def draw(rng, chances, num_proposed):
    """Numbers of accepted drafts i64 [N] for chances [N, D]."""
    hits = (rng.random(chances.shape) < chances) & (np.arange(DEPTH) < num_proposed[:, None])
    return np.cumprod(hits, axis=1).sum(axis=1)


def learn(estimator, rng, chances, rounds, proposed=DEPTH):
    limits = np.full(len(chances), proposed)
    for _ in range(rounds):
        accepted = draw(rng, chances, limits)
        estimator.observe(range(len(chances)), accepted, limits)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_survival_of_equal_requests(chance):
    estimator = SurvivalEstimator(DEPTH)
    learn(estimator, np.random.default_rng(0), np.full((32, DEPTH), chance), 150)
    expected = chance ** np.arange(1, DEPTH + 1)
    assert estimator.survival(range(32)).mean(axis=0) == pytest.approx(expected, abs=0.08)
    assert estimator.calibration_error < 0.08


def test_requests_differ_and_new_ones_get_the_mean():
    estimator = SurvivalEstimator(DEPTH)
    chances = np.repeat([0.9, 0.3], 16)[:, None] * np.ones(DEPTH)
    learn(estimator, np.random.default_rng(1), chances, 100)
    first = estimator.survival(range(32))[:, 0]
    assert first[:16].min() > first[16:].max()
    assert first[:16].mean() > 0.8
    assert first[16:].mean() < 0.45
    assert first[16:].mean() < estimator.survival(["new"])[0, 0] < first[:16].mean()


def test_the_drafters_probability_is_used():
    """Odds that predict acceptance get a slope; a drafter that is too sure gets a smaller one."""
    rng = np.random.default_rng(2)
    estimator = SurvivalEstimator(DEPTH)
    for _ in range(200):
        true = rng.normal(0.5, 1.5, (16, DEPTH))
        limits = np.full(16, DEPTH)
        accepted = draw(rng, 1 / (1 + np.exp(-true)), limits)
        estimator.observe(range(16), accepted, limits, 1 / (1 + np.exp(-2.0 * true)))
    assert estimator.slope == pytest.approx(0.5, abs=0.12)
    assert estimator.intercepts[:3] == pytest.approx(0.0, abs=0.4)


@pytest.mark.parametrize("q", [0.5, 0.001, 0.97])
def test_survival_of_later_rounds_does_not_depend_on_the_drafters_scale(q):
    """A drafter whose probabilities are all too low or too high says nothing about requests."""
    rng, estimator = np.random.default_rng(4), SurvivalEstimator(DEPTH)
    chances = np.repeat([0.9, 0.3], 16)[:, None] * np.ones(DEPTH)
    limits = np.full(32, DEPTH)
    for _ in range(200):
        accepted = draw(rng, chances, limits)
        estimator.observe(range(32), accepted, limits, np.full((32, DEPTH), q))
    expected = np.cumprod(chances, axis=1)
    # the prior pulls the requests towards each other
    assert estimator.survival(range(32))[:16].mean(axis=0) == pytest.approx(expected[0], abs=0.15)
    assert estimator.survival(range(32))[16:].mean(axis=0) == pytest.approx(expected[-1], abs=0.15)
    best = np.sort(expected, axis=None)[::-1]
    found = [estimator.survivors(range(32), count, DEPTH) for count in (96, 32 * DEPTH)]
    assert found[0] / found[1] == pytest.approx(best[:96].sum() / best.sum(), abs=0.03)


@pytest.mark.parametrize("seed", range(4))
def test_equal_confidences_do_not_move_the_mean_of_new_requests(seed):
    """The slope is at its limit of 0, and batches of new requests verify their best drafts."""
    rng, estimator = np.random.default_rng(seed), SurvivalEstimator(DEPTH)
    chances = np.repeat([0.9, 0.3], 16)[:, None] * np.ones(DEPTH)
    for first in range(0, 192, 32):
        requests = range(first, first + 32)
        for _ in range(100):
            order = np.argsort(-estimator.survival(requests).T, axis=None, kind="stable")
            limits = np.bincount(order[:96] % 32, minlength=32)
            accepted = draw(rng, chances, limits)
            estimator.observe(requests, accepted, limits, np.full((32, DEPTH), 0.001))
    assert estimator.survival(["new"])[0, 0] == pytest.approx(0.65, abs=0.1)


def test_positions_that_were_not_proposed_teach_nothing():
    estimator = SurvivalEstimator(DEPTH)
    before = estimator.intercepts.copy()
    learn(estimator, np.random.default_rng(3), np.zeros((8, DEPTH)), 50, proposed=2)
    assert estimator.intercepts[0] < -1.0
    assert (estimator.intercepts[1:] == before[1:]).all()


def test_a_draft_after_the_end_of_a_request_is_not_a_rejected_one():
    estimator = SurvivalEstimator(DEPTH)
    before = estimator.intercepts.copy()
    confidences = np.where(np.arange(DEPTH) < 1, 0.5, 0.0) * np.ones((8, 1))
    estimator.observe(range(8), [1] * 8, [DEPTH] * 8, confidences)
    estimator.fit()
    assert estimator.intercepts[0] > before[0]
    assert (estimator.intercepts[1:] == before[1:]).all()


def test_survivors_of_a_budget():
    estimator = SurvivalEstimator(DEPTH)
    estimator.intercepts[:] = 0.0  # survival 1/2, 1/4, ...
    requests = range(2)
    for count, expected in {0: 0.0, 2: 0.5, 3: 0.625, 6: 0.875, 9: 0.875}.items():
        assert estimator.survivors(requests, count, 3) == pytest.approx(expected)


def test_records_of_old_requests_are_dropped():
    estimator = SurvivalEstimator(1)
    for first in range(0, 3 * KEPT_REQUESTS, 512):
        estimator.observe(range(first, first + 512), [1] * 512, [1] * 512)
    assert len(estimator._requests) == KEPT_REQUESTS
    assert estimator.offsets([0])[0] == 0.0
    assert estimator.offsets([3 * KEPT_REQUESTS - 1])[0] > 0.0


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_values_stay_finite_and_survival_falls(data):
    estimator = SurvivalEstimator(DEPTH)
    number = st.integers(0, 2 * DEPTH)
    for _ in range(data.draw(st.integers(1, 12))):
        size = data.draw(st.integers(1, 6))
        counts = data.draw(st.lists(st.tuples(number, number), min_size=size, max_size=size))
        q = data.draw(st.sampled_from([None, 0.0, 0.5, 1.0, np.nan]))
        table = () if q is None else np.full((size, DEPTH), q)
        accepted, proposed = (list(column) for column in zip(*counts, strict=True))
        estimator.observe(range(size), accepted, proposed, table)
    survival = estimator.survival([*range(6), "new"])
    assert np.isfinite(survival).all()
    assert (np.diff(survival, axis=1) <= 0).all()
    assert (survival >= 0).all()
    assert 0.0 <= estimator.calibration_error <= 1.0

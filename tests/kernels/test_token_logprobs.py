"""Log-probabilities of every implementation, compared with numpy."""

import numpy as np
import pytest
from scipy.special import log_softmax
from specjax.kernels.token_logprobs import token_logprobs

from .runs import RUNS, run_jitted


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("size", "limit"), [(17, 1), (17, 5), (17, 17), (9000, 6)])
def test_values_and_best_tokens(run, size, limit):
    rng = np.random.default_rng(limit)
    logits = (5 * rng.normal(size=(6, size)) + 100).astype(np.float32)
    logits[0, 4:6] = 130.0  # ties: the lower id comes first
    logits[5, 3:] = -np.inf
    tokens = rng.integers(0, 3, size=6).astype(np.int32)
    asked = np.array([limit, 0, -1, 1, limit, limit], np.int32)
    temperatures = np.array([1, 1, 1, 0, 0.5, 1], np.float32)
    thresholds = np.full(6, -np.inf, np.float32)
    thresholds[4] = np.sort(logits[4])[size // 2]
    tokens[4] = np.argmax(logits[4])
    chosen, ids, values = run_jitted(
        token_logprobs, run | {"limit": limit}, logits, tokens, temperatures, thresholds, asked
    )
    for i in range(6):
        count = asked[i]
        if count < 0:
            assert not chosen[i]
        scaled = logits[i].astype(np.float64) / (temperatures[i] or 1.0)
        scaled[logits[i] < thresholds[i]] = -np.inf
        truth = log_softmax(scaled)
        if count >= 0:
            np.testing.assert_allclose(chosen[i], truth[tokens[i]], atol=1e-4)
        count = max(count, 0)
        best = np.argsort(-scaled, kind="stable")[:count]
        np.testing.assert_array_equal(ids[i, :count], best)
        np.testing.assert_allclose(values[i, :count], truth[best], atol=1e-4)
        assert not ids[i, count:].any()
        assert not values[i, count:].any()

"""Greedy drafts of a Markov head, compared with numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.markov_draft import MAX_BLOCK, PARTS, markov_draft

from .runs import RUNS, run_jitted


def drafts_of(logits, tokens, embedding, output, ids):
    found = []
    for i in range(logits.shape[1]):
        best = np.argmax(logits[:, i] + embedding[tokens] @ output, axis=-1)
        tokens = ids[best]
        found.append(tokens)
    return np.stack(found, axis=1)


def case(batch, size, rank, num_tokens):
    rng = np.random.default_rng(size + rank)
    # sums of small integers are exact in any order
    logits = rng.integers(-8, 8, size=(batch, 3, size)).astype(np.float32)
    embedding = rng.integers(-2, 3, size=(num_tokens, rank)).astype(np.float32)
    output = rng.integers(-2, 3, size=(rank, size)).astype(np.float32)
    ids = np.sort(rng.permutation(num_tokens)[:size]).astype(np.int32)
    return logits, rng.integers(num_tokens, size=batch).astype(np.int32), embedding, output, ids


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("batch", "size", "rank", "num_tokens"),
    [(1, 61, 32, 61), (17, 700, 16, 900), (2, MAX_BLOCK * PARTS + 40, 48, MAX_BLOCK * PARTS + 40)],
)
def test_equals_numpy(run, batch, size, rank, num_tokens):
    """Many logits are equal, so the lowest token must win; the last case has several blocks."""
    *arguments, ids = case(batch, size, rank, num_tokens)
    given = [*arguments, ids] if num_tokens > size else arguments
    found = run_jitted(markov_draft, run, *given)
    np.testing.assert_array_equal(found, drafts_of(*arguments, ids))


@pytest.mark.parametrize("run", RUNS)
def test_bfloat16_weights(run):
    logits, tokens, embedding, output, ids = case(5, 900, 32, 900)
    halves = (x.astype(jnp.bfloat16) for x in (embedding, output))
    found = run_jitted(markov_draft, run, logits, tokens, *halves)
    np.testing.assert_array_equal(found, drafts_of(logits, tokens, embedding, output, ids))


@pytest.mark.parametrize("run", RUNS)
def test_nan_gives_tokens_of_the_vocabulary(run):
    logits, tokens, embedding, output, _ = case(2, 70, 16, 70)
    found = run_jitted(markov_draft, run, np.full_like(logits, np.nan), tokens, embedding, output)
    assert ((found >= 0) & (found < 70)).all()

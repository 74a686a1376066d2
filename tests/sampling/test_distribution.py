"""Tokens that real rounds produce are distributed as the filtered softmax, for many seeds at once.

Every slot decodes the same text with a seed of its own. The text's KV lies in pages that all slots
share; what they produce goes to a page of their own.
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import RunnerConfig
from specjax.sampling.accept_draws import COUPLED, Acceptance
from specjax.sampling.params import SamplingParams
from specjax.speculative.prefill import Chunk
from specjax.testing import EAGLE3, TARGET, dense_logits, kept_by_sorting, random_weights
from specjax.types import DraftShape

from ..runners import algorithm_of

V, ROWS, PAGE = 9, 512, 8
STEPS = 3
TEXT = [3, 1, 4, 1, 5, 8, 2, 6]
SMALL = dataclasses.replace(TARGET, vocab_size=V, num_layers=1)
HEAD = dataclasses.replace(EAGLE3, vocab_size=V, draft_vocab_size=V, feature_layers=(0,))
CASES = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 1.3, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.15},
    {"temperature": 1.2, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
]


def wide_runner(num_steps: int) -> ModelRunner:
    return shaped_runner(DraftShape.chain(num_steps))


@cache
def shaped_runner(shape: DraftShape, acceptance: Acceptance = COUPLED) -> ModelRunner:
    """A runner of ``ROWS`` slots over a vocabulary of nine tokens."""
    num_steps, pages = shape.steps, 2 if shape.topk == 1 else 3
    algorithm = algorithm_of(HEAD if num_steps else None)
    networks = algorithm.networks(SMALL, HEAD if num_steps else None)
    runner = ModelRunner(
        networks,
        RunnerConfig(
            algorithm=algorithm,
            shapes=(shape,),
            acceptance=acceptance,
            page_size=PAGE,
            num_pages=2 + (pages - 1) * ROWS,
            pages_per_request=pages,
            num_slots=1 + ROWS,
            batch_buckets=(ROWS,),
            prefill_buckets=(len(TEXT),),
            implementation="xla",
        ),
    )
    runner.compile(show_progress=False)
    head = random_weights(networks.draft, 1) if num_steps else ()
    runner.load(random_weights(networks.target, 0), head)
    return runner


def draw(num_steps: int, params: SamplingParams, times: int) -> tuple[np.ndarray, int]:
    """One round of every slot behind the text and a greedy token; the first draft is a good one.

    Returns:
        The packed outputs i32 ``[times * ROWS, A + 3]``, and the greedy token.
    """
    runner = wide_runner(num_steps)
    greedy = SamplingParams(temperature=0.0)
    runner.set_slot(1, greedy, seed=0)
    runner.set_pages(1, [1, 2])
    first = int(runner.prefill([Chunk(1, TEXT, 0, None)]).read()[0])
    future = runner.on_device.future
    same = jax.tree.map(lambda leaf: jnp.repeat(leaf[1:2], 1 + ROWS, axis=0), future)
    likely = int(np.argmax(dense_logits(runner.weights[0], [*TEXT, first], SMALL)[-1]))
    if num_steps:
        drafts = jnp.full_like(same.rows.topk_ids, likely)
        same = dataclasses.replace(same, rows=dataclasses.replace(same.rows, topk_ids=drafts))
    rounds = []
    for repeat in range(times):
        for slot in range(1, 1 + ROWS):
            runner.set_slot(slot, params, seed=ROWS * repeat + slot)
            runner.set_pages(slot, [1, 1 + slot])
        future = jax.tree.map(jnp.copy, same)
        runner.on_device = dataclasses.replace(runner.on_device, future=future)
        rounds.append(runner.round(range(1, 1 + ROWS)).read()[0])
    return np.concatenate(rounds), first


def probabilities(runner: ModelRunner, text, params: SamplingParams) -> np.ndarray:
    """The filtered softmax behind a text, f64 ``[V]``."""
    logits = dense_logits(runner.weights[0], text, SMALL)[-1] / params.temperature
    top_k = V if params.top_k == -1 else params.top_k
    kept, gap = kept_by_sorting(logits, top_k, params.top_p, params.min_p)
    assert gap > 1e-4
    weights = np.zeros(V)
    weights[sorted(kept)] = np.exp(logits[sorted(kept)].astype(np.float64))
    return weights / weights.sum()


def assert_follows(tokens: np.ndarray, probs: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=len(probs))
    assert not counts[probs == 0].any()
    expected = probs * len(tokens)
    # the test is good where it expects some of each kind
    rare = (expected < 5) & (expected > 0)
    observed = [*counts[expected >= 5], *([counts[rare].sum()] if rare.any() else [])]
    expected = [*expected[expected >= 5], *([expected[rare].sum()] if rare.any() else [])]
    assert len(observed) > 1
    assert chisquare(observed, expected).pvalue > 1e-4


@pytest.mark.parametrize("num_steps", [0, STEPS])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounds_follow_the_distribution(num_steps, case):
    params = SamplingParams(**case)
    packed, first = draw(num_steps, params, times=6)
    runner = wide_runner(num_steps)
    assert_follows(packed[:, 0], probabilities(runner, [*TEXT, first], params))
    if num_steps == 0:
        return
    # what stands behind an accepted draft follows the distribution behind that draft
    accepted = packed[packed[:, -2] >= 1]
    assert len(set(accepted[:, 0].tolist())) == 1
    assert len(accepted) > 200
    text = [*TEXT, first, int(accepted[0, 0])]
    assert_follows(accepted[:, 1], probabilities(runner, text, params))


def test_plain_and_speculative_rounds_draw_the_same_tokens():
    params = SamplingParams(**CASES[-1])
    plain, speculative = (draw(steps, params, times=1)[0] for steps in (0, STEPS))
    np.testing.assert_array_equal(plain[:, 0], speculative[:, 0])

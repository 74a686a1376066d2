"""Pairs of tokens from real rounds follow the target's distribution, whatever is drafted.

Every slot decodes the same text with a different seed. All slots share the pages with the text's
KV, and write produced tokens to their own pages. The head drafts.
"""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import RunnerConfig
from specjax.sampling.accept_draws import COUPLED, Acceptance
from specjax.sampling.draw import SamplingConfig
from specjax.sampling.params import SamplingParams
from specjax.speculative.drafting import first_level
from specjax.speculative.eagle import masked_levels, masked_shapes
from specjax.speculative.prefill import Chunk
from specjax.testing import EAGLE3, TARGET, dense_logits, kept_by_sorting, random_weights
from specjax.types import DraftShape

from ..support.runners import algorithm_of
from ..support.sampling_tables import equal_rows

V, ROWS, PAGE = 9, 512, 8
TEXT = [3, 1, 4, 1, 5, 8, 2, 6]
SMALL = replace(TARGET, vocab_size=V, num_layers=1)
HEAD = replace(EAGLE3, vocab_size=V, draft_vocab_size=V, feature_layers=(0,))
PEAGLE = replace(HEAD, mask_token_id=2)
PLAIN, CHAIN, TREE = DraftShape.chain(0), DraftShape.chain(3), DraftShape(2, 2, 6)
(MASKED,) = masked_shapes((CHAIN,), PEAGLE)
REJECTION = Acceptance(uses_rejection=True)
PARAMS = SamplingParams(temperature=1.1, top_k=7)


@cache
def shaped_runner(shape: DraftShape, acceptance: Acceptance = COUPLED) -> ModelRunner:
    """A runner with ``ROWS`` slots and a vocabulary of nine tokens."""
    num_steps, pages = shape.steps, 2 if shape.topk == 1 else 3
    draft = (PEAGLE if shape.block else HEAD) if num_steps else None
    algorithm = algorithm_of(draft)
    networks = algorithm.networks(SMALL, draft)
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
    runner.compile(show_progress=False, on_use=True)
    head = random_weights(networks.draft, 1) if num_steps else ()
    runner.load(random_weights(networks.target, 0), head)
    return runner


def probabilities(runner: ModelRunner, text, params: SamplingParams) -> np.ndarray:
    """The filtered softmax after a text, f64 ``[V]``."""
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
    # the test is valid if it expects enough tokens of each kind
    rare = (expected < 5) & (expected > 0)
    observed = [*counts[expected >= 5], *([counts[rare].sum()] if rare.any() else [])]
    expected = [*expected[expected >= 5], *([expected[rare].sum()] if rare.any() else [])]
    assert len(observed) > 1
    assert chisquare(observed, expected).pvalue > 1e-4


@cache
def pairs(
    shape: DraftShape, acceptance: Acceptance, params: SamplingParams, times: int
) -> tuple[np.ndarray, int, float]:
    """Draw the two tokens after the text and a greedy one, for ``times * ROWS`` seeds.

    Returns:
        Tokens i32 ``[times * ROWS, 2]``, the greedy token, and accepted drafts of a first round.
    """
    runner = shaped_runner(shape, acceptance)
    runner.set_slot(1, SamplingParams(temperature=0.0), seed=0)
    runner.set_pages(1, [1, 2])
    first = int(runner.prefill([Chunk(1, TEXT, 0, None)]).read()[0])
    future = runner.on_device.future
    same = jax.tree.map(lambda leaf: jnp.repeat(leaf[1:2], 1 + ROWS, axis=0), future)
    own_pages, found, accepted = runner.config.pages_per_request - 1, [], []
    for repeat in range(times):
        for slot in range(1, 1 + ROWS):
            runner.set_slot(slot, params, seed=ROWS * repeat + slot)
            begin = 2 + (slot - 1) * own_pages
            runner.set_pages(slot, [1, *range(begin, begin + own_pages)])
        future = jax.tree.map(jnp.copy, same)
        if shape.steps:
            rows = own_drafts(runner, same.rows, params, jnp.uint32(ROWS * repeat))
            future = replace(future, rows=rows)
        runner.on_device = replace(runner.on_device, future=future)
        one, two = (runner.round(range(1, 1 + ROWS)).read()[0] for _ in range(2))
        second = np.where(one[:, -1] > 1, one[:, min(1, shape.steps)], two[:, 0])
        found.append(np.stack([one[:, 0], second], axis=1))
        accepted.append(one[:, -2])
    return np.concatenate(found), first, float(np.mean(accepted))


def own_drafts(runner: ModelRunner, rows, params: SamplingParams, base: jax.Array):
    """Draft the first level again, with the noise of each slot's seed; slot 0 is padding."""
    table = equal_rows(1 + ROWS, params, V)
    seeds = table.seeds.at[:, 1].add(base)
    return _drafted(runner)(runner.weights, rows, replace(table, seeds=seeds))


@cache
def _drafted(runner: ModelRunner):
    nets, draw = runner.networks, SamplingConfig(acceptance=runner.config.acceptance)

    @jax.jit
    def function(weights, rows, table):
        target, draft = nets.target.rebuild(weights[0]), nets.draft.rebuild(weights[1])
        batch = SimpleNamespace(target=target, draft=draft, sampling=table, draw=draw)
        lens = jnp.full(1 + ROWS, len(TEXT), jnp.int32)
        level = masked_levels if runner.config.largest.block else first_level
        return level(batch, rows.hidden, lens, rows.topk)

    return function


def assert_pairs_follow(shape: DraftShape, acceptance: Acceptance, params=PARAMS) -> float:
    tokens, first, accepted = pairs(shape, acceptance, params, 4)
    of = partial(probabilities, shaped_runner(shape, acceptance), params=params)
    probs = of([*TEXT, first])[:, None] * [of([*TEXT, first, token]) for token in range(V)]
    assert_follows(tokens[:, 0] * V + tokens[:, 1], probs.ravel())
    return accepted


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 1.3, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.15},
    {"temperature": 1.2, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.long_after(5)
@pytest.mark.slow
@pytest.mark.parametrize("shape", [PLAIN, CHAIN], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_filters_follow_the_softmax(shape, case):
    assert_pairs_follow(shape, COUPLED, SamplingParams(**case))


@pytest.mark.long_after(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "acceptance"),
    [
        (CHAIN, REJECTION),
        pytest.param(MASKED, REJECTION, marks=pytest.mark.slow),
        pytest.param(TREE, COUPLED, marks=pytest.mark.slow),
        # close enough to 1 for every coin
        pytest.param(TREE, Acceptance(threshold_acc=1 - 1e-7), marks=pytest.mark.slow),
        pytest.param(CHAIN, Acceptance(threshold_single=1 - 1e-7), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pairs_of_tokens_follow_the_target(shape, acceptance):
    assert assert_pairs_follow(shape, acceptance) > 0.2


@pytest.mark.slow
def test_lower_thresholds_accept_more():
    accs = [Acceptance(threshold_acc=acc) for acc in (1 - 1e-7, 0.2)]
    rates = [pairs(TREE, acceptance, PARAMS, 4)[2] for acceptance in accs]
    assert rates[0] + 0.2 < rates[1]
    with pytest.raises(AssertionError):
        assert_pairs_follow(TREE, accs[1])


UNTOUCHED = [
    (CHAIN, REJECTION),
    pytest.param(TREE, Acceptance(threshold_acc=0.2), marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "acceptance"), UNTOUCHED, ids=str)
def test_greedy_requests_and_those_without_speculation_stay_as_they_are(shape, acceptance):
    """Other requests do change: with the same seed their text differs."""
    for params, is_equal in (
        (SamplingParams(temperature=0.0), True),
        (replace(PARAMS, speculative=False), True),
        (PARAMS, False),
    ):
        plain = pairs(PLAIN, COUPLED, params, 1)[0]
        found, _, accepted = pairs(shape, acceptance, params, 1)
        assert (found == plain).all() == is_equal
        assert accepted == 0 if not params.speculative else accepted >= 0

"""Real rounds whose drafts are the head's own: pairs of tokens are distributed as the target's."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.runtime.runner import ModelRunner
from specjax.sampling.accept_draws import COUPLED, Acceptance
from specjax.sampling.draw import SamplingConfig
from specjax.sampling.params import SamplingParams
from specjax.speculative.drafting import first_level
from specjax.speculative.prefill import Chunk
from specjax.types import DraftShape

from ..speculative.tables import equal_rows
from .test_distribution import ROWS, STEPS, TEXT, V, assert_follows, probabilities, shaped_runner

PLAIN, CHAIN, TREE = DraftShape.chain(0), DraftShape.chain(STEPS), DraftShape(2, 2, 6)
REJECTION = Acceptance(uses_rejection=True)
PARAMS = SamplingParams(temperature=1.1, top_k=7)


@cache
def pairs(
    shape: DraftShape, acceptance: Acceptance, params: SamplingParams, times: int
) -> tuple[np.ndarray, int, float]:
    """The two tokens behind the text and a greedy one, for ``times * ROWS`` seeds.

    Returns:
        Tokens i32 ``[times * ROWS, 2]``, the greedy token, and drafts accepted in a first round.
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
    """The first level again, with the noise of each slot's own seed; slot 0 is padding."""
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
        return first_level(batch, rows.hidden, lens, rows.topk)

    return function


def assert_pairs_follow(shape: DraftShape, acceptance: Acceptance, params=PARAMS) -> float:
    tokens, first, accepted = pairs(shape, acceptance, params, 4)
    of = partial(probabilities, shaped_runner(shape, acceptance), params=params)
    probs = of([*TEXT, first])[:, None] * [of([*TEXT, first, token]) for token in range(V)]
    assert_follows(tokens[:, 0] * V + tokens[:, 1], probs.ravel())
    return accepted


CASES = [
    pytest.param(CHAIN, COUPLED, marks=pytest.mark.slow),
    (CHAIN, REJECTION),
    pytest.param(TREE, COUPLED, marks=pytest.mark.slow),
    # as good as 1, for every coin
    pytest.param(TREE, Acceptance(threshold_acc=1 - 1e-7), marks=pytest.mark.slow),
    pytest.param(CHAIN, Acceptance(threshold_single=1 - 1e-7), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "acceptance"), CASES, ids=str)
def test_pairs_of_tokens_follow_the_target(shape, acceptance):
    assert assert_pairs_follow(shape, acceptance) > 0.2


@pytest.mark.slow
def test_lower_thresholds_accept_more():
    accs = [Acceptance(threshold_acc=acc) for acc in (1 - 1e-7, 0.7, 0.2)]
    rates = [pairs(TREE, acceptance, PARAMS, 4)[2] for acceptance in accs]
    assert rates[0] + 0.1 < rates[1] < rates[2] - 0.1
    with pytest.raises(AssertionError):
        assert_pairs_follow(TREE, accs[2])


UNTOUCHED = [
    (CHAIN, REJECTION),
    pytest.param(TREE, Acceptance(threshold_acc=0.2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "acceptance"), UNTOUCHED, ids=str)
def test_greedy_requests_and_those_without_speculation_stay_as_they_are(shape, acceptance):
    """The others do not: with a seed their text is another one."""
    for params, is_equal in (
        (SamplingParams(temperature=0.0), True),
        (replace(PARAMS, speculative=False), True),
        (PARAMS, False),
    ):
        plain = pairs(PLAIN, COUPLED, params, 1)[0]
        found, _, accepted = pairs(shape, acceptance, params, 1)
        assert (found == plain).all() == is_equal
        assert accepted == 0 if not params.speculative else accepted >= 0

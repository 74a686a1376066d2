"""Another model as the draft: tokens of plain decoding, and KV of every token at its position.

A draft with the target's weights is always right if it reads the same tokens. Then each round
accepts all drafts, and the KV of both models is the same.
"""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from specjax.runtime.runner import ModelRunner
from specjax.sampling.accept_draws import Acceptance
from specjax.sampling.params import SamplingParams
from specjax.testing import TARGET, Job
from specjax.types import DraftShape

from ..support.runners import make_request, make_runner, run_requests, target_model, with_weights
from ..support.schedulers import Serving, forced
from .driver import start
from .identity import JOBS, check, expected

# another family with other sizes
SMALL = replace(
    TARGET,
    model_type="qwen3",
    qk_norm=True,
    tie_word_embeddings=True,
    num_layers=1,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rope_theta=1000.0,
)
TREE = DraftShape(steps=3, topk=3, nodes=9)
TIERS = (DraftShape.chain(0), DraftShape.chain(2), TREE, DraftShape.chain(7, 4))
DRAFTING = pytest.mark.parametrize("tier", TIERS[1:], ids=["chain", "tree", "cut chain"])
RNG = np.random.default_rng(14)
PROMPTS = [RNG.integers(6, 61, size=n).tolist() for n in (9, 1, 17, 40, 2, 16)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=21, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9)


@cache
def sharp_weights():
    """Weights of a target so confident that its best path is in every tree."""
    flat, weights = target_model()
    head = flat.names.index("lm_head.kernel")
    return (*weights[:head], 20 * weights[head], *weights[head + 1 :])


@cache
def own_runner() -> ModelRunner:
    """The target drafts for itself."""
    made = make_runner(TARGET, 7, shapes=TIERS)
    return with_weights(made, sharp_weights(), sharp_weights())


@cache
def plain_runner() -> ModelRunner:
    return with_weights(make_runner(), sharp_weights(), ())


def plain(prompt: list[int], params: SamplingParams, seed: int = 0) -> list[int]:
    request = make_request(prompt, params, seed=seed)
    run_requests(plain_runner(), [request])
    return request.output_ids


def kv_of(runner: ModelRunner, slot: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """KV ``[L, length, 2, KV, H]`` of a slot's text in target and draft."""
    size = runner.config.page_size
    positions = np.arange(length)
    places = runner.tables.page_tables[0][slot][positions // size] * size + positions % size
    pools = runner.on_device.pools
    return np.asarray(pools.target[0])[:, places], np.asarray(pools.draft)[:, places]


@pytest.mark.long_after(1)
@pytest.mark.slow
@DRAFTING
def test_a_random_draft_changes_no_token(tier) -> None:
    """Penalties, bias, log-probabilities and end tokens, with drafts of another family."""
    check(make_runner(SMALL, 7, shapes=TIERS[1:]), JOBS, expected(False), tier=tier)


@pytest.mark.long_after(1)
@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_target_as_its_own_draft_is_always_right(params) -> None:
    """In chains, trees and rounds without drafts, in any order; two texts, of 9 and 40 tokens."""
    runner, rng = own_runner(), random.Random(3)
    many = replace(params, max_new_tokens=70)
    texts = {}
    for slot, at in ((1, 0), (2, 3)):
        job = Job(prompt=tuple(PROMPTS[at]), params=many, seed=slot)
        texts[slot] = [*PROMPTS[at], int(start(runner, slot, job).read()[0])]
    # every pair of tiers in sequence
    order = [*TIERS, *TIERS[::-1], TIERS[0], TREE, TIERS[1], TREE, TREE, TIERS[1], TIERS[1]]
    order += rng.sample(TIERS, 3)
    for tier in order:
        packed = runner.round([1, 2], tier).read()[0]
        for row, slot in enumerate((1, 2)):
            *tokens, proposed, accepted, count = packed[row].tolist()
            assert (proposed, accepted, count) == (tier.nodes - 1, tier.depth, tier.depth + 1)
            texts[slot] += tokens
            target, draft = kv_of(runner, slot, len(texts[slot]) - 2)
            np.testing.assert_allclose(draft, target, atol=1e-4)
    for slot, at in ((1, 0), (2, 3)):
        runner.clear_slot(slot)
        prompt = PROMPTS[at]
        output = texts[slot][len(prompt) :]
        assert output == plain(prompt, many, slot)[: len(output)]


def rounds_of(request: Any) -> tuple[int, int]:
    """Number of rounds that accepted all drafts, and of all rounds, of a finished request."""
    histogram = request.result()["meta_info"]["spec_correct_drafts_histogram"]
    return histogram[-1], sum(histogram)


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [0, 1])
@DRAFTING
def test_prefixes_keep_the_kv_of_the_draft(tier, run_ahead) -> None:
    """Conversations continue after cached pages: all drafts are right except at the end.

    Texts end with a whole round, at each position in a page: their last draft has no KV.
    """
    runner = own_runner()
    serving = Serving(
        runner=runner, is_cached=True, run_ahead=run_ahead, controller=forced(runner, [tier])
    )
    assert serving.cache is not None
    text, size = list(PROMPTS[2]), runner.config.page_size
    for turn in range(6):
        rounds = 2 + turn % 2
        params = replace(
            (GREEDY, SEEDED)[turn // 2 % 2], max_new_tokens=1 + rounds * tier.accept_width
        )
        while (len(text) + params.max_new_tokens - 1 - turn) % size:
            text.append(7)
        request = make_request(text, params, seed=turn, width=tier.depth)
        serving.add_all([request])
        serving.finish()
        assert request.output_ids == plain(text, params, turn)
        assert turn == 0 or request.cached_tokens > len(text) - 12
        full, count = rounds_of(request)
        assert count == rounds
        assert full >= rounds - 1
        pages = np.array(sorted(serving.cache._held))
        places = (pages[:, None] * size + np.arange(size)).ravel()
        pools = runner.on_device.pools
        target, draft = (np.asarray(pool)[:, places] for pool in (*pools.target, pools.draft))
        np.testing.assert_allclose(draft, target, atol=1e-4)
        text += request.output_ids


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@DRAFTING
def test_pages_that_run_out_cost_no_draft(tier, params) -> None:
    """Requests are preempted and resumed; a prompt is prefilled in chunks between rounds."""
    runner = own_runner()
    serving = Serving(
        runner=runner, run_ahead=1, num_pages=22, is_cached=True, controller=forced(runner, [tier])
    )
    requests = [
        make_request(prompt, params, seed=i, width=tier.depth)
        for i, prompt in enumerate(PROMPTS * 2)
    ]
    serving.add_all(requests)
    serving.finish()
    assert sum(request.num_retractions for request in requests) > 0
    for request in requests:
        assert request.output_ids == plain(request.input_ids, params, request.seed)
        full, rounds = rounds_of(request)
        assert full >= rounds - 1 - request.num_retractions


@pytest.mark.slow
def test_a_small_tree_moves_only_what_was_drafted_from() -> None:
    """With fewer nodes than candidates, rows after the verified ones hold KV of the path."""
    shape = DraftShape(4, 4, 6)
    assert shape.rows == 13
    made = make_runner(TARGET, 4, shapes=(shape,))
    runner = with_weights(made, sharp_weights(), sharp_weights())
    serving = Serving(runner=runner, is_cached=True)
    requests = serving.add(PROMPTS, GREEDY)
    serving.finish()
    for request in requests:
        assert request.output_ids == plain(request.input_ids, GREEDY, request.seed)
        full, rounds = rounds_of(request)
        assert full >= rounds - 1


@pytest.mark.long_after(1)
@pytest.mark.slow
@pytest.mark.parametrize("tier", [TIERS[1], TIERS[3]], ids=["chain", "cut chain"])
def test_drafts_that_are_drawn_apart_come_with_their_probabilities(tier) -> None:
    """Rejection sampling accepts all drafts of the target itself: p equals q."""
    made = make_runner(TARGET, 2, shapes=(tier,), acceptance=Acceptance(uses_rejection=True))
    weights = target_model()[1]
    runner = with_weights(made, weights, weights)
    requests = [
        make_request(prompt, SEEDED, seed=i, width=tier.depth)
        for i, prompt in enumerate(PROMPTS[:4])
    ]
    run_requests(runner, requests)
    for request in requests:
        full, rounds = rounds_of(request)
        assert full >= rounds - 1

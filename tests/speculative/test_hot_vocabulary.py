"""A hot vocabulary does the same as an output head with only these tokens, in a head's own file."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import HotVocabulary
from specjax.models.hot_head import hot_columns
from specjax.runtime.runner import ModelRunner
from specjax.sampling.accept_draws import Acceptance
from specjax.sampling.draw import SamplingConfig, draft_probs
from specjax.sampling.params import SamplingParams
from specjax.types import DraftShape

from ..support.runners import (
    EAGLE,
    dense_greedy,
    head_weights,
    make_request,
    make_runner,
    run_requests,
    target_model,
    with_weights,
)
from ..support.sampling_tables import sampling_rows

pytestmark = pytest.mark.slow
OWN = replace(EAGLE, draft_vocab_size=25, has_own_lm_head=True)
HOT = replace(EAGLE, hot=HotVocabulary(25, None, ""))
PROMPTS = [np.random.default_rng(i).integers(6, 61, size=n).tolist() for i, n in enumerate((9, 1))]
WARM = SamplingParams(temperature=0.9, max_new_tokens=40, ignore_eos=True)
CASES: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"shapes": (DraftShape(steps=3, topk=3, nodes=8),)},
    "rejection sampling": {"acceptance": Acceptance(uses_rejection=True)},
}


def runners(options: dict[str, Any]) -> tuple[ModelRunner, ModelRunner]:
    """A runner of each kind, with the same target columns in the draft."""
    own, hot = (make_runner(head, 3, **options) for head in (OWN, HOT))
    target, named = (
        target_model()[1],
        dict(zip(own.networks.draft.names, head_weights(OWN), strict=True)),
    )
    named["hot_head.offsets"] = named["d2t"]
    columns = hot_columns(hot.networks, target, named)
    named["lm_head.kernel"] = columns["hot_head.kernel"]
    pairs = ((own, named), (hot, named | columns))
    first, second = (
        with_weights(x, target, tuple(w[name] for name in x.networks.draft.names)) for x, w in pairs
    )
    return first, second


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_accepted_drafts_are_equal(name: str) -> None:
    results = []
    for runner in runners(CASES[name]):
        requests = [
            make_request(prompt, params, seed=seed, width=3)
            for seed, prompt in enumerate(PROMPTS)
            for params in (WARM, replace(WARM, temperature=0.0))
        ]
        run_requests(runner, requests)
        metas = [x.result()["meta_info"]["spec_correct_drafts_histogram"] for x in requests]
        results.append(([x.output_ids for x in requests], metas))
    assert results[0] == results[1]
    assert sum(sum(histogram[1:]) for histogram in results[0][1]) > 5
    greedy = [dense_greedy(prompt, WARM.max_new_tokens) for prompt in PROMPTS]
    assert results[0][0][1::2] == greedy


def test_probabilities_are_those_of_the_columns() -> None:
    """In float64; tokens outside the list have the probability 0."""
    hot = runners(CASES["chain"])[1]
    target = hot.networks.target.rebuild(hot.weights[0])
    head = hot.networks.draft.rebuild(hot.weights[1])
    hidden = np.random.default_rng(3).normal(size=(2, 2, EAGLE.hidden_size)).astype(np.float32)
    sampling = sampling_rows([WARM, replace(WARM, temperature=0.5)], EAGLE.vocab_size)
    logits = head.logits(jnp.asarray(hidden), target)
    ours = draft_probs(logits, head.vocabulary, sampling, SamplingConfig(), EAGLE.vocab_size)
    named = dict(zip(hot.networks.target.names, hot.weights[0], strict=True))
    ids = np.asarray(head.vocabulary)
    theirs = hidden.astype(np.float64) @ np.asarray(named["lm_head.kernel"], np.float64)[:, ids]
    theirs = np.exp(theirs / np.array([0.9, 0.5])[:, None, None])
    expected = np.zeros(ours.shape)
    expected[:, :, ids] = theirs / theirs.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(ours, expected, atol=1e-5)

"""What trees report beside their tokens, for random models: that of a dense pass over the text."""

import copy
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.models.decoder import CausalLM
from specjax.models.eagle import build_head
from specjax.models.flat import FlatModel, Weights
from specjax.models.layers import dense_attend
from specjax.runtime.runner import ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.testing import EAGLE3, TARGET, random_weights
from specjax.types import DraftShape

from ..runners import copied_weights, make_request, make_runner, run_requests

WIDTH, TOP = 64, 3
# The noisiest models multiply what sums of another order leave in float32: 5e-4 on some processors.
CLOSE = 2e-3
NETWORKS = tuple(FlatModel.of(partial(*of)) for of in ((CausalLM, TARGET), (build_head, EAGLE3)))
KINDS = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3})


@cache
def runner_of(shape: DraftShape, page_size: int) -> ModelRunner:
    """A runner of its own, whose weights a test may put in."""
    sizes = {"pages_per_request": -(-256 // page_size), "num_pages": 1 + 1200 // page_size}
    made = make_runner(EAGLE3, shapes=(shape,), page_size=page_size, **sizes)
    runner = copy.copy(made)
    runner.load(*made.weights)
    return runner


def noisy_weights(seed: int, noise: float) -> tuple[Weights, Weights]:
    """Those of a head that is often right with as much noise as given, up to random models."""
    both = []
    for flat, weights in zip(NETWORKS, copied_weights(), strict=True):
        drawn = random_weights(flat, seed)
        both.append(
            tuple(
                one + jnp.asarray(noise, one.dtype) * other if one.dtype == jnp.float32 else one
                for one, other in zip(weights, drawn, strict=True)
            )
        )
    return both[0], both[1]


@jax.jit
def dense(weights: Weights, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Hidden states ``[N, D]`` and log-probabilities ``[N, V]`` of a text ``[1, N]``."""
    model = NETWORKS[0].rebuild(weights)
    positions = jnp.arange(WIDTH, dtype=jnp.int32)[None]
    hidden = model(tokens, positions, None, dense_attend)[0]
    return hidden[0], jax.nn.log_softmax(model.logits(hidden)[0].astype(jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "page_size"),
    [
        (DraftShape(3, 2, 7), 1),
        (DraftShape(2, 4, 21), 16),
        (DraftShape(2, 16, 64), 64),
        (DraftShape(4, 4, 16), 1),
    ],
)
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    noise=st.sampled_from([0.0, 0.03, 0.3, 3.0]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
)
def test_rows_of_random_models_are_those_of_a_dense_pass(shape, page_size, seed, noise, lengths):
    runner = runner_of(shape, page_size)
    runner.weights = noisy_weights(seed, noise)
    rng = np.random.default_rng(seed)
    requests = [
        make_request(
            rng.integers(6, 61, size=length).tolist(),
            SamplingParams(max_new_tokens=20, ignore_eos=True, **KINDS[i % len(KINDS)]),
            seed=seed + i,
            width=shape.steps,
            top_logprobs=TOP,
            return_hidden_states=True,
        )
        for i, length in enumerate(lengths)
    ]
    run_requests(runner, requests)
    for request in requests:
        ids, meta = request.output_ids, request.result()["meta_info"]
        tokens = np.zeros((1, WIDTH), np.int32)
        text = [*request.input_ids, *ids[:-1]]
        tokens[0, : len(text)] = text
        rows = slice(len(request.input_ids) - 1, len(text))
        hidden, logprobs = (np.asarray(one)[rows] for one in dense(runner.weights[0], tokens))
        np.testing.assert_allclose(meta["hidden_states"], hidden, atol=CLOSE)
        chosen = [value for value, _, _ in meta["output_token_logprobs"]]
        np.testing.assert_allclose(chosen, logprobs[range(len(ids)), ids], atol=CLOSE)
        top = [[value for value, _, _ in best] for best in meta["output_top_logprobs"]]
        np.testing.assert_allclose(top, -np.sort(-logprobs, axis=1)[:, :TOP], atol=CLOSE)
    if noise == 0.0:
        assert sum(request.spec.num_accepted_drafts for request in requests) > 5

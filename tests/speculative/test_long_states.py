"""Recurrent layers over long texts: identity with plain decoding, and states that do not drift."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from specjax.speculative.prefill import Chunk
from specjax.types import DraftShape

from ..support.recurrent import CHAIN, GREEDY, PACKED, PROMPTS, SEEDED, TREE, family, runner_of
from ..support.runners import make_request, run_requests

__all__ = ["family"]
pytestmark = pytest.mark.slow
LENGTH = 300
SIZES: Any = {"pages_per_request": 96, "num_pages": 400, "prefill_buckets": (64,)}


def texts(shape: DraftShape | None, params: Any, rounds: int = 1) -> list[list[int]]:
    runner, width = runner_of(shape, rounds, **SIZES), shape.steps if shape else 0
    params = replace(params, max_new_tokens=LENGTH)
    requests = [make_request(x, params, seed=i, width=width) for i, x in enumerate(PROMPTS)]
    run_requests(runner, requests)
    return [request.output_ids for request in requests]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("shape", "rounds"), [(CHAIN, 1), (CHAIN, 4), (TREE, 1), (PACKED, 1)])
def test_long_texts_equal_plain_decoding(shape: DraftShape, rounds: int, params: Any) -> None:
    """Of six requests in four slots, so that slots are used again."""
    assert texts(shape, params, rounds) == texts(None, params)


@pytest.mark.parametrize("shape", [None, CHAIN, TREE])
def test_states_after_many_rounds_are_those_of_a_prefill(shape: DraftShape | None) -> None:
    """Also the windows of the convolution, which rounds write at other places than prompts."""
    runner, width = runner_of(shape, **SIZES), shape.steps if shape else 0
    params = replace(SEEDED, max_new_tokens=LENGTH)
    request = make_request(PROMPTS[1], params, width=width)
    run_requests(runner, [request])
    slot = 1  # the first that a scheduler gives

    def states(slot: int) -> list[np.ndarray]:
        return [np.asarray(x[:, slot]) for x in runner.on_device.pools.requests]

    after_rounds = states(slot)
    text = [*PROMPTS[1], *request.output_ids[:-1]]
    runner.set_slot(slot, GREEDY, seed=0, end_token_ids=(), prompt_len=len(text))
    runner.set_pages(slot, list(range(1, 1 + -(-len(text) // 4))))
    for at in range(0, len(text), 64):
        runner.prefill([Chunk.of(slot, text, at, min(at + 64, len(text)))])
    runner.clear_slot(slot)
    for now, expected in zip(after_rounds, states(slot), strict=True):
        np.testing.assert_allclose(now, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [None, CHAIN, TREE, PACKED])
def test_no_function_copies_the_pool_of_states(shape: DraftShape | None) -> None:
    """Prompts and rounds write a donated pool in place, with 31 MB of states."""
    runner = runner_of(shape, num_snapshots=5000)
    states, _ = runner.abstract_state.pools.requests
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(runner.abstract_state))
    tier, batch = runner.config.rounds[0]
    names = [("prefill", 16), ("prefill_logprobs", 16), ("round", tier, batch)]
    for key in names:
        memory = runner.compiled[key].memory_analysis()
        assert memory.alias_size_in_bytes >= state, key
        # the windows, which are smaller, are copied in each layer on a CPU
        assert memory.temp_size_in_bytes < states.size * states.dtype.itemsize, key

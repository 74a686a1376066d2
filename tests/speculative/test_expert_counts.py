"""Rounds report how many experts the target read, against dense passes over all verified texts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.decoder import CausalLM
from specjax.models.experts import MixtureConfig
from specjax.models.flat import FlatModel
from specjax.sampling.params import SamplingParams
from specjax.speculative.prefill import Chunk
from specjax.testing import EAGLE3, random_weights
from specjax.testing.dense import dense_attend
from specjax.testing.models import SIZES
from specjax.types import DraftShape

from ..support.runners import algorithm_of, head_weights, new_runner, runner_config

MIXTURE = MixtureConfig(
    model_type="qwen3_moe",
    num_layers=2,
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    max_position_embeddings=256,
    **SIZES,
)
WIDTH, ROUNDS = 48, 2
PROMPTS = [np.random.default_rng(i).integers(6, 61, size=5 + 3 * i).tolist() for i in range(3)]
BUDGETS = 30, 3, 5  # the others end early, and become padding
TARGET = FlatModel.of(partial(CausalLM, MIXTURE))
WEIGHTS = random_weights(TARGET, 0)


@jax.jit
def dense_routes(weights: Any, texts: jax.Array) -> jax.Array:
    """The experts i32 ``[L, N, WIDTH, K]`` of every token of texts i32 ``[N, WIDTH]``."""
    routes: list[jax.Array] = []
    positions = jnp.tile(jnp.arange(WIDTH, dtype=jnp.int32), (len(texts), 1))
    TARGET.rebuild(weights)(texts, positions, None, dense_attend, routes=routes)
    return jnp.stack(routes).reshape(len(routes), *texts.shape, -1)


def mean_distinct(texts: list[list[int]]) -> float:
    """The mean over layers of the number of distinct experts of the last tokens of texts."""
    padded = np.zeros((32, WIDTH), np.int32)
    for row, text in zip(padded, texts, strict=False):
        row[: len(text)] = text
    chosen = np.asarray(dense_routes(WEIGHTS, padded))
    counts = [
        len({expert for i, text in enumerate(texts) for expert in layer[i, len(text) - 1].tolist()})
        for layer in chosen
    ]
    assert len(counts) == MIXTURE.num_layers
    return float(np.float32(sum(counts)) / np.float32(len(counts)))


@pytest.mark.slow
def test_rounds_report_the_experts_of_real_rows() -> None:
    """Neither padding nor the drafts that a packed tier leaves out count."""
    chain = DraftShape.chain(3)
    tier = chain._replace(packed=2)
    algorithm = algorithm_of(EAGLE3)
    config = runner_config(
        algorithm=algorithm,
        shapes=(chain, tier),
        rounds_per_dispatch=ROUNDS,
        reads_confidence=True,
    )
    networks = algorithm.networks(MIXTURE, EAGLE3, implementation="xla")
    runner = new_runner(networks, config, WEIGHTS, head_weights(EAGLE3))
    texts, slots = {}, [1, 2, 3]
    for slot, prompt, budget in zip(slots, PROMPTS, BUDGETS, strict=True):
        runner.set_slot(slot, SamplingParams(temperature=0.0), seed=0)
        runner.set_pages(slot, range(1 + 20 * (slot - 1), 1 + 20 * slot))
        first = runner.prefill([Chunk(slot, prompt, 0, None, budget)])
        texts[slot] = [*prompt, int(first.read()[0])]
    expected, numbers = [], []

    def watch(slots: Any, tree: Any, verified: Any) -> None:
        tree, counts = jax.tree.map(np.asarray, (tree, verified.num_accepted_tokens))
        accepted, ends = np.asarray(verified.accept_tokens), []
        for i, slot in enumerate(np.asarray(slots).tolist()):
            if counts[i] == 0:
                continue
            assert texts[slot][-1] == tree.draft_tokens[i, 0]
            for node in range(1 + tree.num_proposed[i]):
                path = tree.draft_tokens[i][tree.tree_mask[i, node]].tolist()
                ends.append(texts[slot][:-1] + path)
            texts[slot] += accepted[i, : counts[i]].tolist()
        expected.append(mean_distinct(ends) if ends else 0.0)
        numbers.append(len(ends))

    for _ in range(4):
        before = jax.tree.map(jnp.copy, runner.on_device)
        joined = runner.round(slots, tier).read()
        runner.on_device = before
        runner.watch_rounds(watch)
        split = runner.round(slots, tier).read()
        runner.watch_rounds(None)
        np.testing.assert_array_equal(joined, split)
        assert joined.shape[1] == 4 + 1  # the batch bucket, and one more row
        found = joined[:, 4].view(np.float32)
        assert found.tolist() == [[x] * found.shape[1] for x in expected[-ROUNDS:]]
    assert len(set(expected)) > 2
    assert max(numbers) > 3
    assert min(numbers) == 4  # of 8 rows

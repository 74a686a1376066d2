"""Adjusted logits of chains and trees, compared with numpy, and a processor with state."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling import logit_processor as processors
from specjax.sampling.logit_processor import LogitInputs, LogitProcessor, NewTokens, adjust_logits
from specjax.sampling.params import SamplingParams
from specjax.speculative.tree import chain_input
from specjax.testing import EAGLE3, adjusted_logits
from specjax.types import DraftShape, SamplingTable, VerifyInput

from ..support.runners import copied_weights, make_runner, new_runner
from ..support.sampling_tables import sampling_rows
from ..support.schedulers import Serving

V = 23
ENDS = (2, 11)
NEUTRAL = SamplingParams(temperature=0.0)
ROWS = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(frequency_penalty=0.5),
    SamplingParams(presence_penalty=-1.2),
    NEUTRAL,
    SamplingParams(logit_bias={0: 2.0, "22": -5.5}),
    SamplingParams(min_new_tokens=6),
    SamplingParams(
        repetition_penalty=0.6,
        frequency_penalty=-0.3,
        presence_penalty=0.9,
        logit_bias={3: -1.0, 2: 40.0},
        min_new_tokens=5,
    ),
]
PROMPT_LENS = [4, 1, 6, 3, 7, 2, 5]
NUM_PRODUCED = [3, 1, 6, 2, 4, 4, 2]


def inputs_of(table: SamplingTable, history: jax.Array) -> LogitInputs:
    return LogitInputs(table, history, jnp.arange(len(history)))


@jax.jit
def jit_adjust(
    logits: jax.Array, tree: VerifyInput, table: SamplingTable, history: jax.Array
) -> jax.Array:
    return adjust_logits(tree, logits, (), inputs_of(table, history))


def random_tree(rng, rows, seq_lens):
    """Trees in which any earlier row may be the parent; the few distinct tokens repeat."""
    batch = len(seq_lens)
    parents = np.full((batch, rows), -1, np.int32)
    depth = np.zeros((batch, rows), np.int32)
    mask = np.zeros((batch, rows, rows), bool)
    mask[:, 0, 0] = True
    for b in range(batch):
        for i in range(1, rows):
            parents[b, i] = rng.integers(0, i)
            depth[b, i] = depth[b, parents[b, i]] + 1
            mask[b, i] = mask[b, parents[b, i]]
            mask[b, i, i] = True
    return VerifyInput(
        draft_tokens=jnp.asarray(rng.integers(0, 5, size=(batch, rows)), jnp.int32),
        num_proposed=jnp.full(batch, rows - 1, jnp.int32),
        parents=jnp.asarray(parents),
        positions=jnp.asarray(seq_lens[:, None] + depth),
        tree_mask=jnp.asarray(mask),
    )


def random_case(seed, kind, rows):
    """Logits, trees after histories, and the histories, with noise in their unwritten part."""
    rng = np.random.default_rng(seed)
    batch = len(ROWS)
    lens = np.array(PROMPT_LENS) + NUM_PRODUCED
    seq_lens = (lens - 1).astype(np.int32)  # the last token is the root, and not in the pool
    if kind == "chain":
        tokens = rng.integers(0, 5, size=(batch, rows))
        tree = chain_input(jnp.asarray(tokens, jnp.int32), jnp.asarray(seq_lens))
    else:
        tree = random_tree(rng, rows, seq_lens)
    history = rng.integers(0, V, size=(batch, 20)).astype(np.int32)
    history[:, :12] %= 7
    history[np.arange(batch), seq_lens] = np.asarray(tree.draft_tokens)[:, 0]
    logits = 3 * rng.normal(size=(batch, rows, V)).astype(np.float32)
    table = sampling_rows(ROWS, V, end_token_ids=ENDS)
    prompt_lens = jnp.array(PROMPT_LENS, jnp.int32)
    table = replace(table, prompt_lens=prompt_lens)
    return jnp.asarray(logits), tree, table, jnp.asarray(history)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rows"), [("chain", 1), ("chain", 5), ("tree", 7)])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_is_penalised_for_its_own_path(kind, rows, seed):
    logits, tree, table, history = random_case(seed, kind, rows)
    found = np.asarray(jit_adjust(logits, tree, table, history))
    for b, params in enumerate(ROWS):
        text = history[b, : PROMPT_LENS[b] + NUM_PRODUCED[b]].tolist()
        for t in range(rows):
            path, at = [], t
            while at > 0:
                path.insert(0, int(tree.draft_tokens[b, at]))
                at = int(tree.parents[b, at])
            whole = text + path
            prompt, produced = whole[: PROMPT_LENS[b]], whole[PROMPT_LENS[b] :]
            truth = adjusted_logits(logits[b, t], prompt, produced, params, ENDS)
            np.testing.assert_allclose(found[b, t], truth, rtol=1e-5, atol=1e-5)
    neutral = ROWS.index(NEUTRAL)
    np.testing.assert_array_equal(found[neutral], np.asarray(logits)[neutral])


class Remainders(LogitProcessor):
    """Forbids tokens with the same remainder as the sum of the request's produced tokens."""

    def abstract_state(self, num_slots: int, vocab_size: int) -> Any:
        return jax.ShapeDtypeStruct((num_slots,), jnp.int32)

    def adjust(
        self, tree: VerifyInput, logits: jax.Array, state: Any, inputs: LogitInputs
    ) -> jax.Array:
        path = jnp.where(tree.tree_mask[:, :, 1:], tree.draft_tokens[:, None, 1:], 0)
        total = (state[:, None] + path.sum(axis=2))[:, :, None]
        tokens = jnp.arange(logits.shape[2])
        return jnp.where((tokens - total) % 3 == 0, -jnp.inf, logits)

    def advance(self, state: Any, new: NewTokens) -> Any:
        offsets = jnp.arange(new.tokens.shape[1])
        is_produced = new.starts[:, None] + offsets >= new.sampling.prompt_lens[:, None]
        is_new = (offsets < new.counts[:, None]) & is_produced
        return (state + jnp.where(is_new, new.tokens, 0).sum(axis=1)) % 3


PROMPTS = [[7, 9, 20], list(range(6, 46)), [30] * 17, [8], [7, 9, 20, 11, 40, 13, 50, 51]]
SAMPLED = SamplingParams(temperature=0.8, max_new_tokens=40, ignore_eos=True)
KINDS = [replace(SAMPLED, temperature=0.0), SAMPLED, replace(SAMPLED, presence_penalty=0.7)]


@pytest.mark.slow
def test_state_follows_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts, few pages, chunked prompts and prompts in the prefix cache."""
    made, found = make_runner(EAGLE3, 3), []
    monkeypatch.setattr(processors, "PROCESSORS", (Remainders(), *processors.PROCESSORS))
    for shape in DraftShape.chain(0), DraftShape(3, 2, 6):
        config = replace(made.config, shapes=(shape,))
        runner = new_runner(made.networks, config, *copied_weights())
        requests = []
        for params in KINDS:
            serving = Serving(runner=runner, num_pages=26, run_ahead=1, is_cached=True)
            mine = serving.add(PROMPTS, params)
            serving.finish()
            mine += serving.add(PROMPTS[-1:], params)
            serving.finish()
            infos = [request.result()["meta_info"] for request in mine]
            assert sum(info["num_retractions"] for info in infos) > 0
            assert sum(info["cached_tokens"] for info in infos) > 0
            assert not shape.steps or sum(info["spec_num_correct_drafts"] for info in infos) > 0
            requests += mine
        found.append([request.output_ids for request in requests])
    assert found[0] == found[1]
    for ids in found[0]:
        assert len(ids) == 40
        assert ((np.array(ids[1:]) - np.cumsum(ids)[:-1]) % 3 != 0).all()

"""Adjusted logits of chains and trees against numpy, one path at a time."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling.params import SamplingParams
from specjax.sampling.penalties import adjust_logits, is_adjusting
from specjax.speculative.tree import chain_input
from specjax.testing import adjusted_logits
from specjax.types import VerifyInput

from ..speculative.tables import sampling_rows

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

jit_adjust = jax.jit(adjust_logits)


def random_tree(rng, rows, seq_lens):
    """Trees whose rows have any earlier row as parent; few distinct tokens, so that they repeat."""
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
    """Logits, trees behind histories, and the histories, whose unwritten part is noise."""
    rng = np.random.default_rng(seed)
    batch = len(ROWS)
    lens = np.array(PROMPT_LENS) + NUM_PRODUCED
    seq_lens = (lens - 1).astype(np.int32)  # the newest token is the root, and not in the pool
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


@pytest.mark.parametrize(("kind", "rows"), [("chain", 1), ("chain", 5), ("tree", 7)])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_is_charged_for_its_own_path(kind, rows, seed):
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


def test_the_cases_tell_paths_apart():
    """Rows of a tree differ in what they are charged for, else the test above shows little."""
    logits, tree, table, history = random_case(0, "tree", 7)
    same = jnp.broadcast_to(logits[:, :1], logits.shape)
    found = np.asarray(jit_adjust(same, tree, table, history))
    assert len({row.tobytes() for row in found[1]}) >= 4
    assert np.isinf(found[5]).any()
    assert not np.isinf(found[5]).all(axis=0).any()


@pytest.mark.parametrize(
    ("params", "produced", "is_on"),
    [
        (NEUTRAL, 0, False),
        (SamplingParams(temperature=0.7, top_k=3), 0, False),
        (SamplingParams(repetition_penalty=1.1), 0, True),
        (SamplingParams(frequency_penalty=-0.1), 9, True),
        (SamplingParams(presence_penalty=0.1), 9, True),
        (SamplingParams(logit_bias={0: 1.0}), 9, True),
        (SamplingParams(min_new_tokens=3), 2, True),
        (SamplingParams(min_new_tokens=3), 3, False),
    ],
)
def test_nothing_is_computed_where_nothing_changes(params, produced, is_on):
    table = sampling_rows([NEUTRAL, params], V, prompt_len=4)
    lens = jnp.array([3, 4 + produced - 1], jnp.int32)
    tree = chain_input(jnp.zeros((2, 3), jnp.int32), lens)
    assert bool(is_adjusting(tree, table)) == is_on

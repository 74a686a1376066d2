"""Draws given the drafts of a row: distributions over many seeds, and rows left unchanged."""

from dataclasses import replace
from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binomtest, chi2_contingency, chisquare

from specjax.sampling.accept_draws import (
    COUPLED,
    Acceptance,
    draw_coins,
    rejection_tokens,
    threshold_tokens,
)
from specjax.sampling.draw import SamplingConfig, draft_probs, draft_tokens, target_tokens
from specjax.sampling.logit_processor import LogitInputs
from specjax.sampling.params import SamplingParams
from specjax.speculative.tree import chain_input
from specjax.types import VerifyInput

from ..support.sampling_tables import equal_rows, sampling_rows

pytestmark = pytest.mark.slow

V, MANY = 6, 20_000
RNG = np.random.default_rng(7)
TARGET, DRAFT = (1.3 * RNG.normal(size=(rows, V)).astype(np.float32) for rows in (6, 2))
REJECTION = Acceptance(uses_rejection=True)
PARAMS = SamplingParams(temperature=0.9, top_k=5)
IDS = np.asarray([5, 0, 3, 2], np.int32)  # columns of a draft that lacks two tokens
# rows 1, 3 and 4 are children of the root, row 2 is a child of row 1; row 5 is padding
PARENTS = np.asarray([-1, 0, 1, 0, 0, 0], np.int32)
CHILDREN = {0: [4, 1, 3], 1: [2]}  # tokens by parent row


def many(leaf) -> jax.Array:
    """Repeat a leaf for every seed."""
    return jnp.broadcast_to(jnp.asarray(leaf), (MANY, *np.shape(leaf)))


def softmax(logits, params: SamplingParams) -> np.ndarray:
    """The distribution f64 ``[V]`` after temperature and top-k."""
    scaled = np.asarray(logits, np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    if params.top_k > 0:
        weights[np.argsort(-scaled)[params.top_k :]] = 0
    return weights / weights.sum()


def assert_follows(tokens, probs: np.ndarray) -> None:
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=len(probs))
    assert not counts[probs == 0].any()
    kept = probs > 0
    assert kept.sum() == 1 or chisquare(counts[kept], probs[kept] * counts.sum()).pvalue > 1e-4


def drafted_chain(table, logits, ids=None, seq_len: int = 7) -> VerifyInput:
    """Chains of two drafts, drawn from fixed logits ``[2, W]``."""
    config, rows = SamplingConfig(acceptance=REJECTION), many(logits)
    positions = many(np.asarray([1, 2], np.int32) + seq_len)
    columns = jit_drafts(rows, ids, positions, table, config=config, topk=1)[1][..., 0]
    tokens = columns if ids is None else jnp.asarray(ids)[columns]
    probs = jax.jit(partial(draft_probs, config=config, vocab_size=V))(rows, ids, table)
    roots = jnp.zeros((MANY, 1), jnp.int32)
    tree = chain_input(jnp.concatenate([roots, tokens], axis=1), many(np.int32(seq_len)))
    return replace(tree, draft_probs=probs)


def fixed_tree() -> VerifyInput:
    tokens = np.asarray([0, 4, 2, 1, 3, 5], np.int32)
    mask = np.eye(6, dtype=bool) | (PARENTS == 0)[:, None] & (np.arange(6) == 0)
    return VerifyInput(
        draft_tokens=many(tokens),
        num_proposed=many(np.int32(4)),
        parents=many(PARENTS),
        positions=many(np.asarray([7, 8, 9, 8, 8, 8], np.int32)),
        tree_mask=many(mask),
    )


jit_drafts = jax.jit(draft_tokens, static_argnames=("config", "topk"))
jit_rejection = jax.jit(rejection_tokens)
jit_thresholds = jax.jit(threshold_tokens, static_argnames="acceptance")


@partial(jax.jit, static_argnames="config")
def jit_target(logits, tree, table, history, slots, config):
    return target_tokens(logits, tree, LogitInputs(table, history, slots), config)


def drawn(logits, tree: VerifyInput, table, acceptance: Acceptance) -> jax.Array:
    batch = tree.positions.shape[0]
    slots, history = jnp.arange(batch, dtype=jnp.int32), jnp.zeros((batch, 16), jnp.int32)
    config = SamplingConfig(acceptance=acceptance)
    return jit_target(logits, tree, table, history, slots, config=config)[0]


@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "smaller"])
def test_rejection_keeps_the_distribution(ids):
    """Of each row and of both jointly; the acceptance rate is the overlap of the distributions."""
    table, logits = equal_rows(MANY, PARAMS, V), DRAFT if ids is None else DRAFT[:, :4]
    tree = drafted_chain(table, logits, ids)
    tokens = drawn(many(TARGET[:3]), tree, table, REJECTION)
    p = [softmax(row, PARAMS) for row in TARGET]
    for row in range(3):
        assert_follows(tokens[:, row], p[row])
    assert_follows(tokens[:, 0] * V + tokens[:, 1], np.outer(p[0], p[1]).ravel())
    shared = []
    for row in range(2):
        q = np.zeros(V)
        if ids is None:
            q = softmax(logits[row], PARAMS)
        else:
            q[ids] = softmax(logits[row], PARAMS)
        np.testing.assert_allclose(tree.draft_probs[0, row], q, atol=1e-6)
        assert_follows(tree.draft_tokens[:, row + 1], q)
        shared.append(np.minimum(p[row], q).sum())
    accepted = num_accepted(tree, tokens)
    for count, rate in ((1, shared[0]), (2, shared[0] * shared[1])):
        hits = int((accepted >= count).sum())
        assert binomtest(hits, MANY, rate).pvalue > 1e-4


def num_accepted(tree: VerifyInput, tokens: jax.Array) -> np.ndarray:
    """Number of leading drafts of a chain that agree with the tokens."""
    agrees = np.asarray(tree.draft_tokens)[:, 1:] == np.asarray(tokens)[:, :-1]
    return np.cumprod(agrees, axis=1).sum(1)


def by_thresholds(p: np.ndarray, children: list[int], single: float, acc: float) -> np.ndarray:
    """The distribution at a row: each child gets the coins that earlier children left."""
    found, taken, summed = np.zeros_like(p), 0.0, 0.0
    for child in children:
        summed += p[child]
        reach = 1.0 if p[child] >= single else min(1.0, summed / max(acc, 1e-9))
        found[child], taken = max(0.0, reach - taken), max(reach, taken)
    rest = p.copy()
    rest[children] = 0
    return found + (1 - taken) * rest / rest.sum()


@pytest.mark.parametrize(
    ("single", "acc"),
    [(1.0, 1.0), (1.0, 0.7), (0.25, 1.0), (0.3, 0.8), (0.1, 0.9), (0.0, 1.0), (1.0, 0.0)],
)
def test_thresholds_mix_as_they_say(single, acc):
    """With both at 1 this is the target's distribution; a leaf always draws from it."""
    how = Acceptance(threshold_single=single, threshold_acc=acc)
    table, tree = equal_rows(MANY, PARAMS, V), fixed_tree()
    p = [softmax(row, PARAMS) for row in TARGET]
    probs = many(np.stack(p).astype(np.float32))
    tokens = jit_thresholds(probs, tree, table.seeds, acceptance=how)
    for row, children in CHILDREN.items():
        expected = by_thresholds(p[row], children, single, acc)
        assert_follows(tokens[:, row], expected)
        if how.is_coupled:
            np.testing.assert_allclose(expected, p[row])
    assert_follows(tokens[:, 2], p[2])
    if acc == 0.7:  # also with logits, where rows without children keep the plain draw
        whole = drawn(many(TARGET), tree, table, how)
        np.testing.assert_array_equal(whole[:, :2], tokens[:, :2])
        plain = drawn(many(TARGET), tree, table, COUPLED)
        np.testing.assert_array_equal(whole[:, 2:], plain[:, 2:])


def test_thresholds_of_0_accept_drafts():
    """A single threshold of 0 accepts every draft; the other one, drafts of probability above 0."""
    batch = 50
    table = equal_rows(batch, PARAMS, V)
    tree = jax.tree.map(lambda leaf: leaf[:batch], fixed_tree())
    probs = np.tile(np.asarray([0.4, 0.3, 0.2, 0.1, 0, 0], np.float32), (batch, 6, 1))
    with jax.debug_nans(True):  # nothing divides 0 by 0, which would go unnoticed inside jit
        single, acc = (
            np.asarray(threshold_tokens(jnp.asarray(probs), tree, table.seeds, how))
            for how in (Acceptance(threshold_single=0.0), Acceptance(threshold_acc=0.0))
        )
    first, other = CHILDREN[0][:2]
    assert probs[0, 0, first] == 0 < probs[0, 0, other]
    assert (single[:, 0] == first).all()
    assert (acc[:, 0] == other).all()
    assert (single[:, 1] == CHILDREN[1]).all()
    assert (acc[:, 1] == CHILDREN[1]).all()


@pytest.mark.parametrize("broken", ["nan", "one nan", "inf", "zeros"])
def test_a_row_of_broken_probabilities_counts_as_no_draft(broken):
    """Its token is drawn from the target's distribution, in both implementations."""
    table = equal_rows(MANY, PARAMS, V)
    tree = drafted_chain(table, DRAFT)
    value = {"nan": jnp.nan, "one nan": jnp.nan, "inf": jnp.inf, "zeros": 0.0}[broken]
    place = np.s_[:, 0, 3] if broken == "one nan" else np.s_[:, 0]
    tree = replace(tree, draft_probs=tree.draft_probs.at[place].set(value))
    probs = np.stack([softmax(row, PARAMS) for row in TARGET[:3]])
    target = many(probs.astype(np.float32))
    tokens = np.asarray(jit_rejection(target, tree, table.seeds))
    for row in range(3):
        assert_follows(tokens[:, row], probs[row])
    assert_follows(tokens[:, 0] * V + tokens[:, 1], np.outer(probs[0], probs[1]).ravel())
    few = jax.tree.map(lambda leaf: leaf[:50], (target, tree, table.seeds))
    np.testing.assert_array_equal(rejection_tokens(*few, implementation="interpret"), tokens[:50])


def test_streams_are_independent():
    """Coins, drafts, residual draws and the target's draws of one seed and position."""
    params = SamplingParams(temperature=1.0)
    table, flat = equal_rows(MANY, params, V), np.zeros((2, V), np.float32)
    tree = replace(drafted_chain(table, flat), num_proposed=many(np.int32(0)))
    uniform = many(np.full((3, V), 1 / V, np.float32))
    streams = {
        "draft": tree.draft_tokens[:, 1],
        "coin": (draw_coins(table.seeds, tree)[:, 0] * V).astype(jnp.int32),
        "residual": jit_thresholds(uniform, tree, table.seeds, acceptance=COUPLED)[:, 0],
        "target": drawn(jnp.zeros((MANY, 3, V)), tree, table, COUPLED)[:, 0],
    }
    for one in streams.values():
        assert_follows(one, np.full(V, 1 / V))
    for one, other in combinations(streams, 2):
        pairs = np.zeros((V, V))
        np.add.at(pairs, (np.asarray(streams[one]), np.asarray(streams[other])), 1)
        assert chi2_contingency(pairs).pvalue > 1e-4, (one, other)


@pytest.mark.parametrize("acceptance", [REJECTION, Acceptance(threshold_acc=0.5)], ids=str)
def test_greedy_rows_and_rows_without_proposals_draw_plainly(acceptance):
    table = equal_rows(MANY, PARAMS, V)
    tree = drafted_chain(table, DRAFT)
    logits = many(TARGET[:3])
    index = np.arange(MANY)
    table = replace(table, temperatures=jnp.where(index % 3 == 0, 0.0, table.temperatures))
    tree = replace(tree, num_proposed=jnp.where(index % 3 == 1, 0, tree.num_proposed))
    plain, ours = (np.asarray(drawn(logits, tree, table, how)) for how in (COUPLED, acceptance))
    np.testing.assert_array_equal(ours[index % 3 < 2], plain[index % 3 < 2])
    assert (ours[index % 3 == 2, :2] != plain[index % 3 == 2, :2]).any(0).all()
    np.testing.assert_array_equal(ours[:, 2], plain[:, 2])


@pytest.mark.parametrize("acceptance", [REJECTION, Acceptance(threshold_acc=0.5)], ids=str)
def test_a_row_does_not_depend_on_its_batch_nor_on_broken_rows(acceptance):
    table = equal_rows(MANY, PARAMS, V)
    tree = drafted_chain(table, DRAFT)
    logits = many(TARGET[:3])
    tokens = np.asarray(drawn(logits, tree, table, acceptance))
    for row in range(50, 53):
        inputs = jax.tree.map(lambda leaf, i=row: leaf[i : i + 1], (logits, tree, table))
        np.testing.assert_array_equal(drawn(*inputs, acceptance)[0], tokens[row])
    probs = tree.draft_probs.at[0].set(jnp.nan).at[1].set(0.0)
    tree = replace(tree, draft_probs=probs)
    logits = logits.at[0].set(jnp.nan).at[1].set(-jnp.inf)
    broken = np.asarray(drawn(logits, tree, table, acceptance))
    np.testing.assert_array_equal(broken[2:], tokens[2:])
    assert ((broken >= 0) & (broken < V)).all()


def test_a_draft_from_the_targets_distribution_is_accepted():
    table = equal_rows(MANY, PARAMS, V)
    tree = drafted_chain(table, TARGET[:2])
    tokens = drawn(many(TARGET[:3]), tree, table, REJECTION)
    assert (num_accepted(tree, tokens) == 2).mean() > 0.9999
    # rounding may reject a draft and leave no residual
    p = np.stack([softmax(row, PARAMS) for row in TARGET[:3]])
    tokens = jit_rejection(many((p / 2).astype(np.float32)), tree, table.seeds)
    for row in range(2):
        assert_follows(tokens[:, row], p[row])


def test_drafts_for_thresholds_are_the_likeliest():
    table = sampling_rows([PARAMS] * 2, V)
    logits, positions = jnp.asarray(DRAFT)[None], jnp.asarray([[3, 4]], jnp.int32)
    logits, positions = (jnp.repeat(each, 2, axis=0) for each in (logits, positions))
    config = SamplingConfig(acceptance=Acceptance(threshold_single=0.5))
    scores, columns = jit_drafts(logits, None, positions, table, config=config, topk=3)
    best = np.argsort(-DRAFT, axis=1)[:, :3]
    free = replace(PARAMS, top_k=-1)
    shares = [softmax(row, free)[top] for row, top in zip(DRAFT, best, strict=True)]
    for row in range(2):
        np.testing.assert_array_equal(columns[row], best)
        np.testing.assert_allclose(scores[row], shares, rtol=1e-5)


def test_rejection_needs_probabilities():
    tree = chain_input(jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="draft_probs=None"):
        rejection_tokens(jnp.ones((1, 2, V)), tree, jnp.zeros((1, 2), jnp.uint32))

"""Verified trees, except for the walk, which tests/kernels/test_accept_tree.py covers."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling.params import SamplingParams
from specjax.speculative.future_map import FutureMap
from specjax.speculative.tree import (
    accept,
    chain_input,
    drawn_count,
    simulated_path,
    simulated_tokens,
    spread_count,
    take,
    tree_input,
    truncate,
)
from specjax.types import DraftShape, NodeOutputs, RoundResults, VerifyInput

from ..support.sampling_tables import equal_rows, sampling_rows

# rows visible to each row of a tree with two paths
SEES = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0],
    [1, 1, 0, 1, 0, 0],
    [1, 0, 1, 0, 1, 0],
    [1, 0, 1, 0, 1, 1],
]


def accepted(tree, outputs, is_request, shape):
    """Accept without end tokens, in slots from 1 on."""
    batch = len(is_request)
    slots = jnp.where(is_request, jnp.arange(1, batch + 1, dtype=jnp.int32), 0)
    zeros = jnp.zeros(batch + 1, jnp.int32)
    future = FutureMap((), zeros, zeros, zeros + 99, jnp.zeros((batch + 1, 64), jnp.int32))
    ends = jnp.full((batch, 1), -1, jnp.int32)
    return accept(tree, outputs, future, slots, ends, shape)[0]


def test_the_first_rows_of_a_tree_are_a_tree() -> None:
    lens, tokens = jnp.array([5, 9]), jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    leaves = {"draft_probs": jnp.ones((2, 5, 7)), "draft_rows": tokens}
    whole = replace(chain_input(tokens, lens, jnp.array([5, 2])), **leaves)
    cut = replace(chain_input(tokens[:, :4], lens, jnp.array([3, 2])), draft_rows=tokens[:, :4])
    cut = replace(cut, draft_probs=leaves["draft_probs"][:, :3])
    assert jax.tree.all(jax.tree.map(np.array_equal, truncate(whole, 4), cut))
    assert truncate(whole, 6) is whole


def test_mask_and_positions_follow_from_the_parents() -> None:
    tokens, lens = jnp.arange(6, dtype=jnp.int32)[None], jnp.array([5], jnp.int32)
    parents = jnp.array([[-1, 0, 0, 1, 2, 4]], jnp.int32)
    tree = tree_input(tokens, parents, lens)
    assert tree.tree_mask.tolist() == [np.array(SEES, bool).tolist()]
    assert tree.positions.tolist() == [[5, 6, 6, 7, 7, 8]]
    assert tree.num_proposed.tolist() == [5]
    shallow = tree_input(tokens, parents, lens, tree.num_proposed, depth=3)
    assert jax.tree.all(jax.tree.map(np.array_equal, shallow, tree))


def test_some_nodes_of_a_tree_are_a_tree() -> None:
    parents = jnp.array([[-1, 0, 0, 1, 2, 4]], jnp.int32)
    tokens, lens = 10 + jnp.arange(6, dtype=jnp.int32)[None], jnp.array([5], jnp.int32)
    after = jnp.arange(5.0)[None]
    tree = replace(tree_input(tokens, parents, lens), draft_rows=tokens, confidences=after)
    nodes = jnp.array([[0, 2, 4, 1]], jnp.int32)
    taken = tree_input(10 + nodes, jnp.array([[-1, 0, 1, 0]]), lens, tree.num_proposed)
    taken = replace(taken, draft_rows=10 + nodes, confidences=jnp.array([[1.0, 3.0, 0.0]]))
    assert jax.tree.all(jax.tree.map(np.array_equal, take(tree, nodes), taken))


@pytest.mark.parametrize("has_confidences", [False, True])
def test_results_are_unpacked_as_they_were_packed(has_confidences: bool) -> None:
    tokens, bits = np.arange(6).reshape(2, 3), 50 + np.arange(4).reshape(2, 2)
    counts = np.array([[7, 8, 9], [17, 18, 19]])
    results = RoundResults(tokens, bits[:, : 2 * has_confidences], *counts.T)
    packed = np.asarray(results.pack())
    assert packed.shape == (2, 3 + 2 * has_confidences + 3)
    assert packed[:, -3:].tolist() == counts.tolist()
    again = RoundResults.unpack(packed, 3)
    assert [x.tolist() for x in again] == [x.tolist() for x in results]


def test_chain_layout():
    tree = chain_input(jnp.array([[7, 8, 9]], jnp.int32), jnp.array([5], jnp.int32))
    assert tree.parents.tolist() == [[-1, 0, 1]]
    assert tree.positions.tolist() == [[5, 6, 7]]
    assert tree.tree_mask[0].tolist() == np.tri(3, dtype=bool).tolist()


@pytest.mark.slow
def test_all_outputs_of_rows_are_compacted():
    """An additional output of the target's rows needs no change in acceptance."""

    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class WithExperts(NodeOutputs):
        experts: jax.Array | None = None  # i32 [B, T, 3]

    tree = VerifyInput(
        draft_tokens=jnp.array([[0, 1, 2, 3]], jnp.int32),
        num_proposed=jnp.array([3], jnp.int32),
        parents=jnp.array([[-1, 0, 0, 2]], jnp.int32),
        positions=jnp.array([[5, 6, 6, 7]], jnp.int32),
        tree_mask=jnp.ones((1, 4, 4), bool),
    )
    rows = jnp.arange(4, dtype=jnp.int32)[None]
    outputs = WithExperts(
        tokens=jnp.array([[2, 9, 3, 8]], jnp.int32),
        features=rows[..., None].astype(jnp.float32),
        hidden_states=10 + rows[..., None],
        experts=jnp.repeat(100 + rows[..., None], 3, axis=2),
    )
    found = accepted(tree, outputs, jnp.ones(1, bool), DraftShape(3, 2, 4)).outputs
    assert found.tokens.tolist() == [[2, 3, 8, 0]]
    assert found.features[0, :, 0].tolist() == [0, 2, 3, 0]
    assert found.hidden_states[0, :, 0].tolist() == [10, 12, 13, 0]
    assert found.experts[0].tolist() == [[100] * 3, [102] * 3, [103] * 3, [0] * 3]


@pytest.mark.slow
def test_simulated_acceptance_follows_the_deepest_path():
    """The mean number of drafts is as requested, limited to those that exist."""
    lens = jnp.arange(200, dtype=jnp.int32)
    rows = jnp.array([0, 1, 2, 3, 4, 5], jnp.int32)
    tree = VerifyInput(
        draft_tokens=jnp.broadcast_to(rows, (200, 6)),
        num_proposed=jnp.full(200, 5, jnp.int32),
        parents=jnp.broadcast_to(jnp.array([-1, 0, 0, 1, 2, 4], jnp.int32), (200, 6)),
        positions=lens[:, None] + jnp.array([0, 1, 1, 2, 2, 3], jnp.int32),
        tree_mask=jnp.broadcast_to(jnp.array(SEES, bool), (200, 6, 6)),
    )
    count = spread_count(lens, 4, 2.5)
    path = simulated_path(tree, 4, jnp.where(lens > 0, count, -1))
    assert path[0].tolist() == [-1] * 5
    assert {tuple(row) for row in path[1:].tolist()} == {(0, 2, -1, -1, -1), (0, 2, 4, -1, -1)}
    assert abs(float((path[1:] > 0).sum(1).mean()) - 1.5) < 0.02
    path = simulated_path(tree, 4, spread_count(lens, 4, 5.0))
    assert path[0].tolist() == [0, 2, 4, 5, -1]
    assert set((path > 0).sum(1).tolist()) == {3}
    ends = jnp.full((200, 2), 6, jnp.int32)
    tokens = simulated_tokens(tree, path, ends)
    assert set(tokens[:, 5].tolist()) == {7}  # neither drafted nor an end token
    outputs = NodeOutputs(tokens, jnp.zeros((200, 6, 1)))
    walked = accepted(tree, outputs, lens >= 0, DraftShape(4, 2, 6))
    assert walked.accept_index.tolist() == path.tolist()
    few = replace(tree, num_proposed=jnp.full(200, 3, jnp.int32))
    path = simulated_path(few, 4, spread_count(lens, 4, 5.0))
    assert path[0].tolist() == [0, 1, 3, -1, -1]
    assert set((path > 0).sum(1).tolist()) == {2}


@pytest.mark.slow
@pytest.mark.parametrize("chance", [0.0, 0.05, 0.3, 0.6, 0.9, 1.0])
def test_accepted_runs_have_the_length_of_the_formula(chance):
    """1 + a + ... + a^S tokens on average, in any tier; a shorter tier cuts the same runs."""
    many = 20_000
    table = equal_rows(many, SamplingParams(simulate_acceptance=chance), 61)
    lens = jnp.arange(many, dtype=jnp.int32) % 1000
    runs = np.asarray(drawn_count(lens, 7, table))
    for steps in (0, 1, 3, 7):
        counts = np.asarray(drawn_count(lens, steps, table))
        np.testing.assert_array_equal(counts, np.minimum(runs, steps))
        expected = sum(chance**depth for depth in range(1, steps + 1))
        error = 5 * counts.std() / many**0.5
        assert counts.mean() == pytest.approx(expected, abs=error + 1e-6)


@pytest.mark.slow
def test_a_draw_depends_only_on_seed_position_and_probability():
    """Neighbours do not matter, and a round from a later position continues the same draws."""
    chances = [0.9, 0.3, 0.0, 0.6, 1.0, 0.8]
    table = sampling_rows([SamplingParams(simulate_acceptance=a) for a in chances], 61)
    lens = jnp.array([5, 9, 40, 5, 900, 31], jnp.int32)
    counts = np.asarray(drawn_count(lens, 7, table))
    assert counts[[2, 4]].tolist() == [0, 7]
    for i in range(len(chances)):
        alone = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], table)
        assert drawn_count(lens[i : i + 1], 7, alone).tolist() == counts[i : i + 1].tolist()
    hits = np.array([np.asarray(drawn_count(lens + at, 1, table)) for at in range(7)])
    runs = np.cumprod(hits, axis=0).sum(0)
    np.testing.assert_array_equal(counts, runs)
    # a larger probability accepts the same drafts and more
    likelier = replace(table, acceptances=jnp.minimum(1.0, table.acceptances + 0.1))
    assert (np.asarray(drawn_count(lens, 7, likelier)) >= counts).all()

"""The walk down a verified tree, against a brute-force walk in Python."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.speculative.future_map import FutureMap
from specjax.speculative.tree import accept, chain_input, simulated_path, simulated_tokens, truncate
from specjax.types import DraftShape, NodeOutputs, VerifyInput

ROWS, STEPS = 8, 7
# of a tree with two paths, what each row sees
SEES = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0],
    [1, 1, 0, 1, 0, 0],
    [1, 0, 1, 0, 1, 0],
    [1, 0, 1, 0, 1, 1],
]


def accepted(tree, outputs, is_request, shape):
    """Without end tokens, of slots 1 on."""
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


jit_accepted = jax.jit(accepted, static_argnums=3)


@st.composite
def trees(draw):
    """Random trees whose siblings hold distinct tokens, with the target's token at each row."""
    rows = ROWS
    parents, tokens, depth = [-1], [draw(st.integers(0, 3))], [0]
    for row in range(1, rows):
        parent = draw(st.integers(0, row - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = [t for t in range(12) if t not in taken]
        parents.append(parent)
        tokens.append(draw(st.sampled_from(free)))
        depth.append(depth[parent] + 1)
    target = []
    for row in range(rows):
        children = [t for t, p in zip(tokens, parents, strict=True) if p == row]
        target.append(draw(st.sampled_from(children)) if children and draw(st.booleans()) else 99)
    return parents, tokens, depth, target


def walk(parents, tokens, target, num_proposed, num_steps):
    path = [0]
    while len(path) <= num_steps:
        children = [i for i, p in enumerate(parents[: num_proposed + 1]) if p == path[-1]]
        hit = [i for i in children if tokens[i] == target[path[-1]]]
        if not hit:
            break
        path.append(hit[0])
    return path


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(0, ROWS - 1))
def test_accept_equals_a_walk(tree, num_proposed):
    """Nodes behind the proposed ones are padding: never accepted, whatever they hold."""
    parents, tokens, depth, target = tree
    steps, rows = STEPS, ROWS
    features = jnp.arange(1.0, rows + 1)[None, :, None].repeat(2, axis=0)
    both = lambda x: jnp.asarray([x, x], jnp.int32)  # noqa: E731
    inputs = VerifyInput(
        draft_tokens=both(tokens),
        num_proposed=both(num_proposed),
        parents=both(parents),
        positions=both(depth),
        tree_mask=jnp.ones((2, rows, rows), bool),
    )
    outputs = NodeOutputs(both(target), features)
    out = jit_accepted(inputs, outputs, jnp.array([True, False]), DraftShape(steps, 2, rows))

    path = walk(parents, tokens, target, num_proposed, steps)
    pad = steps + 1 - len(path)
    assert out.accept_index[0].tolist() == path + [-1] * pad
    assert out.num_proposed_drafts.tolist() == [num_proposed, 0]
    assert out.accept_tokens[0].tolist() == [target[i] for i in path] + [0] * pad
    assert int(out.num_accepted_drafts[0]) == len(path) - 1
    assert int(out.num_accepted_tokens[0]) == len(path)
    assert int(out.bonus_tokens[0]) == target[path[-1]]
    assert out.features[0, :, 0].tolist() == [i + 1.0 for i in path] + [0.0] * pad
    # the padding row accepts nothing
    assert out.accept_index[1].tolist() == [-1] * (steps + 1)
    counts = (out.num_accepted_drafts, out.num_accepted_tokens, out.bonus_tokens)
    assert [int(x[1]) for x in counts] == [0, 0, 0]
    assert not np.any(out.accept_tokens[1])
    assert not np.any(out.features[1])


def test_chain_layout():
    tree = chain_input(jnp.array([[7, 8, 9]], jnp.int32), jnp.array([5], jnp.int32))
    assert tree.parents.tolist() == [[-1, 0, 1]]
    assert tree.positions.tolist() == [[5, 6, 7]]
    assert tree.tree_mask[0].tolist() == np.tri(3, dtype=bool).tolist()


def test_chain_counts_by_depth():
    drafts = jnp.array([[1, 2, 3, 4]] * 4, jnp.int32)
    target = jnp.array([[2, 3, 4, 9], [2, 3, 9, 5], [2, 9, 4, 5], [9, 3, 4, 5]], jnp.int32)
    tree = chain_input(drafts, jnp.zeros(4, jnp.int32))
    outputs = NodeOutputs(target, jnp.zeros((4, 4, 1)))
    out = accepted(tree, outputs, jnp.ones(4, bool), DraftShape.chain(3))
    assert out.num_accepted_drafts.tolist() == [3, 2, 1, 0]
    assert out.bonus_tokens.tolist() == [9, 9, 9, 9]


def test_whatever_is_reported_by_row_is_compacted():
    """A further output of the target's rows needs no line in acceptance."""

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


def test_simulated_acceptance_follows_the_deepest_path():
    """As many drafts on average as asked for, and no more than there are."""
    lens = jnp.arange(200, dtype=jnp.int32)
    rows = jnp.array([0, 1, 2, 3, 4, 5], jnp.int32)
    tree = VerifyInput(
        draft_tokens=jnp.broadcast_to(rows, (200, 6)),
        num_proposed=jnp.full(200, 5, jnp.int32),
        parents=jnp.broadcast_to(jnp.array([-1, 0, 0, 1, 2, 4], jnp.int32), (200, 6)),
        positions=lens[:, None] + jnp.array([0, 1, 1, 2, 2, 3], jnp.int32),
        tree_mask=jnp.broadcast_to(jnp.array(SEES, bool), (200, 6, 6)),
    )
    path, count = simulated_path(tree, lens > 0, 4, 2.5)
    assert path[0].tolist() == [-1] * 5
    assert {tuple(row) for row in path[1:].tolist()} == {(0, 2, -1, -1, -1), (0, 2, 4, -1, -1)}
    assert abs(float(count[1:].mean()) - 1.5) < 0.02
    path, count = simulated_path(tree, lens >= 0, 4, 5.0)
    assert path[0].tolist() == [0, 2, 4, 5, -1]
    assert set(count.tolist()) == {3}
    ends = jnp.full((200, 2), 6, jnp.int32)
    tokens = simulated_tokens(tree, path, ends)
    assert set(tokens[:, 5].tolist()) == {7}  # neither drafted nor an end
    outputs = NodeOutputs(tokens, jnp.zeros((200, 6, 1)))
    walked = accepted(tree, outputs, lens >= 0, DraftShape(4, 2, 6))
    assert walked.accept_index.tolist() == path.tolist()
    few = replace(tree, num_proposed=jnp.full(200, 3, jnp.int32))
    path, count = simulated_path(few, lens >= 0, 4, 5.0)
    assert path[0].tolist() == [0, 1, 3, -1, -1]
    assert set(count.tolist()) == {2}

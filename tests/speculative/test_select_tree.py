"""Selection of tree nodes from candidates, compared with a Python implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.speculative.tree import chain_input, select_tree

BATCH = 2
# steps, topk, nodes; some trees use all candidates
SHAPES = ((1, 4, 4), (2, 3, 13), (3, 2, 6), (4, 2, 15), (3, 4, 12), (3, 1, 3))
jit_select = jax.jit(select_tree, static_argnames=("topk", "num_draft_tokens"))


def expand(rng, steps, topk, values):
    """Scores, tokens and parents of candidates, level by level as in drafting."""
    scores = [sorted(rng.choice(values, topk).tolist(), reverse=True)]
    parents, above = [-1, *range(topk)], list(range(topk))
    pool = list(scores[0])
    for level in range(steps - 1):
        drafted = [
            pool[parent] * p
            for parent in above
            for p in sorted(rng.choice(values, topk).tolist(), reverse=True)
        ]
        pool += drafted
        if level < steps - 2:
            order = sorted(range(topk**2), key=lambda i, d=drafted: (-d[i], i))[:topk]
            above = [topk + level * topk**2 + i for i in order]
            parents += above
    return pool, rng.integers(0, 50, len(pool)).tolist(), parents


def reference(root, pool, tokens, parent_list, topk, nodes):
    """Tokens, parents, depths and visible rows of the selected nodes."""
    chosen = sorted(sorted(range(len(pool)), key=lambda c: (-pool[c], c))[: nodes - 1])
    parents, depths, seen = [-1], [0], [{0}]
    for c in chosen:
        above = None if c < topk else parent_list[(c - topk) // topk + 1]
        row = 0 if above is None else 1 + chosen.index(above)
        parents.append(row)
        depths.append(depths[row] + 1)
        seen.append(seen[row] | {len(seen)})
    mask = [[j in rows for j in range(nodes)] for rows in seen]
    return [root, *(tokens[c] for c in chosen)], parents, depths, mask


@pytest.mark.slow
@settings(max_examples=80)
@given(
    shape=st.sampled_from(SHAPES),
    values=st.sampled_from([(0.9, 0.5, 0.25), (0.5,), (0.0, 0.5), (1.0,), (0.0,), (1e-30, 1e-20)]),
    seed=st.integers(0, 2**16),
)
def test_equals_a_selection_in_python(shape, values, seed):
    """Also with ties and zeros: parents precede their children, and are selected with them."""
    check(shape, values, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("values", [(0.9, 0.5), (0.5,), (0.0, 1.0), (0.0,)], ids=str)
@pytest.mark.parametrize("shape", [(6, 16, 17), (6, 16, 64), (3, 4, 16)], ids=str)
def test_selection_on_gpu(shape, values):
    """More than a thousand candidates, most of them equal."""
    check(shape, values, 1)


def check(shape, values, seed):
    steps, topk, nodes = shape
    rng = np.random.default_rng(seed)
    rows = [expand(rng, steps, topk, np.float32(values)) for _ in range(BATCH)]
    pool, tokens, parents = (np.array(part) for part in zip(*rows, strict=True))
    roots = rng.integers(0, 50, BATCH)
    lens = jnp.full(BATCH, 7, jnp.int32)
    found, _ = jit_select(
        jnp.asarray(roots, jnp.int32),
        lens,
        lens,
        jnp.asarray(pool, jnp.float32),
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(parents, jnp.int32),
        topk=topk,
        num_draft_tokens=nodes,
    )
    pool = np.float32(pool)
    for b in range(BATCH):
        truth = reference(roots[b], pool[b], tokens[b], parents[b].tolist(), topk, nodes)
        ours = (found.draft_tokens, found.parents, found.positions - 7, found.tree_mask)
        for mine, right in zip(ours, truth, strict=True):
            np.testing.assert_array_equal(mine[b], right)


def test_one_branch_is_the_chain():
    scores = jnp.asarray([[0.5, 0.25, 0.25], [1.0, 1.0, 0.0]])
    tokens = jnp.asarray([[7, 8, 9], [3, 3, 3]], jnp.int32)
    parents = jnp.asarray([[-1, 0, 1]] * 2, jnp.int32)
    roots, lens = jnp.asarray([5, 6], jnp.int32), jnp.asarray([11, 0], jnp.int32)
    real = jnp.full(2, 3, jnp.int32)
    ours, _ = select_tree(roots, lens, real, scores, tokens, parents, topk=1, num_draft_tokens=4)
    chain = chain_input(jnp.concatenate([roots[:, None], tokens], axis=1), lens)
    for mine, right in zip(jax.tree.leaves(ours), jax.tree.leaves(chain), strict=True):
        np.testing.assert_array_equal(mine, right)


@pytest.mark.parametrize("nodes", [1, 4])
def test_more_nodes_than_candidates_are_refused(nodes):
    row = jnp.zeros((1, 2))
    ids = jnp.zeros((1, 3), jnp.int32)
    roots = [ids[:, 0]] * 3
    with pytest.raises(ValueError, match=f"num_draft_tokens={nodes} must be from 2 to 3"):
        select_tree(*roots, row, ids[:, :2], ids, topk=2, num_draft_tokens=nodes)

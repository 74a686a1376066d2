"""Forced tokens as drafts."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.speculative.tree import chain_input, with_forced
from specjax.types import VerifyInput


def paths(tree: VerifyInput, row: int) -> set[tuple[int, ...]]:
    """The texts of all proposed nodes, each from the root on."""
    tokens, parents = np.asarray(tree.draft_tokens[row]), np.asarray(tree.parents[row])
    found = {0: (int(tokens[0]),)}
    for node in range(1, 1 + int(tree.num_proposed[row])):
        found[node] = (*found[int(parents[node])], int(tokens[node]))
    mask, positions = np.asarray(tree.tree_mask[row]), np.asarray(tree.positions[row])
    for node, path in found.items():
        assert positions[node] - positions[0] == len(path) - 1 == mask[node].sum() - 1
    return set(found.values())


@pytest.mark.slow
@given(st.data())
def test_forced_tokens_replace_drafts_unless_they_are_among_them(data: st.DataObject) -> None:
    steps, nodes = data.draw(st.integers(1, 3)), data.draw(st.integers(4, 7))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=nodes, max_size=nodes), label="tokens")
    parents = [-1] + [data.draw(st.integers(0, i - 1)) for i in range(1, nodes)]
    proposed = data.draw(st.integers(0, nodes - 1))
    forced = data.draw(st.lists(st.integers(0, 2), max_size=steps), label="forced")
    mask = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        mask[node] |= mask[parents[node]]
    rows = lambda x: jnp.asarray(np.array([x]))  # noqa: E731
    tree = VerifyInput(
        draft_tokens=rows(tokens),
        num_proposed=jnp.array([proposed]),
        parents=rows(parents),
        positions=rows(9 + mask.sum(axis=1) - 1),
        tree_mask=rows(mask),
    )
    more = data.draw(st.integers(0, 5))  # a tier may have more steps than drafts that it verifies
    wanted = rows(forced + [-1] * (steps - len(forced) + more))
    before, after = paths(tree, 0), paths(with_forced(tree, wanted), 0)
    path = (tokens[0], *forced)
    assert after == (before if path in before else {path[: i + 1] for i in range(len(path))})


@pytest.mark.slow
def test_rows_are_independent() -> None:
    tree = chain_input(jnp.array([[5, 1, 2], [6, 1, 2], [7, 1, 2]]), jnp.array([3, 4, 5]))
    found = with_forced(tree, jnp.array([[1, 2], [8, -1], [-1, 8]]))
    assert found.draft_tokens.tolist() == [[5, 1, 2], [6, 8, 0], [7, 1, 2]]
    assert found.num_proposed.tolist() == [2, 1, 2]

"""Select candidates as the nodes of a drafted tree, and find the accepted path.

Axes: B batch, T tree rows, S steps, A accept width, K branches per level, P candidates.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kernels.accept_tree import SlotRows, accept_tree, compact_tree
from specjax.kernels.draw_tokens import position_uniform
from specjax.speculative.future_map import FutureMap
from specjax.types import (
    DraftShape,
    NodeOutputs,
    RoundResults,
    SamplingTable,
    VerifyInput,
    VerifyOutput,
)


def chain_input(
    draft_tokens: Array, seq_lens: Array, num_proposed: Array | None = None
) -> VerifyInput:
    """The verify input of a chain: row ``i`` is the child of row ``i - 1``.

    Tokens are i32 ``[B, T]``, root first. Only the first ``num_proposed`` i32 ``[B]`` of the T - 1
    drafts are proposed; the default is all.
    """
    batch, rows = draft_tokens.shape
    depth = jnp.arange(rows, dtype=jnp.int32)
    if num_proposed is None:
        num_proposed = jnp.full(batch, rows - 1, jnp.int32)
    return VerifyInput(
        draft_tokens=draft_tokens,
        num_proposed=num_proposed,
        parents=jnp.broadcast_to(depth - 1, (batch, rows)),
        positions=seq_lens[:, None] + depth,
        tree_mask=jnp.broadcast_to(depth[:, None] >= depth, (batch, rows, rows)),
    )


def tree_input(
    draft_tokens: Array,
    parents: Array,
    seq_lens: Array,
    num_proposed: Array | None = None,
    depth: int | None = None,
) -> VerifyInput:
    """The verify input of a tree, with its mask and positions.

    Args:
        draft_tokens: i32 ``[B, T]``, root first.
        parents: i32 ``[B, T]``, the row of each node's parent, which precedes it; -1 for the root.
        seq_lens: i32 ``[B]``, the positions of the roots.
        num_proposed: i32 ``[B]``, number of drafts that are proposed, the first ones; default: all.
        depth: maximum depth of a node; default: T - 1.
    """
    batch, rows = parents.shape
    if num_proposed is None:
        num_proposed = jnp.full(batch, rows - 1, jnp.int32)
    index = jnp.arange(rows, dtype=jnp.int32)
    mask = jnp.broadcast_to(index[:, None] == index, (batch, rows, rows))
    ancestor = parents
    for _ in range(rows - 1 if depth is None else depth):
        mask |= ancestor[:, :, None] == index
        ancestor = jnp.where(
            ancestor > 0, jnp.take_along_axis(parents, jnp.maximum(ancestor, 0), axis=1), -1
        )
    # count depths from the mask, so that rotary positions always agree with it
    depths = jnp.sum(mask, axis=2, dtype=jnp.int32) - 1
    positions = seq_lens[:, None] + depths
    return VerifyInput(draft_tokens, num_proposed, parents, positions, mask)


# the arrays of a tree by node, except its mask, with the index of the first node of each
BY_NODE = {"draft_tokens": 0, "parents": 0, "positions": 0, "draft_rows": 0}
BY_NODE |= {"draft_probs": 1, "confidences": 1}


def _by_node(tree: VerifyInput, change: Callable[[Array, int], Array]) -> dict[str, Any]:
    """Change the arrays of a tree in ``BY_NODE``; ``change`` also gets the index of the first."""
    return {
        name: None if (leaf := getattr(tree, name)) is None else change(leaf, begin)
        for name, begin in BY_NODE.items()
    }


def truncate(tree: VerifyInput, nodes: int) -> VerifyInput:
    """Keep the first ``nodes`` rows of a drafted tree, in which parents come before children."""
    if nodes >= tree.draft_tokens.shape[1]:
        return tree
    return replace(
        tree,
        **_by_node(tree, lambda leaf, begin: leaf[:, : nodes - begin]),
        num_proposed=jnp.minimum(tree.num_proposed, nodes - 1),
        tree_mask=tree.tree_mask[:, :nodes, :nodes],
    )


def take(tree: VerifyInput, nodes: Array) -> VerifyInput:
    """The tree of the nodes i32 ``[B, N]`` of another one; parents must come before children.

    The root must be the first node. The number of proposed drafts stays the same.
    """

    indices = nodes, nodes[:, 1:] - 1

    def pick(leaf: Array, begin: int) -> Array:
        index = indices[begin]
        return jnp.take_along_axis(leaf, index.reshape(*index.shape, *[1] * (leaf.ndim - 2)), 1)

    leaves = _by_node(tree, pick)
    # compare all pairs in one kernel, because a sort takes several
    is_parent = nodes[:, None, :] == leaves["parents"][:, :, None]
    leaves["parents"] = jnp.where(
        leaves["parents"] >= 0, jnp.argmax(is_parent, axis=2).astype(jnp.int32), -1
    )
    mask = jnp.take_along_axis(tree.tree_mask, nodes[:, :, None], axis=1)
    mask = jnp.take_along_axis(mask, nodes[:, None, :], axis=2)
    return replace(tree, **leaves, tree_mask=mask)


def with_forced(tree: VerifyInput, forced: Array) -> VerifyInput:
    """Replace the drafts of rows with ``forced`` tokens i32 ``[B, S]``, of which -1 ends each row.

    A tree that has these tokens as a path from its root is kept. Otherwise, they become a chain
    that replaces all drafts.
    """
    width = tree.draft_tokens.shape[1]
    forced = forced[:, : width - 1]  # a tier may verify fewer drafts than it has steps
    depth = jnp.arange(forced.shape[1], dtype=jnp.int32)
    count = jnp.sum(jnp.cumprod(forced >= 0, axis=1), axis=1, dtype=jnp.int32)
    node, is_path, is_child = jnp.zeros_like(count), count >= 0, tree.is_child
    for level in range(forced.shape[1]):
        children = jnp.take_along_axis(is_child, node[:, None, None], axis=1)[:, 0]
        fits = children & (tree.draft_tokens == forced[:, level, None])
        is_path &= fits.any(axis=1) | (level >= count)
        node = jnp.argmax(fits, axis=1).astype(jnp.int32)
    drafts = jnp.zeros((len(count), width - 1), jnp.int32)
    drafts = drafts.at[:, : forced.shape[1]].set(jnp.where(depth < count[:, None], forced, 0))
    root = tree.draft_tokens[:, :1]
    chain = replace(
        chain_input(jnp.concatenate([root, drafts], axis=1), tree.positions[:, 0], count),
        draft_probs=tree.draft_probs,
        draft_rows=jax.tree.map(lambda rows: jnp.full_like(rows, -1), tree.draft_rows),
        # 0: the drafter has tried nothing
        confidences=jax.tree.map(jnp.zeros_like, tree.confidences),
    )

    def pick(of_tree: Array, of_chain: Array) -> Array:
        if of_chain is of_tree:
            return of_tree
        return jnp.where(is_path.reshape(-1, *[1] * (of_tree.ndim - 1)), of_tree, of_chain)

    picked: VerifyInput = jax.tree.map(pick, tree, chain)
    return picked


def ranks(scores: Array, is_earlier: Array) -> Array:
    """Number i32 ``[..., P]`` of candidates that come before each of P candidates.

    A higher score comes first. Of equal scores, ``is_earlier`` bool ``[..., P, P]`` has in its last
    axis those that come before a candidate. All pairs are compared in one kernel, because a sort
    takes several.
    """
    higher = scores[..., None, :] > scores[..., :, None]
    ties = scores[..., None, :] == scores[..., :, None]
    return jnp.sum(higher | ties & is_earlier, axis=-1, dtype=jnp.int32)


def select_tree(
    bonus_tokens: Array,
    seq_lens: Array,
    num_proposed: Array,
    scores: Array,
    tokens: Array,
    parent_list: Array,
    *,
    topk: int,
    num_draft_tokens: int,
) -> tuple[VerifyInput, Array]:
    """Select the best T - 1 of P candidates as the nodes of a tree.

    A candidate's score is the product of the scores on its path, each at most 1. A parent therefore
    never scores below its child. Ties go to the lower index, so the parent of a chosen candidate is
    also chosen. Chosen candidates stay in index order, so parents also precede their children.

    Args:
        bonus_tokens: i32 ``[B]``, the roots.
        seq_lens: i32 ``[B]``, the positions of the roots.
        num_proposed: i32 ``[B]``, number of nodes that are proposed.
        scores: f32 ``[B, P]``, of the K candidates in the first level and K * K per further level.
        tokens: i32 ``[B, P]``.
        parent_list: i32 ``[B, 1 + (S - 1) * K]``, in SGLang's layout: -1, the indices
            ``0 .. K - 1``, and for each of the levels 2 to S - 1 the indices of the K candidates
            with children. The parent of candidate ``c`` is the root if ``c < K``, else
            ``parent_list[(c - K) // K + 1]``.
        topk: K.
        num_draft_tokens: T.

    Returns:
        The tree, and the candidate index i32 ``[B, T - 1]`` of each node after the root.
    """
    batch, pool = scores.shape
    rows = num_draft_tokens
    if not 2 <= rows <= pool + 1:
        raise ValueError(f"num_draft_tokens={rows} must be from 2 to {pool + 1} = candidates + 1")
    _, chosen = jax.lax.top_k(scores, rows - 1)
    chosen = jnp.sort(chosen, axis=1)
    drafts = jnp.take_along_axis(tokens, chosen, axis=1)
    is_first = chosen < topk
    above = jnp.where(is_first, 0, (chosen - topk) // topk + 1)
    parent = jnp.take_along_axis(parent_list, above, axis=1)
    # a candidate's row is 1 + the number of chosen candidates before it
    before = jnp.sum(chosen[:, None, :] < parent[:, :, None], axis=2, dtype=jnp.int32)
    root = jnp.full((batch, 1), -1, jnp.int32)
    parents = jnp.concatenate([root, jnp.where(is_first, 0, before + 1)], axis=1)
    tokens = jnp.concatenate([bonus_tokens[:, None], drafts], axis=1)
    depth = 1 + (pool - topk) // topk**2
    return tree_input(tokens, parents, seq_lens, num_proposed, depth), chosen


def spread_count(seq_lens: Array, num_steps: int, accept_length: float) -> Array:
    """Number i32 ``[B]`` of drafts to accept, ``accept_length - 1`` on average, S at most.

    It is one of the two integers around the average, spread evenly over sequence lengths.
    """
    drafts = min(max(accept_length - 1.0, 0.0), float(num_steps))
    share = drafts - int(drafts)
    # multiples of the golden ratio, modulo 1, are spread evenly on [0, 1)
    phase = jnp.mod(seq_lens.astype(jnp.float32) * 0.6180339887, 1.0)
    return int(drafts) + (phase < share).astype(jnp.int32)


def drawn_count(seq_lens: Array, num_steps: int, sampling: SamplingTable) -> Array:
    """Number i32 ``[B]`` of drafts to accept, of S after ``seq_lens``: those before the first miss.

    A draft is a hit with probability ``sampling.acceptances``. This depends only on the request's
    seed and the draft's absolute position: not on the tier, the batch or the round.
    """
    depth = jnp.arange(num_steps, dtype=jnp.int32)
    noise = position_uniform(sampling.seeds, seq_lens[:, None] + 1 + depth)
    count = jnp.where(noise < sampling.acceptances[:, None], num_steps, depth)
    return jnp.min(count, axis=1, initial=num_steps)


def simulated_path(tree: VerifyInput, num_steps: int, count: Array) -> Array:
    """Path i32 ``[B, S + 1]`` to the deepest row, of ``count`` i32 ``[B]`` drafts; -1: no root."""
    depths = jnp.where(tree.is_node, tree.positions - tree.positions[:, :1], -1)
    goal = jnp.argmax(depths, axis=1)[:, None, None]
    on_path = jnp.take_along_axis(tree.tree_mask, goal, axis=1)
    count = jnp.minimum(count, jnp.max(depths, axis=1))
    # the row of the path at each depth
    depth = jnp.arange(num_steps + 1, dtype=jnp.int32)
    is_row = on_path & (depths[:, None, :] == depth[:, None])
    path = jnp.argmax(is_row, axis=2).astype(jnp.int32)
    return jnp.where(depth <= count[:, None], path, -1)


def simulated_tokens(tree: VerifyInput, path: Array, end_token_ids: Array) -> Array:
    """Target tokens i32 ``[B, T]`` with which exactly the rows in ``path [B, A]`` are accepted."""
    rows = tree.draft_tokens.shape[1]
    # a token that is neither drafted in any row, so that no child matches it, nor an end token
    unavailable = jnp.concatenate([tree.draft_tokens, end_token_ids], axis=1)
    few = jnp.arange(unavailable.shape[1] + 1, dtype=jnp.int32)
    is_free = jnp.all(unavailable[:, None, :] != few[:, None], axis=2)
    free = jnp.argmax(is_free, axis=1).astype(jnp.int32)[:, None]
    child = jnp.where(path[:, 1:] >= 0, path[:, 1:], 0)
    drafted = jnp.take_along_axis(tree.draft_tokens, child, axis=1)
    parent = jnp.where(path[:, 1:] >= 0, path[:, :-1], rows)
    owners = jnp.arange(len(path), dtype=jnp.int32)[:, None]
    tokens = jnp.broadcast_to(free, tree.draft_tokens.shape)
    return tokens.at[owners, parent].set(drafted, mode="drop")


def accept(
    tree: VerifyInput,
    outputs: NodeOutputs,
    future: FutureMap,
    slots: Array,
    end_token_ids: Array,
    shape: DraftShape,
    *,
    implementation: str | None = None,
    simulated: Array | None = None,
) -> tuple[VerifyOutput, FutureMap]:
    """Accept the path that agrees with ``outputs.tokens``, record it, and compact the outputs.

    ``simulated`` i32 ``[B]`` instead accepts this many drafts, right or wrong.
    """
    if simulated is not None:
        path = simulated_path(tree, shape.depth, jnp.where(slots > 0, simulated, -1))
        outputs = replace(outputs, tokens=simulated_tokens(tree, path, end_token_ids))
    accepted, rows = accept_tree(
        tree.draft_tokens,
        tree.parents,
        tree.num_proposed,
        outputs.tokens,
        end_token_ids,
        slots,
        tree.positions[:, 0],
        SlotRows(future.seq_lens, future.bonus_tokens, future.remaining, future.tokens),
        num_steps=shape.depth,
        implementation=implementation,
    )
    # a chain's rows are already in place, so XLA only clears later ones, fused into the reader
    moves = "xla" if shape.topk == 1 else implementation
    compacted = jax.tree.map(
        lambda leaf: compact_tree(leaf, accepted.accept_index, implementation=moves), outputs
    )
    verified = VerifyOutput(
        accept_index=accepted.accept_index,
        outputs=replace(
            compacted, tokens=RoundResults.unpack(accepted.packed, shape.accept_width).tokens
        ),
        packed=accepted.packed,
        bonus_tokens=accepted.bonus_tokens,
    )
    return verified, replace(future, **rows._asdict())

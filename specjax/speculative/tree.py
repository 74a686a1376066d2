"""Shapes of drafted trees and the walk that finds what the target accepts.

Axes: B batch, T tree rows, S steps, A = S + 1.
"""

import jax
import jax.numpy as jnp

from specjax.kernels.compact_tree import compact_tree
from specjax.kernels.fill_bonus import fill_bonus_tokens
from specjax.types import VerifyInput, VerifyOutput


def chain_input(
    draft_tokens: jax.Array, seq_lens: jax.Array, num_proposed: jax.Array | None = None
) -> VerifyInput:
    """The verify input of a chain: row ``i`` is the child of row ``i - 1``.

    Tokens are i32 ``[B, T]``, the root first; ``num_proposed`` i32 ``[B]`` of the T - 1 drafts are
    real, all by default.
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


def accept_path(
    tree: VerifyInput, target_tokens: jax.Array, valid: jax.Array, num_steps: int
) -> tuple[jax.Array, jax.Array]:
    """Follow the target's own tokens i32 ``[B, T]`` down the tree, to depth ``num_steps``.

    From the root, the child whose token equals the target's token at the current row is entered;
    the walk ends where there is none. Each draft is thus accepted with the target's probability.

    Returns:
        ``accept_index`` i32 ``[B, S + 1]`` (root first, then -1; all -1 for rows that are not
        ``valid``) and ``num_accepted_drafts`` i32 ``[B]``.
    """
    rows = tree.draft_tokens.shape[1]
    # matches[b, i, j]: row j is a child of row i and holds the target's token at i
    index = jnp.arange(rows, dtype=jnp.int32)
    is_child = tree.parents[:, None, :] == index[:, None]
    is_real = (index <= tree.num_proposed[:, None])[:, None, :]
    matches = is_child & is_real & (tree.draft_tokens[:, None, :] == target_tokens[:, :, None])
    child = jnp.where(matches.any(-1), jnp.argmax(matches, -1).astype(jnp.int32), -1)
    node = jnp.where(valid, 0, -1)
    path = [node]
    for _ in range(num_steps):
        step = jnp.take_along_axis(child, jnp.maximum(node, 0)[:, None], axis=1)[:, 0]
        node = jnp.where(node >= 0, step, -1)
        path.append(node)
    accept_index = jnp.stack(path, axis=1)
    num_accepted_drafts = jnp.sum(accept_index[:, 1:] >= 0, axis=1, dtype=jnp.int32)
    return accept_index, num_accepted_drafts


def simulated_path(
    tree: VerifyInput, valid: jax.Array, num_steps: int, accept_length: float
) -> tuple[jax.Array, jax.Array]:
    """An accepted path along a chain whose length averages ``accept_length``, whatever was drafted.

    For measurements of speed without a trained head; the text is of no meaning. Lengths are the two
    integers around ``accept_length``, spread evenly over sequence lengths.
    """
    drafts = min(max(accept_length - 1.0, 0.0), float(num_steps))
    share = drafts - int(drafts)
    # multiples of the golden ratio fall evenly on [0, 1)
    phase = jnp.mod(tree.positions[:, 0].astype(jnp.float32) * 0.6180339887, 1.0)
    count = jnp.minimum(int(drafts) + (phase < share).astype(jnp.int32), tree.num_proposed)
    count = jnp.where(valid, count, 0)
    depth = jnp.arange(num_steps + 1, dtype=jnp.int32)
    inside = (depth <= count[:, None]) & valid[:, None]
    return jnp.where(inside, depth, -1), count


def accept(
    tree: VerifyInput,
    target_tokens: jax.Array,
    features: jax.Array,
    valid: jax.Array,
    num_steps: int,
    simulate_accept_length: float | None = None,
) -> VerifyOutput:
    """Accept what agrees with the target and compact every per-row output.

    ``target_tokens`` i32 ``[B, T]`` and ``features`` ``[B, T, F]`` are the target's at each row;
    with ``simulate_accept_length`` so many tokens are accepted on average, right or wrong.
    """
    if simulate_accept_length is None:
        path = accept_path(tree, target_tokens, valid, num_steps)
    else:
        path = simulated_path(tree, valid, num_steps, simulate_accept_length)
    accept_index, num_accepted_drafts = path
    num_accepted_tokens = jnp.where(valid, num_accepted_drafts + 1, 0)
    accept_tokens = compact_tree(target_tokens, accept_index)
    return VerifyOutput(
        accept_index=accept_index,
        accept_tokens=accept_tokens,
        num_proposed_drafts=jnp.where(valid, tree.num_proposed, 0),
        num_accepted_drafts=num_accepted_drafts,
        num_accepted_tokens=num_accepted_tokens,
        bonus_tokens=fill_bonus_tokens(accept_tokens, num_accepted_tokens),
        features=compact_tree(features, accept_index),
    )

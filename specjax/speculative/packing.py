"""Packed verification: share out the rows of a verify pass among the requests of a batch.

A tier with ``packed=m`` verifies B * m rows per round. Every request verifies its root. The other
rows go to the drafts that are most likely to survive, which means that they and all drafts before
them are accepted. All this runs on the device, with the confidences of the drafts just made.
Fewer verified drafts never change a text, because the target's noise depends only on positions.

Axes: B batch, T tree rows, S maximum depth, R request slots.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kv.pages import Segments
from specjax.speculative.tree import ranks, take
from specjax.types import DraftShape, VerifyInput

# limit of the log-odds of a confidence, as in the estimator that fits the calibration
MAX_LOG_ODDS = 6.0


def survival(tree: VerifyInput, slope: Array, intercepts: Array, offsets: Array) -> Array:
    """Estimate f32 ``[B, T - 1]``, the probability that each draft of a tree survives.

    A draft with confidence q at depth d is accepted after its parent with the probability
    ``sigmoid(slope * log(q / (1 - q)) + intercepts[d - 1] + offset)``. Survival is the product of
    these along the path, so a parent never scores below its child. It is 0 for a node that is not
    proposed, and if it is not a number.

    Args:
        tree: a tree with confidences.
        slope: f32 ``[]``.
        intercepts: f32 ``[S]``, by depth from 1.
        offsets: f32 ``[B]``, by request.
    """
    assert tree.confidences is not None
    depths = tree.positions[:, 1:] - tree.positions[:, :1]
    odds = jnp.log(tree.confidences) - jnp.log1p(-tree.confidences)
    odds = slope * jnp.clip(odds, -MAX_LOG_ODDS, MAX_LOG_ODDS)
    odds += intercepts[jnp.clip(depths, 1, len(intercepts)) - 1] + offsets[:, None]
    on_path = tree.tree_mask[:, 1:, 1:]
    chances = jnp.prod(jnp.where(on_path, jax.nn.sigmoid(odds)[:, None], 1.0), axis=2)
    is_proposed = jnp.arange(chances.shape[1]) < tree.num_proposed[:, None]
    return jnp.where(is_proposed & (chances > 0), chances, 0.0)


def admit(survivals: Array, is_live: Array, num_rows: int) -> Array:
    """Count i32 ``[B]`` the rows that each request verifies, of ``num_rows`` in total.

    A live request, bool ``[B]``, verifies its root. The other rows go to the best drafts of the
    batch with a survival f32 ``[B, T - 1]`` above 0, which must not grow from row to row. Of equal
    ones, the earlier row comes first, and then the lower request. The drafts of a request are
    therefore always its first ones.
    """
    best = jnp.where(is_live[:, None], survivals, 0.0).T.reshape(-1)
    index = jnp.arange(best.shape[0])
    rank = ranks(best, index < index[:, None])
    is_admitted = (best > 0) & (rank < num_rows - jnp.sum(is_live, dtype=jnp.int32))
    drafts = jnp.sum(is_admitted.reshape(-1, len(is_live)), axis=0, dtype=jnp.int32)
    return is_live.astype(jnp.int32) + drafts


def keep_best(
    tree: VerifyInput, shape: DraftShape, slots: Array, calibration: Array, num_slots: int
) -> VerifyInput:
    """Propose only the drafts that a packed tier verifies, the best of the batch.

    Requests in slots i32 ``[B]`` above 0 verify ``num_proposed + 1`` rows each, at most B * packed
    together. Nodes of a tree are sorted by survival, so a parent is verified if its child is.
    ``calibration`` f32 ``[1 + S + R]`` holds the slope, the intercepts, and the offsets by slot of
    :func:`survival`; R is ``num_slots``.
    """
    slope, intercepts, offsets = jnp.split(calibration, (1, len(calibration) - num_slots))
    survivals = survival(tree, slope[0], intercepts, offsets[slots])
    if shape.topk > 1:
        order = jnp.argsort(-survivals, axis=1, stable=True).astype(jnp.int32)
        tree = take(tree, jnp.pad(order + 1, ((0, 0), (1, 0))))
        survivals = jnp.take_along_axis(survivals, order, axis=1)
    is_live = slots > 0
    counts = admit(survivals, is_live, len(slots) * shape.packed)
    return replace(tree, num_proposed=jnp.where(is_live, counts - 1, 0))


def verified_rows(tree: VerifyInput, shape: DraftShape, slots: Array) -> Segments:
    """Lay out the verified rows of all requests in one row of B * packed tokens."""
    counts = jnp.where(slots > 0, tree.num_proposed + 1, 0)
    return Segments.of(tree.positions[:, 0], counts, len(slots) * shape.packed)


def tried_confidences(tree: VerifyInput, accept_index: Array, is_running: Array) -> Array:
    """Confidences f32 ``[B, A - 1]`` of the drafts that were tried, one per depth.

    These are the accepted drafts, and after them the draft that was rejected; of several, the one
    with the highest confidence. All others are 0. A request that is no longer running, bool
    ``[B]``, has no rejected draft, because its drafts were cut and not refused.
    """
    assert tree.confidences is not None
    probs, path = jnp.pad(tree.confidences, ((0, 0), (1, 0))), accept_index[:, 1:]
    accepted = jnp.take_along_axis(probs, jnp.maximum(path, 0), axis=1)
    count = jnp.sum(path >= 0, axis=1, dtype=jnp.int32)[:, None]
    last = jnp.take_along_axis(accept_index, count, axis=1)
    index = jnp.arange(tree.parents.shape[1], dtype=jnp.int32)
    is_next = (tree.parents == last) & (index <= tree.num_proposed[:, None]) & is_running[:, None]
    rejected = jnp.max(jnp.where(is_next, probs, 0.0), axis=1, keepdims=True)
    column = jnp.arange(path.shape[1], dtype=jnp.int32)
    return jnp.where(path >= 0, accepted, jnp.where(column == count, rejected, 0.0))

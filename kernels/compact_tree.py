"""Compaction of per-node outputs of a verified tree to the front of each request's rows.

Everything behind verification (draft extend, result processing, KV commit) takes the accepted
tokens to be the first ``num_accepted_tokens`` rows of a request. A chain has them there already;
a tree has not (SGLang changes #26866 and #26997). Axes: B requests, T tree rows, A accept width.
"""

import jax
import jax.numpy as jnp


def compact_tree_reference(values: jax.Array, accept_index: jax.Array) -> jax.Array:
    """Plain ``jax.numpy`` form of :func:`compact_tree`."""
    valid = accept_index >= 0
    # -1 would wrap to the last row
    rows = jnp.where(valid, accept_index, 0)
    rows = rows.reshape(*rows.shape, *(1,) * (values.ndim - 2))
    gathered = jnp.take_along_axis(values, rows, axis=1)
    return jnp.where(valid.reshape(rows.shape), gathered, jnp.zeros((), values.dtype))


def compact_tree(values: jax.Array, accept_index: jax.Array) -> jax.Array:
    """Gather the accepted path of each request to the front.

    Args:
        values: ``[B, T, ...]``, one entry a tree row, any dtype.
        accept_index: i32 ``[B, A]``, rows of the accepted path in order, then -1.

    Returns:
        ``[B, A, ...]``: ``values`` at the accepted rows, zeros where ``accept_index`` is -1.

    Raises:
        ValueError: if the shapes do not belong together.
    """
    if values.ndim < 2 or accept_index.ndim != 2 or values.shape[0] != accept_index.shape[0]:
        raise ValueError(
            f"values {values.shape} must be [B, T, ...] and accept_index {accept_index.shape} "
            "[B, A] with the same B"
        )
    return compact_tree_reference(values, accept_index)

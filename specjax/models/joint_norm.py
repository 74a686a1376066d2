"""Norms of all query heads together, and of all key heads: OLMo's attention."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kernels.add_norm import scaled
from specjax.models.shards import all_sum


def joint_norms(heads: Sequence[Array], norms: Sequence[Any], shards: int) -> list[Array]:
    """Normalise each of ``heads [..., N, H]`` over all of its heads, which devices may share.

    ``norms`` are modules ``RMSNorm`` with the own scales. Devices add up their means of squares
    once. If some store the same KV heads, all do equally often, which does not change the mean.
    """
    if shards == 1:
        pairs = zip(heads, norms, strict=True)
        return [norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape) for x, norm in pairs]
    rows = [x.reshape(*x.shape[:-2], -1).astype(jnp.float32) for x in heads]
    squares = jnp.stack([jnp.square(x).mean(axis=-1) for x in rows], axis=-1)
    means = jnp.split(all_sum(squares, shards) / shards, len(rows), axis=-1)
    return [
        scaled(x * jax.lax.rsqrt(mean + norm.eps), norm.factor, like.dtype).reshape(like.shape)
        for x, mean, norm, like in zip(rows, means, norms, heads, strict=True)
    ]

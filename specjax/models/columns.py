"""Logits whose columns are split over the devices of a mesh: find the best ones by a small sum.

A greedy token needs the best column of a row, not the row. Each device finds its own best columns,
and one sum gives all devices those of all: some numbers per row, instead of the whole vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from specjax.models.shards import AXIS, all_columns, all_sum


@dataclass(frozen=True)
class Columns:
    """A device's own columns f32 ``[..., W]`` of rows with ``size`` columns, shared by ``count``.

    Device ``i`` has the columns from ``i * W`` on. Those from ``size`` on are padding.
    """

    own: Array
    size: int
    count: int = 1

    def whole(self) -> Array:
        """All columns f32 ``[..., size]``."""
        return self.own if self.count == 1 else all_columns(self.own, self.count)[..., : self.size]

    def needed(self, *, is_greedy: bool) -> "Array | Columns":
        """All columns, unless devices share them and a greedy batch needs only the best ones."""
        return self if is_greedy and self.count > 1 else self.whole()

    def best(self, topk: int = 1, *, has_total: bool = False) -> tuple[Array, Array, Array | None]:
        """The K best columns of each row, as ``jnp.argmax`` or ``jax.lax.top_k`` finds them.

        Returns their values f32 ``[..., K]`` and indices i32 ``[..., K]``, best first, and with
        ``has_total`` the logarithm f32 ``[..., 1]`` of the sum of the exponentials of the row. With
        K > 1, no logit may be NaN.
        """
        width = self.own.shape[-1]
        start = jax.lax.axis_index(AXIS) * width
        is_real = jnp.arange(width, dtype=jnp.int32) + start < self.size
        is_even = self.size == width * self.count
        own = self.own if is_even else jnp.where(is_real, self.own, -jnp.inf)
        index = _best(own, min(topk, width))
        values = jnp.take_along_axis(own, index, axis=-1)
        stacked = [values]
        if has_total:
            most = own.max(axis=-1, keepdims=True)
            stacked += [most, jnp.exp(own - _finite(most)).sum(axis=-1, keepdims=True)]
        # a sum of bits keeps NaN and the sign of 0; a product with 0 would make NaN of infinity
        bits = jax.lax.bitcast_convert_type(jnp.concatenate(stacked, axis=-1), jnp.int32)
        joined = jnp.concatenate([index + start, bits], axis=-1)[..., None, :]
        is_own = jnp.arange(self.count)[:, None] == jax.lax.axis_index(AXIS)
        every = all_sum(jnp.where(is_own, joined, 0), self.count)
        ids, bits = jnp.split(every, [index.shape[-1]], axis=-1)
        floats = jax.lax.bitcast_convert_type(bits, jnp.float32)
        # equal values are in the order of their indices, as in the row
        values = floats[..., : ids.shape[-1]].reshape(*own.shape[:-1], -1)
        ids, index, total = ids.reshape(values.shape), _best(values, topk), None
        if has_total:
            most, sums = floats[..., -2], floats[..., -1]
            base = _finite(most.max(axis=-1, keepdims=True))
            total = jnp.log((sums * jnp.exp(most - base)).sum(axis=-1, keepdims=True)) + base
        values, ids = (jnp.take_along_axis(x, index, axis=-1) for x in (values, ids))
        return values, ids, total


def _best(values: Array, topk: int) -> Array:
    """Indices i32 ``[..., K]`` of the largest values, the lowest of equal ones first."""
    if topk == 1:
        return jnp.argmax(values, axis=-1, keepdims=True).astype(jnp.int32)
    return jax.lax.top_k(values, topk)[1]


def _finite(most: Array) -> Array:
    """The value that is subtracted before the exponential of a row with this maximum."""
    return jnp.where(jnp.isfinite(most), most, 0.0)

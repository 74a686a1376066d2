"""Rows of all heads from pools that the devices of a mesh share, and the other way."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.models.flat import Networks
from specjax.models.shards import AXIS
from specjax.runtime.runner import HEADS
from specjax.speculative.future_map import DeviceState


class Cut(NamedTuple):
    """How the devices share the heads of a pool."""

    spec: PartitionSpec
    repeats: int  # devices that store the same head

    @property
    def axis(self) -> int | None:
        """The axis of rows, with each head once, that devices can share."""
        return HEADS if AXIS in self.spec and self.repeats == 1 else None


def cuts_of(nets: Networks, state: DeviceState, axes: Sequence[int | None]) -> list[Cut]:
    """The cuts of all pools in a state that have an axis of KV indices, as ``axes`` say."""
    num_target = len(jax.tree.leaves(state.pools.target))
    cuts = []
    for i, leaf in enumerate(jax.tree.leaves(state.pools)):
        if axes[i] is None:
            continue
        config = nets.target_config if i < num_target else nets.draft_config
        spec = leaf.sharding.spec
        repeats = leaf.shape[HEADS] // config.num_kv_heads if AXIS in spec else 1
        cuts.append(Cut(spec, repeats))
    return cuts


def of_all_heads(
    take: Callable[..., Any], put: Callable[..., Any], nets: Networks, state: Any, cuts: list[Cut]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Make functions for rows that have each head once from those for the heads of a device.

    They are ``take(pools, index)`` and ``put(state, index, rows)``; ``state`` is abstract.
    """
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
    of_rows, of_index = tuple(cut.spec for cut in cuts), PartitionSpec()
    options: dict[str, Any] = {"mesh": nets.placement.mesh, "check_vma": False}
    ins = specs.pools, of_index
    own_take = jax.shard_map(take, in_specs=ins, out_specs=of_rows, **options)
    own_put = jax.shard_map(put, in_specs=(specs, of_index, of_rows), out_specs=specs, **options)

    def take_whole(pools: Any, index: jax.Array) -> Any:
        pairs = zip(own_take(pools, index), cuts, strict=True)
        return tuple(x if cut.repeats == 1 else x[:, :, :, :: cut.repeats] for x, cut in pairs)

    def put_whole(state: Any, index: jax.Array, rows: Any) -> Any:
        pairs = zip(rows, cuts, strict=True)
        stored = (x if cut.repeats == 1 else jnp.repeat(x, cut.repeats, HEADS) for x, cut in pairs)
        return own_put(state, index, tuple(stored))

    return take_whole, put_whole

"""Weights of an engine at its start."""

import jax

from specjax.checkpoints import DraftCheckpoint, TargetCheckpoint
from specjax.models.flat import Weights
from specjax.models.networks import Networks

Checkpoint = TargetCheckpoint | DraftCheckpoint


def is_same(one: Checkpoint | None, other: Checkpoint | None) -> bool:
    """Whether two checkpoints give the same weights."""
    if one is None or other is None:
        return False
    return one.config == other.config and one.path.resolve() == other.path.resolve()


def load_weights(
    networks: Networks,
    target: TargetCheckpoint,
    draft: DraftCheckpoint | None,
    *,
    is_dummy: bool = False,
    lender: tuple[DraftCheckpoint | None, tuple[Weights, Weights]] | None = None,
) -> tuple[Weights, Weights]:
    """Flat weights of target and draft on the device.

    Args:
        networks: their structures.
        target: where the target's come from.
        draft: where the draft's come from, if there is one.
        is_dummy: random weights instead of the checkpoints'.
        lender: draft checkpoint and weights of an engine with the same target; its target weights
            are used again, and those of its draft if that is the same too.

    Raises:
        ValueError: if a checkpoint does not fit its configuration.
    """
    if is_dummy:
        head = () if networks.head is None else networks.head.random(1)
        return networks.target.random(0), head
    if lender is not None:
        target_weights = lender[1][0]
    else:
        target_weights = jax.device_put(networks.target.order(target.load_weights()))
    if draft is None or networks.head is None:
        return target_weights, ()
    if lender is not None and is_same(lender[0], draft):
        return target_weights, lender[1][1]
    return target_weights, jax.device_put(networks.head.order(draft.load_weights()))

"""Pieces of weights that are cut and joined on devices are those of the host."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models.pieces import first_places, inputs_joined, put_pieces, stored_order
from specjax.models.placement import Placement
from specjax.models.shards import Split

COUNT = 2


# projections of which some devices have less than others, nothing, or what their neighbour has
PROJECTIONS = {
    "even": ((8, 4, 4), 1),
    "one": ((8,), 2),
    "smaller last shares": ((7, 12), 2),
    "a device without a share": ((9, 9), 2),
    "repeated": ((8, 2, 2), 2),
}


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_the_order_is_that_of_pieces(name: str, axis: int) -> None:
    widths, unit = PROJECTIONS[name]
    size, split = sum(widths), Split(axis, widths, unit)
    shape = [2, 3, 5]
    shape[axis] = size
    weight = np.arange(1, 1 + np.prod(shape)).reshape(shape)
    pieces = [split.piece(weight, i, 4) for i in range(4)]
    assert len({piece.shape for piece in pieces}) == 1
    stored = np.concatenate(pieces, axis)
    assert stored.shape == split.stored(weight.shape, 4)
    order = stored_order(split, size, 4)
    padded = np.concatenate([weight, np.zeros_like(weight.take([0], axis))], axis)
    np.testing.assert_array_equal(padded.take(order, axis), stored)
    # each value has one first place
    places = first_places(split, size, 4)
    assert sorted(places[places < size]) == [*range(size)]
    assert (places[places < size] == order[places < size]).all()


@pytest.mark.parametrize("there", ["host", "one device", "another mesh", "the same devices"])
def test_weights_on_any_devices_are_cut(there: str) -> None:
    place, devices = Placement.on(0, COUNT), jax.devices()
    weight = -np.arange(6 * 8, dtype=np.float32).reshape(6, 8)  # starts with -0.0
    split = Split(1, (4, 4))
    spec = PartitionSpec("x", "y")
    shardings = {
        "one device": devices[-1],
        "another mesh": NamedSharding(Mesh([devices[-2:]], ("y", "x")), spec),
        "the same devices": NamedSharding(Mesh([devices[:COUNT]], ("x", "y")), spec),
    }
    value = weight if there == "host" else jax.device_put(weight, shardings[there])
    cut = put_pieces(value, split, place)
    assert cut.sharding == place.sharding(1)
    for i, shard in enumerate(cut.addressable_shards):
        bits, expected = (
            np.asarray(x).view(np.uint32) for x in (shard.data, split.piece(weight, i, COUNT))
        )
        np.testing.assert_array_equal(bits, expected)


def test_inputs_of_quantised_matrices_are_cut_and_joined() -> None:
    place, split = Placement.on(0, COUNT), Split(0, (32,), parts=2)
    weight = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
    cut = put_pieces(jax.device_put(weight), split, place)
    assert cut.shape == split.stored(weight.shape, COUNT)
    for i, shard in enumerate(cut.addressable_shards):
        np.testing.assert_array_equal(shard.data, split.piece(weight, i, COUNT))
    np.testing.assert_array_equal(inputs_joined(cut, COUNT, weight.shape), weight)

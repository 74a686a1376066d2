"""Arrays on several devices: whole on each, or in pieces."""

from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.models import placement
from specjax.models.placement import Placement
from specjax.models.shards import Split


@pytest.fixture(scope="module")
def pair() -> Placement:
    return Placement.on(0, 2)


@given(st.data(), st.integers(1, 4), st.integers(0, 1))
def test_pieces_have_a_share_of_every_projection(data, count: int, axis: int) -> None:
    shares = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    widths = tuple(count * share for share in shares)
    weight = np.arange(3 * sum(widths)).reshape((3, -1) if axis else (-1, 3))
    split = Split(axis, widths)
    projections = np.split(weight, np.cumsum(widths)[:-1], axis=axis)
    for device in range(count):
        expected = [np.split(each, count, axis=axis)[device] for each in projections]
        assert np.array_equal(
            split.piece(weight, device, count), np.concatenate(expected, axis=axis)
        )


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_devices_share_heads_that_are_fewer(heads: int, repeats: int, size: int) -> None:
    """Each head is whole on neighbouring devices."""
    count = heads * repeats
    split = Split(0, (heads * size,), unit=size)
    weight = np.arange(heads * size)
    pieces = [split.piece(weight, device, count) for device in range(count)]
    assert np.array_equal(pieces, weight.reshape(heads, size).repeat(repeats, axis=0))
    assert split.stored((heads * size, 5), count) == (count * size, 5)


@given(st.integers(2, 4), st.integers(0, 9), st.integers(1, 3))
def test_shares_of_whole_units_are_padded(count: int, more: int, size: int) -> None:
    """They follow each other, and zeros follow those that are smaller than the largest."""
    units = count + more
    split, weight = Split(0, (units * size,), unit=size), 1 + np.arange(units * size)
    pieces = [split.piece(weight, device, count) for device in range(count)]
    (stored,) = split.stored(weight.shape, count)
    assert {len(piece) for piece in pieces} == {-(-units // count) * size} == {stored // count}
    assert np.array_equal(np.concatenate([piece[piece > 0] for piece in pieces]), weight)
    for piece in pieces:
        assert (np.flatnonzero(piece) == np.arange(np.count_nonzero(piece))).all()
        assert np.count_nonzero(piece) % size == 0


def test_each_device_gets_its_piece(pair: Placement) -> None:
    weight = np.arange(24.0, dtype=np.float32).reshape(2, 12)
    put = pair.put_pieces(weight, Split(1, (8, 4)))
    assert put.sharding == pair.sharding(1)
    own = [np.asarray(shard.data) for shard in put.addressable_shards]
    assert np.array_equal(own[0], weight[:, [0, 1, 2, 3, 8, 9]])
    assert np.array_equal(own[1], weight[:, [4, 5, 6, 7, 10, 11]])
    (abstract,) = pair.abstract((weight,), 1)
    assert put.sharding.is_equivalent_to(abstract.sharding, 2)


def test_other_arrays_are_whole_on_each_device(pair: Placement) -> None:
    weight = np.arange(6, dtype=np.float32)
    for put in (pair.put(weight), pair.put_weights((weight,))[0], pair.put_pieces(weight, None)):
        assert put.is_fully_replicated
        assert put.devices() == set(pair.devices) == set(jax.devices()[:2])
        assert np.array_equal(put, weight)
    assert pair.ints(3).sharding.is_fully_replicated


def test_zeros_are_where_their_shapes_say(pair: Placement) -> None:
    shapes = jnp.ones((4, 2), jnp.int8), jnp.ones((2, 4), jnp.float32)
    abstract = pair.abstract(shapes[0]), pair.abstract(shapes[1], 1)
    whole, cut = pair.zeros(abstract)()
    assert whole.is_fully_replicated
    assert [shard.data.shape for shard in cut.addressable_shards] == [(2, 2), (2, 2)]
    assert not whole.any()
    assert not cut.any()


def test_one_device_needs_no_mesh() -> None:
    one = Placement.on(1)
    assert one.sharding(1) == jax.sharding.SingleDeviceSharding(jax.devices()[1])
    assert one.put_pieces(np.ones((2, 2)), Split(0, (2,))).devices() == {one.device}


def test_too_few_devices_are_named() -> None:
    count = len(jax.devices())
    text = (
        rf"tp_size={count} needs .* has {count} of kind cpu; lower tp_size to at most {count - 1}"
    )
    with pytest.raises(ValueError, match=text):
        Placement.on(1, count)


class User:
    """An object that reserves devices, as an engine does."""


def test_meshes_in_use_are_equal_or_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device may be part of a mesh, because its calls wait for no other device."""
    monkeypatch.setattr(placement, "_IN_USE", WeakKeyDictionary())
    pair, mesh_user, user = Placement.on(0, 2), User(), User()
    assert pair.in_order is Placement.on(0, 2).in_order
    assert pair.in_order is not Placement.on(2, 2).in_order
    Placement.on(1, 2).reserve(mesh_user)
    Placement.on(1).reserve(user)
    Placement.on(1, 2).check_others()
    Placement.on(3).check_others()
    for place in (pair, Placement.on(0, 4), Placement.on(2, 2)):
        with pytest.raises(ValueError, match=r"devices \[1, 2\]; choose base_gpu_id and tp_size"):
            place.check_others()
    del mesh_user  # engines need not be closed
    pair.reserve(user)
    with pytest.raises(ValueError, match="tp_size=4 on devices"):
        Placement.on(0, 4).check_others()
    pair.release(user)
    Placement.on(0, 4).check_others()

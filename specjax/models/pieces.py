"""Cut whole weights into the pieces of devices, and join them again, without the host.

Arrays stay on devices, so that weights of another engine or of a trainer can be taken over fast.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.models.declare import Recipe
from specjax.models.flat import FlatModel, Weights
from specjax.models.placement import Placement
from specjax.models.shards import Split


def stored_order(split: Split, size: int, count: int) -> np.ndarray:
    """Where a whole weight has what ``count`` devices store, i32 ``[stored]`` on the split's axis.

    ``size`` is that of the axis, and the entry of padding.
    """
    index = np.arange(1, size + 1, dtype=np.int32).reshape(*[1] * split.axis, size)
    pieces = [split.piece(index, device, count).reshape(-1) for device in range(count)]
    order = np.concatenate(pieces) - 1
    return np.where(order < 0, size, order)


def first_places(split: Split, size: int, count: int) -> np.ndarray:
    """The :func:`stored_order`, with ``size`` also for all but the first copy of a value."""
    order = stored_order(split, size, count)
    is_first = np.zeros(len(order), bool)
    is_first[np.unique(order, return_index=True)[1]] = True
    return np.where(is_first, order, size).astype(np.int32)


def put_pieces(weight: Any, split: Split | None, placement: Placement) -> Any:
    """Put a whole weight, from the host or any devices: each device gets its piece."""
    if not isinstance(weight, Array):
        return placement.put_pieces(weight, split)
    weight = brought(weight, placement)
    if placement.count == 1:
        return placement.put_weights(weight)
    if split is None:
        return _run(_taking(None, placement.sharding()), placement, weight)
    if split.parts is not None:
        cut = _cutting(placement.count, split.parts, placement.sharding(split.axis))
        return _run(cut, placement, weight)
    size, axis = weight.shape[split.axis], split.axis
    order = stored_order(split, size, placement.count)
    return _taken(weight, order, axis, placement, placement.sharding(axis))


def brought(array: Array, placement: Placement) -> Array:
    """An array in any pieces on these devices; from other devices, it is moved to them."""
    mesh = getattr(array.sharding, "mesh", None)
    devices = tuple(array.devices() if mesh is None else mesh.devices.flat)
    if devices == placement.devices and array.committed:
        return array
    if mesh is not None:  # JAX would move pieces of another form through the host
        there = Placement(devices)
        with there.in_order_of_all():
            array = _taking(None, there.sharding())(array).addressable_data(0)
    is_even = array.ndim > 0 and array.shape[0] % placement.count == 0
    return jax.device_put(array, placement.sharding(0 if is_even else None))


def joined(
    recipe: Recipe, tensors: Sequence[Array], split: Split | None, placement: Placement
) -> Array:
    """Make a whole weight from the tensors of its parts, on devices.

    Those of a mesh have contiguous pieces of it, if their number divides the axis of its split.
    """
    is_even = split is not None and recipe.shape[split.axis] % placement.count == 0
    axis = split.axis if split is not None and is_even else None
    rows = tuple(placement.put(stored.rows) for stored in recipe.parts)
    factors = tuple(stored.factor for stored in recipe.parts)
    join = _joining(factors, recipe.transpose, placement.sharding(axis))
    return _run(join, placement, tuple(brought(x, placement) for x in tensors), rows)


def moved(
    weights: Weights,
    there: FlatModel[Any],
    here: FlatModel[Any],
    places: tuple[Placement, Placement],
) -> Weights:
    """Put the weights of a network to other devices, from ``places[0]`` to ``places[1]``."""
    source, placement = places
    is_cut_alike = there.shards == here.shards
    if source == placement and is_cut_alike:
        return weights
    if source.count == placement.count and is_cut_alike:
        return placement.move(weights, here.placed(placement))
    arrays = []
    for name, abstract, weight in zip(there.names, there.abstract, weights, strict=True):
        on_one = _whole(weight, there.split(name), abstract.shape, source)
        # wait, so that few weights are whole at a time
        arrays.append(jax.block_until_ready(put_pieces(on_one, here.split(name), placement)))
    return tuple(arrays)


def _whole(weight: Array, split: Split | None, shape: tuple[int, ...], place: Placement) -> Array:
    """A weight of which devices store pieces, on the first of them."""
    if place.count == 1:
        return weight
    if split is not None and split.parts is not None:
        weight = _run(_uncutting(place.count, shape, place.sharding()), place, weight)
    elif split is not None:
        size = shape[split.axis]
        order = np.argsort(first_places(split, size, place.count), kind="stable")[:size]
        weight = _taken(weight, order, split.axis, place, place.sharding())
    return weight.addressable_data(0)


def are_equal(a: Any, b: Any, placement: Placement) -> bool:
    """Whether two arrays are equal; those of devices are compared there."""
    if not (isinstance(a, Array) and isinstance(b, Array)):
        return np.array_equal(np.asarray(a), np.asarray(b))
    compare, pair = jax.jit(jnp.array_equal), (brought(a, placement), brought(b, placement))
    return bool(jax.device_get(_run(compare, placement, *pair)))


def bits_of(x: Array) -> Array:
    """The bits of each value as an unsigned integer; those of 4-bit integers as 8 bits."""
    if x.dtype == jnp.int4:  # has no bits of whole bytes
        x = x.astype(jnp.int8)
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _exact(move: Any) -> Any:
    """Move bits of floats, because XLA may add zeros of other devices, which -0.0 does not keep."""

    def run(x: Array, *inputs: Any) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return move(x, *inputs)
        return jax.lax.bitcast_convert_type(move(bits_of(x), *inputs), x.dtype)

    return run


def _run(function: Any, placement: Placement, *inputs: Any) -> Any:
    with placement.in_order:
        return function(*inputs)


def _taken(
    weight: Array, order: np.ndarray, axis: int, placement: Placement, sharding: Any
) -> Array:
    index = placement.put(order.astype(np.int32))
    return _run(_taking(axis, sharding), placement, weight, index)


@cache
def _taking(axis: int | None, sharding: Any) -> Any:
    """A function that takes entries of an axis, or all that there are."""
    take = partial(jnp.take, axis=axis, mode="fill", fill_value=0)
    return jax.jit(_exact((lambda x: x) if axis is None else take), out_shardings=sharding)


def inputs_joined(pieces: Array, count: int, shape: tuple[int, ...]) -> Array:
    """A quantised matrix of this ``shape [P, out, J]`` from those of ``count`` devices' inputs."""
    num_parts, out_size, size = shape
    by_device = pieces.reshape(count, -1, out_size, pieces.shape[-1])
    matrix = jnp.moveaxis(by_device, 2, 0).reshape(out_size, num_parts, size)
    return matrix.swapaxes(0, 1)


@cache
def _uncutting(count: int, shape: tuple[int, ...], sharding: Any) -> Any:
    join = partial(inputs_joined, count=count, shape=shape)
    return jax.jit(_exact(join), out_shardings=sharding)


@cache
def _cutting(count: int, num_parts: int, sharding: Any) -> Any:
    """A function that cuts the inputs of a quantised matrix, see :class:`Split`."""

    def cut(weight: Array) -> Array:
        out_size = weight.shape[1]
        by_device = weight.swapaxes(0, 1).reshape(out_size, count * num_parts, -1)
        return by_device.swapaxes(0, 1)

    return jax.jit(_exact(cut), out_shardings=sharding)


@cache
def _joining(factors: tuple[float, ...], transpose: bool, sharding: Any) -> Any:
    def join(tensors: Sequence[Array], rows: Sequence[Array | None]) -> Array:
        ordered = (
            x if order is None else x.at[order].get(mode="clip")
            for x, order in zip(tensors, rows, strict=True)
        )
        pairs = zip(ordered, factors, strict=True)
        joint = jnp.concatenate([x if n == 1.0 else x * jnp.asarray(n, x.dtype) for x, n in pairs])
        return joint.T if transpose else joint

    return jax.jit(join, out_shardings=sharding)

"""Fingerprints of weights, which tell whether two sides have the same ones.

They are those of whole weights, whatever the number of devices that hold pieces.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.models.flat import FlatModel
from specjax.models.pieces import bits_of, first_places, inputs_joined
from specjax.runtime.runner import ModelRunner


def fingerprint(
    weight: Array,
    number: Array,
    places: Array | None = None,
    *,
    shape: tuple[int, ...] = (),
    axis: int | None = None,
) -> Array:
    """Hash the bits of a weight and its number u32 ``[]`` to u32 ``[2]``.

    If devices store pieces, ``places`` i32 says where the whole weight of this ``shape`` has them
    on ``axis``. Entries beyond the shape, such as further copies, do not count.
    """
    bits = bits_of(weight)
    place = jnp.uint32(2) * number + jnp.uint32(1)
    counts = jnp.bool_(True)
    for i, size in enumerate(shape or weight.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, weight.shape, i)
        if places is not None and i == axis:
            other_axes = [j for j in range(weight.ndim) if j != axis]
            index = jnp.expand_dims(places.astype(jnp.uint32), other_axes)
            counts = index < size
        place = place * jnp.uint32(size) + index
    mixed = (bits.astype(jnp.uint32) ^ (place * jnp.uint32(2654435761))) * jnp.uint32(2246822519)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(3266489917)
    mixed = mixed ^ (mixed >> 13)
    if places is not None:
        mixed = jnp.where(counts, mixed, jnp.uint32(0))
    return jnp.stack([jnp.sum(mixed), jnp.sum(mixed * (2 * place + 1))])


def _of_inputs(pieces: Array, number: Array, *, count: int, shape: tuple[int, ...]) -> Array:
    """The fingerprint of a quantised matrix of which devices have some inputs."""
    return fingerprint(inputs_joined(bits_of(pieces), count, shape), number)


def joined(fingerprints: Sequence[Array]) -> str:
    """Combine the fingerprints of all weights into one."""
    low = high = 0
    for words_of_weight in fingerprints:
        words = np.asarray(words_of_weight).tolist()
        low, high = (31 * low + words[0]) % 2**32, (31 * high + words[1]) % 2**32
    return f"{low:08x}{high:08x}"


def add_functions(runner: ModelRunner) -> None:
    """Add what :func:`fingerprint_of` calls to the functions that a runner compiles.

    One function per shape and dtype: a single one over all weights compiles slowly.
    """
    place, number = runner.networks.placement, jax.ShapeDtypeStruct((), jnp.uint32)
    for flat in (runner.networks.target, runner.networks.draft):
        leaves = zip(flat.names, flat.abstract, flat.placed(place), strict=True)
        for name, weight, placed in leaves:
            key, split = _key(flat, name, weight), flat.split(name)
            if runner.compiled.has(key):
                continue
            inputs: tuple[Any, ...] = placed, place.abstract(number)
            function = partial(fingerprint)
            if split is not None and split.parts is not None:
                function = partial(_of_inputs, count=place.count, shape=weight.shape)
            elif split is not None:
                inputs = *inputs, place.ints(placed.shape[split.axis])
                function = partial(fingerprint, shape=weight.shape, axis=split.axis)
            runner.compiled.add(key, jax.jit(function), inputs)


def fingerprint_of(runner: ModelRunner) -> str:
    """A fingerprint of a runner's weights; other weights almost surely have another."""
    nets, place = runner.networks, runner.networks.placement
    flats = (nets.target, nets.draft)
    fingerprints: list[Any] = []
    for flat, weights in zip(flats, runner.weights, strict=True):
        for name, abstract, weight in zip(flat.names, flat.abstract, weights, strict=True):
            inputs = [place.put(np.uint32(len(fingerprints)))]
            if (split := flat.split(name)) is not None and split.parts is None:
                places = first_places(split, abstract.shape[split.axis], place.count)
                inputs.append(place.put(places))
            fingerprints.append(runner.call(_key(flat, name, abstract), weight, *inputs))
    return joined(fingerprints)


def _key(flat: FlatModel[Any], name: str, weight: Any) -> tuple[str, str]:
    split = "" if (how := flat.split(name)) is None else f" {how}"
    return "fingerprint", f"{weight.dtype}{list(weight.shape)}{split}"

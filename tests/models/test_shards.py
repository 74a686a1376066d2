"""Matrices whose outputs or inputs are split over devices."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from specjax.checkpoints.quantization import quantise
from specjax.config import Dtypes, Quantization
from specjax.models.declare import Part
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.models.layers import Linear
from specjax.models.placement import Placement
from specjax.testing import TARGET

COUNT, FLOAT32 = 2, np.dtype(np.float32)
FORMATS = {
    "whole": None,
    "fp8": Quantization("fp8"),
    "int8": Quantization("int8"),
    "fp8 groups": Quantization("fp8", group=16),
    "int8 groups with zero points": Quantization("int8", group=16, has_zeros=True),
    "int4": Quantization("int4", group=16),
}


def named_weights(flat: FlatModel[Any], format: Quantization | None, matrix: Any) -> dict[str, Any]:
    """The arrays of ``matrix [out, in]``, and the values that they stand for as ``whole``."""
    if format is None:
        return {"kernel": matrix.T, "whole": matrix}
    values, scale = quantise(matrix, format.dtype, format.group)
    named, layout = {"kernel.values": values, "kernel.scale": scale}, flat.recipes
    offset = np.float32(np.arange(scale.size).reshape(scale.shape) % 3 - 1) / 8
    if format.has_zeros:
        named["kernel.offset"] = offset
    cut: Any = {name: layout[name].layout for name in named}
    stored = {name: cut[name].cut(x) for name, x in named.items()}
    size = matrix.shape[1] // scale.shape[1]
    whole = np.float32(values) * scale.repeat(size, axis=1)
    return stored | {"whole": whole + format.has_zeros * offset.repeat(size, axis=1)}


def over_devices(flat: FlatModel[Any], weights: Any, x: Any, place: Placement) -> Any:
    """The products of each device with its own inputs ``[COUNT, rows, in]``, joined."""
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, flat.placed(place))
    axis = PartitionSpec("tp")

    @partial(jax.shard_map, mesh=place.mesh, in_specs=(specs, axis), out_specs=axis)
    def run(weights: Any, x: Any) -> Any:
        return flat.rebuild(weights)(x[0])[None]

    return np.asarray(jax.jit(run)(weights, x))


@pytest.mark.parametrize("split", ["out", "in"])
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_whole_matrices(name: str, split: str) -> None:
    if name == "int4" and jax.__version_info__ < (0, 11):
        pytest.skip("arrays of 4 bits cannot be on several devices")
    format, place, rng = FORMATS[name], Placement.on(0, COUNT), np.random.default_rng(0)
    widths, in_size = (24, 8, 8), 64
    dtypes = Dtypes(format, FLOAT32, FLOAT32)
    tensors = [Part(f"tensor{i}", (width,)) for i, width in enumerate(widths)]
    how: dict[str, Any] = {"split": split, "shards": COUNT, "dtypes": dtypes, "bias": False}
    how |= {"widths": widths} if split == "out" else {}
    flat = FlatModel.of(lambda: Linear(in_size, *tensors, **how))
    flat = replace(flat, shards=COUNT)
    matrix = rng.normal(size=(sum(widths), in_size)).astype(np.float32)
    named = named_weights(flat, format, matrix)
    whole = named.pop("whole")
    weights = tuple(
        place.put_pieces(array, flat.split(name))
        for name, array in zip(flat.names, flat.order(named), strict=True)
    )
    for weight, leaf in zip(weights, flat.placed(place), strict=True):
        assert (weight.shape, weight.dtype) == (leaf.shape, leaf.dtype)
        assert weight.sharding.is_equivalent_to(leaf.sharding, weight.ndim)
    x = rng.normal(size=(3, in_size)).astype(np.float32)
    expected = x @ whole.T
    if split == "in":  # a device has its share of inputs; all have the sums
        outs = over_devices(flat, weights, np.stack(np.split(x, COUNT, axis=1)), place)
        expected = np.stack([expected] * COUNT)
    else:
        outs = over_devices(flat, weights, np.stack([x] * COUNT), place)
        parts = [np.split(each, COUNT, 1) for each in np.split(expected, [24, 32], axis=1)]
        expected = np.stack([np.concatenate(own, axis=1) for own in zip(*parts, strict=True)])
    np.testing.assert_allclose(outs, expected, atol=1e-5 * np.abs(expected).max())


def test_devices_round_their_own_activations() -> None:
    """The scale of a row is that of the own inputs."""
    format, place, rng = Quantization("int8", rounds_activations=True), Placement.on(0, 2), 0
    dtypes = Dtypes(format, FLOAT32, FLOAT32)
    how: dict[str, Any] = {"split": "in", "shards": COUNT, "dtypes": dtypes, "bias": False}
    flat = replace(FlatModel.of(lambda: Linear(8, Part("x", (4,)), **how)), shards=COUNT)
    x, matrix = np.random.default_rng(rng).normal(size=(2, 4, 8)).astype(np.float32)
    x[:, 4:] *= 20
    named = named_weights(flat, format, matrix)
    whole = named.pop("whole")
    weights = [place.put_pieces(named[name], flat.split(name)) for name in flat.names]
    halves = np.stack(np.split(x, COUNT, axis=1))
    scale = np.abs(halves).max(axis=-1, keepdims=True) / 127
    rounded = np.rint(halves / scale) * scale
    expected = np.concatenate([*rounded], axis=1) @ whole.T
    outs = over_devices(flat, tuple(weights), jnp.asarray(halves), place)
    np.testing.assert_allclose(outs, [expected] * COUNT, rtol=1e-5)


@pytest.mark.slow
def test_random_weights_have_the_shapes_of_pieces() -> None:
    config = replace(TARGET, vocab_size=62, num_kv_heads=1, quantization=Quantization("int8"))
    place, flat = Placement.on(0, COUNT), FlatModel.of(partial(CausalLM, config, shards=COUNT))
    drawn = place.move(flat.random(0, place), stored := flat.placed(place))
    for name, weight, leaf in zip(flat.names, drawn, stored, strict=True):
        assert (weight.shape, weight.dtype) == (leaf.shape, leaf.dtype), name
        assert weight.sharding.is_equivalent_to(leaf.sharding, weight.ndim), name
    by_name = dict(zip(flat.names, drawn, strict=True))
    size, heads = config.head_dim, config.num_heads + 2 * COUNT  # a KV head on each device
    assert by_name["layers.0.attention.qkv.kernel.values"].shape == (1, heads * size, 32)
    assert by_name["layers.0.attention.output.kernel.values"].shape == (COUNT, 32, 16)
    assert by_name["layers.0.attention.output.kernel.scale"].is_fully_replicated

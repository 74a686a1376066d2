"""The best columns of logits that are split over devices are those of whole rows, bit for bit."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from specjax.models.columns import Columns
from specjax.models.shards import AXIS, Split

ROWS = 3
# (columns, devices, K): columns that devices do not divide, a device with padding only, and K above
# the columns of a device
SHAPES = [(7, 2, 1), (8, 2, 3), (7, 3, 1), (7, 3, 4), (5, 4, 1), (5, 4, 5)]
# few values, so that many are equal
LOGITS = (0.0, -0.0, 1.0, -3.5, 88.0, 3e38, -3e38, -np.inf)


def pieces(rows: np.ndarray, count: int) -> np.ndarray:
    """The columns of each device, ``[count, ..., W]``, of rows ``[..., V]``; padding is large."""
    width = -(-rows.shape[-1] // count)
    missing = [(0, 0)] * (rows.ndim - 1) + [(0, count * width - rows.shape[-1])]
    padded = np.pad(rows, missing, constant_values=99.0)
    return np.stack(np.split(padded, count, axis=-1))


@cache
def best(size: int, count: int, topk: int) -> Any:
    """Run devices as a batch, of which an axis has the name of the mesh's."""

    def run(own: jax.Array) -> Any:
        columns = Columns(own, size, count)
        return columns.best(topk, has_total=True), columns.best(topk)[:2], columns.whole()

    return jax.jit(jax.vmap(run, axis_name=AXIS))


def check(rows: np.ndarray, count: int, topk: int, outputs: Any) -> None:
    (values, ids, total), alone, whole = jax.tree.map(np.asarray, outputs)
    if topk == 1:
        expected_ids = np.argmax(rows, axis=-1)[..., None]
    else:
        expected_ids = np.asarray(jax.lax.top_k(rows, topk)[1])
    expected = np.take_along_axis(rows, expected_ids, axis=-1)
    with np.errstate(all="ignore"):
        most = np.maximum(rows.max(axis=-1, keepdims=True), np.float32(-3e38)).astype(np.float64)
        sums = np.exp(rows.astype(np.float64) - most).sum(axis=-1, keepdims=True)
        expected_total = np.log(sums) + most
    for device in range(count):
        np.testing.assert_array_equal(values[device].view(np.int32), expected.view(np.int32))
        np.testing.assert_array_equal(ids[device], expected_ids)
        np.testing.assert_allclose(total[device], expected_total, rtol=1e-5)
        np.testing.assert_array_equal(alone[1][device], expected_ids)
        np.testing.assert_array_equal(whole[device], rows)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=20)
@given(data=st.data())
def test_best_columns_are_those_of_whole_rows(shape: tuple[int, int, int], data: Any) -> None:
    size, count, topk = shape
    choices = (*LOGITS, np.nan) if topk == 1 else LOGITS
    values = data.draw(st.lists(st.sampled_from(choices), min_size=21, max_size=21))
    rows = np.resize(np.array(values, np.float32), (ROWS, size))
    check(rows, count, topk, best(*shape)(pieces(rows, count)))


@pytest.mark.parametrize("topk", [1, 3])
def test_devices_exchange_exact_values(topk: int) -> None:
    """The sum of a mesh keeps signs of zeros, by which ``top_k`` orders them."""
    rows = np.array([[-0.0, 0.0, -0.0, 0.0, -1.0], [-np.inf] * 5, [5, 7, 7, 5, 7]], np.float32)

    def run(own: jax.Array) -> Any:
        columns = Columns(own[0], 5, 2)
        return columns.best(topk, has_total=True), columns.best(topk)[:2], columns.whole()

    mesh, spec = Mesh(np.array(jax.devices()[:2]), (AXIS,)), PartitionSpec(AXIS)
    sizes: Any = {"in_specs": spec, "out_specs": PartitionSpec(), "check_vma": False}
    outputs = jax.jit(jax.shard_map(run, mesh=mesh, **sizes))(pieces(rows, 2))
    of_devices = jax.tree.map(
        lambda x: np.stack([np.asarray(shard.data) for shard in x.addressable_shards]), outputs
    )
    check(rows, 2, topk, of_devices)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_pieces_are_padded_to_equal_sizes(count: int) -> None:
    table = np.arange(1, 15, dtype=np.float32).reshape(7, 2)
    for axis, weight in ((0, table), (1, table.T)):
        split = Split(axis, (7,))
        made = [split.piece(weight, device, count) for device in range(count)]
        joined = np.concatenate(made, axis=axis)
        assert joined.shape == split.stored(weight.shape, count)
        assert len({piece.shape for piece in made}) == 1
        np.testing.assert_array_equal(np.take(joined, range(7), axis=axis), weight)
        assert not np.take(joined, range(7, joined.shape[axis]), axis=axis).any()


def test_one_device_has_whole_rows() -> None:
    columns = Columns(own := jnp.ones((2, 5)), 5)
    assert columns.needed(is_greedy=True) is own
    assert columns.needed(is_greedy=False) is own

"""Compaction of accepted rows, compared with a loop in Python."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specjax.kernels.accept_tree import compact_tree

from .runs import RUNS, run_jitted


def brute_force(values: np.ndarray, accept_index: np.ndarray) -> np.ndarray:
    out = np.zeros((*accept_index.shape, *values.shape[2:]), values.dtype)
    for request, rows in enumerate(accept_index):
        for j, row in enumerate(rows):
            if row >= 0:
                out[request, j] = values[request, row]
    return out


def random_paths(rng: np.random.Generator, batch: int, rows: int, width: int) -> np.ndarray:
    """Strictly increasing rows from the root, then -1; the last request is padding."""
    out = np.full((batch, width), -1, np.int32)
    for request in range(batch - 1):
        length = int(rng.integers(1, min(rows, width) + 1))
        drafts = rng.choice(np.arange(1, rows), length - 1, replace=False) if rows > 1 else []
        out[request, :length] = [0, *sorted(drafts)]
    return out


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("dtype", "batch", "rows", "width", "trailing"),
    [
        ("bool", 3, 13, 5, ()),
        ("int8", 2, 8, 6, (7,)),
        ("int32", 3, 13, 5, ()),
        ("float16", 5, 10, 4, (3, 5)),
        ("bfloat16", 3, 13, 5, ()),
        ("float32", 5, 10, 4, (3, 5)),
        ("bfloat16", 1, 1, 1, ()),  # no drafts
        ("bfloat16", 2, 9, 1, (5,)),  # only the root
        ("bfloat16", 2, 3, 7, (2,)),  # accept width larger than the tree
        ("bfloat16", 3, 64, 17, (6,)),
        ("bfloat16", 2, 12, 5, (3000,)),  # three column blocks, the last one partial
        ("bfloat16", 2, 6, 4, (1025,)),
        ("bfloat16", 2, 40, 33, (130,)),  # three row blocks, the last one partial
        ("bfloat16", 2, 5, 3, (0,)),
        ("bfloat16", 0, 5, 3, (4,)),
    ],
)
def test_accepted_paths(
    dtype: str, batch: int, rows: int, width: int, trailing: tuple[int, ...], run: dict
) -> None:
    rng = np.random.default_rng(rows)
    # no zeros, so that a padding entry differs from every value
    numbers = rng.integers(1, 100, (batch, rows, *trailing))
    values = np.asarray(jnp.asarray(numbers).astype(dtype))
    accept_index = random_paths(rng, batch, rows, width)
    out = run_jitted(compact_tree, run, values, accept_index)
    assert out.dtype == values.dtype
    np.testing.assert_array_equal(out, brute_force(values, accept_index))


@pytest.mark.parametrize("run", RUNS)
def test_nothing_accepted_gives_zeros_and_reads_nothing(run: dict) -> None:
    values = np.full((3, 6, 5), np.nan, np.float32)
    out = run_jitted(compact_tree, run, values, np.full((3, 4), -1, np.int32))
    np.testing.assert_array_equal(out, np.zeros((3, 4, 5), np.float32))


@pytest.mark.parametrize("run", RUNS)
def test_values_pass_unchanged(run: dict) -> None:
    values = np.array([[[np.nan, -0.0], [np.inf, 1e-45], [-np.inf, 3.4e38]]], np.float32)
    out = run_jitted(compact_tree, run, values, np.array([[0, 1, 2, -1]], np.int32))
    np.testing.assert_array_equal(out[:, :3].view(np.int32), values.view(np.int32))


@pytest.mark.parametrize("run", RUNS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_row_numbers_come_back_as_the_index(data: st.DataObject, run: dict) -> None:
    entry = st.integers(-1, 10)
    index = data.draw(st.lists(st.lists(entry, min_size=6, max_size=6), min_size=3, max_size=3))
    accept_index = np.asarray(index, np.int32)
    # the request's number in the hundreds identifies rows of another request
    values = np.arange(11, dtype=np.int32) + 100 * np.arange(1, 4, dtype=np.int32)[:, None]
    out = run_jitted(compact_tree, run, values, accept_index)
    expected = np.where(accept_index >= 0, accept_index + 100 * np.arange(1, 4)[:, None], 0)
    np.testing.assert_array_equal(out, expected)

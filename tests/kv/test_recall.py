"""Rows of tokens in the KV pool: those before a chain, a tree's ancestors, and packed segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kv.pages import PageView, Segments

from ..support.lowering import TRITON_CALL, lower_for_cuda

SIZE, CHANNELS, COUNT = 4, 20, 3  # of a page, of a row (3 places of 2 * 1 * 4 values), recalled
TABLE = np.array([[3, 1, 6], [2, 5, 4]], np.int32)
LENS = np.array([5, 1], np.int32)  # tokens before the new ones
PARENTS = np.array([[-1, 0, 0, 1, 3], [-1, 0, 1, 1, 2]])
NUM_ROWS = PARENTS.shape[1]


def tree() -> np.ndarray:
    """The ancestors of each row, and the row, bool ``[B, T, T]``."""
    mask = np.zeros((2, NUM_ROWS, NUM_ROWS), bool)
    for b, parents in enumerate(PARENTS):
        for row, parent in enumerate(parents):
            mask[b, row] = mask[b, parent] if parent >= 0 else False
            mask[b, row, row] = True
    return mask


def expected(old: list[np.ndarray], new: np.ndarray, is_tree: bool) -> np.ndarray:
    """Rows before each new row, the oldest first; zeros before a text."""
    out = np.zeros((2, NUM_ROWS, COUNT, CHANNELS), np.float32)
    for b in range(2):
        for row in range(NUM_ROWS):
            path, node = [], PARENTS[b, row] if is_tree else row - 1
            while node >= 0:
                path.append(new[b, node])
                node = PARENTS[b, node] if is_tree else node - 1
            path += list(old[b][::-1])
            for distance, found in enumerate(path[:COUNT], start=1):
                out[b, row, COUNT - distance] = found
    return out


def filled(old: list[np.ndarray]) -> np.ndarray:
    """A pool of 5 layers, of which layers 1 to 3 have the rows."""
    pool = np.zeros((5, 7 * SIZE, 8), np.float32)
    for b, rows in enumerate(old):
        for position, row in enumerate(np.pad(rows, ((0, 0), (0, 4)))):
            index = TABLE[b, position // SIZE] * SIZE + position % SIZE
            pool[1:4, index] = row.reshape(3, 8)
    return pool.reshape(5, 7 * SIZE, 2, 1, 4)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_tree", [False, True])
def test_rows_before_others(is_tree: bool, is_packed: bool, implementation: str) -> None:
    rng, view = np.random.default_rng(0), PageView((jnp.asarray(TABLE),), SIZE, implementation)
    old = [rng.normal(size=(n, CHANNELS)).astype(np.float32) for n in LENS]
    new = rng.normal(size=(2, NUM_ROWS, CHANNELS)).astype(np.float32)
    mask = jnp.asarray(tree()) if is_tree else None

    @jax.jit
    def recall(pool: jax.Array, lens: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not is_packed:
            attend = view.attend(lens, NUM_ROWS, tree_mask=mask)
            return attend.recall(pool, 1, rows, COUNT)
        counts = jnp.full(2, NUM_ROWS, jnp.int32)
        segments = Segments.of(lens, counts, 2 * NUM_ROWS + 3)
        attend = view.attend_packed(segments, tree_mask=mask)
        pool, earlier = attend.recall(pool, 1, segments.gather(rows), COUNT)
        return pool, segments.scatter(earlier, NUM_ROWS)

    stored, earlier = recall(filled(old), LENS, new)
    np.testing.assert_array_equal(earlier, expected(old, new, is_tree))
    whole = [np.concatenate(pair) for pair in zip(old, new, strict=True)]
    np.testing.assert_array_equal(stored, filled(whole))


def test_levels_of_drafts() -> None:
    """A second level, whose rows have the first level's row before them."""
    rng, view = np.random.default_rng(0), PageView((jnp.asarray(TABLE),), SIZE, "xla")
    old = [rng.normal(size=(n + 1, CHANNELS)).astype(np.float32) for n in LENS]
    mask = np.array([[[1, 1, 0], [1, 0, 1]]] * 2, bool)

    @jax.jit
    def recall(pool: jax.Array, lens: jax.Array, rows: jax.Array) -> jax.Array:
        return view.attend(lens, 2, tree_mask=mask, first=1).recall(pool, 1, rows, 2)[1]

    earlier = recall(filled(old), LENS, np.ones((2, 2, CHANNELS), np.float32))
    last = np.stack([rows[-2:] for rows in old])[:, None]
    np.testing.assert_array_equal(earlier, np.broadcast_to(last, earlier.shape))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_lower_for_cuda(dtype: str) -> None:
    shape = jax.ShapeDtypeStruct

    def recall(pool: jax.Array, lens: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        view = PageView((jnp.asarray(TABLE),), SIZE, "pallas")
        return view.attend(lens, NUM_ROWS, tree_mask=tree()).recall(pool, 1, rows, COUNT)

    arrays = shape((5, 28, 2, 2, 16), dtype), shape((2,), jnp.int32), shape((2, 5, 100), dtype)
    assert lower_for_cuda(recall, *arrays).count(TRITON_CALL) == 2

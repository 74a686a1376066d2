"""KV rows of single tokens read from, written to and moved inside a pool, against Python loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specjax.kernels.kv_rows import gather_rows, move_kv, scatter_rows

from ..support.lowering import TRITON_CALL, lower_for_cuda
from .runs import RUNS, run_jitted

# layers, KV indices, rows to move, shape of a row, dtype
CASES = [
    (2, 40, 16, (2, 2, 16), "bfloat16"),
    (3, 25, 7, (2, 3, 10), "float32"),  # a row of 60 entries: not a power of two
    (1, 9, 1, (5,), "float16"),
    (2, 30, 11, (2, 8, 160), "bfloat16"),  # several column blocks
    (2, 20, 6, (3,), "int32"),
    (2, 40, 16, (2, 2, 16), "int8"),
    (1, 40, 16, (3, 2), "uint8"),
    (2, 20, 6, (), "float32"),
]


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8)


def make(case: tuple, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    layers, slots, count, shape, dtype = case
    rng = np.random.default_rng(seed)

    def values(*lead: int) -> np.ndarray:
        return np.array(jnp.asarray(100 * rng.standard_normal((*lead, *shape))).astype(dtype))

    index = rng.permutation(slots)[:count].astype(np.int32)
    return values(layers, slots), index, values(layers, count)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_come_out_of_a_pool(case: tuple, run: dict) -> None:
    pool, index, _ = make(case, 0)
    index[-1] = index[0]  # padding repeats an index
    out = run_jitted(gather_rows, run, pool, index)
    assert out.dtype == pool.dtype
    np.testing.assert_array_equal(bits(out), bits(np.stack([pool[:, i] for i in index], 1)))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_go_into_a_pool(case: tuple, run: dict) -> None:
    pool, index, rows = make(case, 1)
    expected = pool.copy()
    # the last rows have indices outside the pool
    for place, i in enumerate(index[: len(index) // 2 + 1]):
        expected[:, i] = rows[:, place]
    index[len(index) // 2 + 1 :] = pool.shape[1] + np.arange(len(index) - len(index) // 2 - 1)
    out = run_jitted(scatter_rows, run, pool, index, rows)
    assert out.dtype == pool.dtype
    np.testing.assert_array_equal(bits(out), bits(expected))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_non_finite_values_become_zero(dtype: str, run: dict) -> None:
    case = (2, 12, 4, (2, 1, 8), dtype)
    pool, index, rows = make(case, 2)
    rows[0, 1, 0, 0, :3] = np.nan, np.inf, -np.inf
    largest = jnp.finfo(dtype).max
    rows[1, 2, 0, 0, 0] = largest
    expected = pool.copy()
    expected[:, index] = rows
    expected[0, index[1], 0, 0, :3] = 0
    out = run_jitted(scatter_rows, run, pool, index, rows)
    np.testing.assert_array_equal(bits(out), bits(expected))


@pytest.mark.parametrize("run", RUNS)
def test_non_finite_values_in_words_become_zero(run: dict) -> None:
    pool, index, rows = make((2, 12, 4, (2, 1, 8), "uint16"), 2)
    rows[...] = 521 * np.arange(rows.size).reshape(rows.shape) % 0x7F00
    rows[0, 0, 0, 0] = 0x7F7F, 0xFF7F, 0x7F01, 0x80FF, 0x7E7E, 0xFFFF, 0xFF, 0x7F00
    narrow = rows.view(jnp.float8_e4m3fn).astype(np.float32)
    assert np.isnan(narrow[0, 0, 0, 0]).sum() == 10
    out = run_jitted(scatter_rows, run, pool, index, rows)
    found = out[:, index].view(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(found, np.nan_to_num(narrow))
    others = np.setdiff1d(np.arange(12), index)
    np.testing.assert_array_equal(out[:, others], pool[:, others])


# moves


def brute_force(pool: np.ndarray, source: np.ndarray, destination: np.ndarray) -> np.ndarray:
    out = pool.copy()
    for reads, writes in zip(source, destination, strict=True):
        for read, write in zip(reads, writes, strict=True):
            if read >= 0 and write >= 0:
                out[:, write] = pool[:, read]
    return out


def random_pool(
    rng: np.random.Generator, layers: int, slots: int, heads: int, dim: int, dtype: str
) -> np.ndarray:
    shape = (layers, slots, 2, heads, dim)
    return np.array(jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype))


def random_moves(
    rng: np.random.Generator, slots: int, batch: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sources and destinations in each request's part of the slots; one request is padding."""
    share = slots // batch
    source = np.full((batch, width), -1, np.int32)
    destination = np.zeros((batch, width), np.int32)
    for request in range(batch - 1):
        begin = request * share
        destination[request] = begin + rng.permutation(share)[:width]
        # an accepted path: rows in order, none after its end
        length = int(rng.integers(1, width + 1))
        source[request, :length] = begin + np.sort(rng.permutation(share)[:length])
    return source, destination


def check_move(pool: np.ndarray, source: np.ndarray, destination: np.ndarray, run: dict) -> None:
    out = run_jitted(move_kv, run, pool, source, destination)
    assert out.dtype == pool.dtype
    expected = brute_force(pool, source, destination)
    np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("batch", "width", "pool"),
    [
        (4, 4, (2, 41, 2, 16, "bfloat16")),
        (3, 6, (3, 60, 3, 10, "float32")),  # a row of 60 entries: not a power of two
        (2, 1, (1, 16, 1, 64, "bfloat16")),
        (4, 4, (2, 41, 2, 16, "uint16")),
        (3, 17, (2, 240, 1, 8, "float32")),
        (3, 5, (2, 64, 8, 128, "bfloat16")),  # several column blocks
    ],
)
def test_accepted_paths(batch: int, width: int, pool: tuple, run: dict) -> None:
    rng = np.random.default_rng(width)
    check_move(random_pool(rng, *pool), *random_moves(rng, pool[1], batch, width), run)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_rows_of_any_shape_move(dtype: str, run: dict) -> None:
    rng = np.random.default_rng(3)
    pool = rng.integers(127, size=(1, 41, 3, 2)).astype(dtype)
    check_move(pool, *random_moves(rng, 41, 4, 4), run)


@pytest.mark.parametrize(
    ("dtype", "num_bytes", "is_kernel"),
    [
        ("uint8", 2**31, True),
        ("uint8", 2**31 + 384, False),
        ("uint8", 2**32 - 384, False),
        ("uint8", 2**32 + 384, True),
        ("int16", 2**32, True),
    ],
)
def test_small_integers_lower_for_cuda(dtype: str, num_bytes: int, is_kernel: bool) -> None:
    """Offsets in kernels have 32 bits up to 4 GiB."""
    num_slots = num_bytes // 384 // jnp.dtype(dtype).itemsize
    pool, rows = (jax.ShapeDtypeStruct((1, n, 48, 8), dtype) for n in (num_slots, 32))
    index, path = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((32,), (4, 8)))
    for function, inputs in ((scatter_rows, (index, rows)), (move_kv, (path, path))):
        text = lower_for_cuda(partial(function, implementation="pallas"), pool, *inputs)
        assert text.count(TRITON_CALL) == is_kernel


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_many_rows_in_one_request(run: dict) -> None:
    rng = np.random.default_rng(0)
    pool = random_pool(rng, 1, 90, 1, 40, "float32")
    source = 20 + np.arange(65, dtype=np.int32)[None]
    check_move(pool, source, source - 15, run)


@pytest.mark.parametrize("run", RUNS)
def test_nothing_to_move_leaves_the_pool(run: dict) -> None:
    rng = np.random.default_rng(1)
    pool = random_pool(rng, 2, 9, 2, 8, "float32")
    # -1 must be neither read as the last slot nor written
    pool[:, -1] = np.nan
    nothing, some = np.full((2, 3), -1, np.int32), np.arange(6, dtype=np.int32).reshape(2, 3)
    check_move(pool, nothing, some, run)
    check_move(pool, some, nothing, run)
    # a chain: every row is already in place
    check_move(pool, some, some, run)


@pytest.mark.parametrize("run", RUNS)
def test_slots_outside_the_pool_are_skipped(run: dict) -> None:
    rng = np.random.default_rng(2)
    pool = random_pool(rng, 2, 9, 2, 8, "float32")
    source = np.array([[3, 9, 4, 2**31 - 1]], np.int32)
    destination = np.array([[1, 2, 9, 5]], np.int32)
    out = run_jitted(move_kv, run, pool, source, destination)
    expected = pool.copy()
    expected[:, 1] = pool[:, 3]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("run", RUNS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_overlap_within_a_request(data: st.DataObject, run: dict) -> None:
    """Also cycles and copies of one row, which accepted paths do not have."""
    source, destination = [], []
    for request in range(2):
        own = range(8 * request, 8 * request + 8)
        destination.append(data.draw(st.permutations(own))[:5])
        entry = st.sampled_from([-1, *own])
        source.append(data.draw(st.lists(entry, min_size=5, max_size=5)))
    pool = np.arange(2 * 16 * 8, dtype=np.float32).reshape(2, 16, 2, 1, 4)
    check_move(pool, np.asarray(source, np.int32), np.asarray(destination, np.int32), run)

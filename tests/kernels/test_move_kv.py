"""Moving KV rows, against gather-all-then-scatter in Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specjax.kernels.move_kv import move_kv

from .lowering import TRITON_CALL, lower_for_cuda
from .runs import DEVICE, RUNS, run_jitted


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


def paths(
    rng: np.random.Generator, batch: int, rows: int, width: int, page_size: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Sources and destinations of accepted paths over shuffled pages, and the slots of the pool.

    The last request is padding: its destinations lie in the padding page.
    """
    pages_each = -(-(page_size + rows + width) // page_size)
    tables = 1 + rng.permutation(batch * pages_each).reshape(batch, pages_each)
    source = np.full((batch, width), -1, np.int32)
    destination = np.zeros((batch, width), np.int32)
    for request in range(batch - 1):
        seq_len = int(rng.integers(0, page_size + 1))
        length = int(rng.integers(1, min(rows, width) + 1))
        drafts = np.sort(rng.choice(np.arange(1, rows), length - 1, replace=False))

        def slots(at: np.ndarray, request: int = request, seq_len: int = seq_len) -> np.ndarray:
            at = at + seq_len
            return tables[request, at // page_size] * page_size + at % page_size

        source[request, :length] = slots(np.concatenate([[0], drafts]))
        destination[request] = slots(np.arange(width))
    return source, destination, (1 + batch * pages_each) * page_size


def check(pool: np.ndarray, source: np.ndarray, destination: np.ndarray, run: dict) -> None:
    out = run_jitted(move_kv, run, pool, source, destination)
    assert out.dtype == pool.dtype
    expected = brute_force(pool, source, destination)
    np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("batch", "rows", "width", "layers", "heads", "dim", "dtype", "page_size"),
    [
        (4, 8, 4, 2, 2, 16, "bfloat16", 1),
        (3, 13, 6, 3, 3, 10, "float32", 4),  # a row of 60 entries: no power of two
        (2, 5, 1, 1, 1, 64, "bfloat16", 4),  # only roots: nothing moves
        (3, 64, 17, 2, 1, 8, "float32", 1),
        (3, 9, 5, 2, 8, 128, "bfloat16", 16),  # several column blocks
    ],
)
def test_accepted_paths(
    batch: int,
    rows: int,
    width: int,
    layers: int,
    heads: int,
    dim: int,
    dtype: str,
    page_size: int,
    run: dict,
) -> None:
    rng = np.random.default_rng(rows + page_size)
    source, destination, slots = paths(rng, batch, rows, width, page_size)
    pool = random_pool(rng, layers, slots, heads, dim, dtype)
    check(pool, source, destination, run)


@pytest.mark.parametrize("run", RUNS)
def test_many_rows_in_one_request(run: dict) -> None:
    rng = np.random.default_rng(0)
    pool = random_pool(rng, 1, 90, 1, 40, "float32")
    source = 20 + np.arange(65, dtype=np.int32)[None]
    check(pool, source, source - 15, run)


@pytest.mark.parametrize("run", RUNS)
def test_nothing_to_move_leaves_the_pool(run: dict) -> None:
    rng = np.random.default_rng(1)
    pool = random_pool(rng, 2, 9, 2, 8, "float32")
    # -1 must neither be read as the last slot nor written
    pool[:, -1] = np.nan
    nothing, some = np.full((2, 3), -1, np.int32), np.arange(6, dtype=np.int32).reshape(2, 3)
    check(pool, nothing, some, run)
    check(pool, some, nothing, run)
    # a chain: every row is where it belongs
    check(pool, some, some, run)


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
    """Cycles and copies of one row too, which accepted paths do not have."""
    source, destination = [], []
    for request in range(2):
        own = range(8 * request, 8 * request + 8)
        destination.append(data.draw(st.permutations(own))[:5])
        entry = st.sampled_from([-1, *own])
        source.append(data.draw(st.lists(entry, min_size=5, max_size=5)))
    pool = np.arange(2 * 16 * 8, dtype=np.float32).reshape(2, 16, 2, 1, 4)
    check(pool, np.asarray(source, np.int32), np.asarray(destination, np.int32), run)


def test_lowers_for_cuda_in_one_launch_in_place() -> None:
    text = lower_for_cuda(
        partial(move_kv, **DEVICE),
        jax.ShapeDtypeStruct((32, 4096, 2, 8, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((5, 6), jnp.int32),
        jax.ShapeDtypeStruct((5, 6), jnp.int32),
        donate_argnums=0,
    )
    assert text.count(f"custom_call @{TRITON_CALL}") == 1
    assert "specjax_move_kv" in text
    assert "tf.aliasing_output = 0" in text
    assert "operand_index = 0" in text  # of output_operand_aliases


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "width"),
    [("float32", 3, 10, 1), ("bfloat16", 3, 64, 40), ("float16", 1, 8, 3)],
)
def test_odd_shapes_lower_for_cuda(dtype: str, heads: int, dim: int, width: int) -> None:
    text = lower_for_cuda(
        partial(move_kv, **DEVICE),
        jax.ShapeDtypeStruct((2, 50, 2, heads, dim), dtype),
        jax.ShapeDtypeStruct((3, width), jnp.int32),
        jax.ShapeDtypeStruct((3, width), jnp.int32),
    )
    assert "specjax_move_kv" in text


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_a_donated_pool_is_not_copied(implementation: str) -> None:
    pool = jax.ShapeDtypeStruct((4, 4096, 2, 8, 128), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((8, 6), jnp.int32)
    move = jax.jit(partial(move_kv, implementation=implementation), donate_argnums=0)
    compiled = move.lower(pool, index, index).compile()
    size = pool.size * pool.dtype.itemsize
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size // 2


def test_bad_arguments_are_refused() -> None:
    pool, index = jnp.zeros((2, 8, 2, 1, 4)), jnp.zeros((3, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"destination \(3, 5\) both \[B, A\]"):
        move_kv(pool, index, jnp.zeros((3, 5), jnp.int32))
    with pytest.raises(ValueError, match=r"pool \(8, 2, 1, 4\)"):
        move_kv(pool[0], index, index)
    with pytest.raises(ValueError, match="implementation='cuda'"):
        move_kv(pool, index, index, implementation="cuda")

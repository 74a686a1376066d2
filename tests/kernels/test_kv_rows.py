"""KV rows of single tokens out of a pool and into one, against loops in Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.kv_rows import gather_rows, scatter_rows

from .lowering import TRITON_CALL, lower_for_cuda
from .runs import DEVICE, RUNS, run_jitted

# layers, KV indices, rows that move, shape of one, dtype
CASES = [
    (2, 40, 16, (2, 2, 16), "bfloat16"),
    (3, 25, 7, (2, 3, 10), "float32"),  # a row of 60 entries: no power of two
    (1, 9, 1, (5,), "float16"),
    (2, 30, 11, (2, 8, 160), "bfloat16"),  # several column blocks
    (2, 20, 6, (3,), "int32"),
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
    # the last rows are none of the pool's
    for place, i in enumerate(index[: len(index) // 2 + 1]):
        expected[:, i] = rows[:, place]
    index[len(index) // 2 + 1 :] = pool.shape[1] + np.arange(len(index) - len(index) // 2 - 1)
    out = run_jitted(scatter_rows, run, pool, index, rows)
    assert out.dtype == pool.dtype
    np.testing.assert_array_equal(bits(out), bits(expected))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_what_is_not_finite_becomes_zero(dtype: str, run: dict) -> None:
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


def test_both_lower_for_cuda_in_one_launch() -> None:
    pool = jax.ShapeDtypeStruct((32, 4096, 2, 8, 128), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((512,), jnp.int32)
    rows = jax.ShapeDtypeStruct((32, 512, 2, 8, 128), jnp.bfloat16)
    text = lower_for_cuda(partial(gather_rows, **DEVICE), pool, index)
    assert text.count(f"custom_call @{TRITON_CALL}") == 1
    assert "specjax_gather_rows" in text
    text = lower_for_cuda(partial(scatter_rows, **DEVICE), pool, index, rows, donate_argnums=0)
    assert text.count(f"custom_call @{TRITON_CALL}") == 1
    assert "specjax_scatter_rows" in text
    assert "tf.aliasing_output = 0" in text


@pytest.mark.parametrize(("slots", "calls"), [(1_000_000, 1), (1_120_000, 0)])
def test_pools_beyond_the_offsets_of_a_kernel_have_none(slots: int, calls: int) -> None:
    """Those of one byte an entry from 2 GiB on; wider ones get offsets of 64 bits."""
    pool = jax.ShapeDtypeStruct((2, slots, 1024), jnp.int8)
    index = jax.ShapeDtypeStruct((64,), jnp.int32)
    text = lower_for_cuda(partial(gather_rows, **DEVICE), pool, index)
    assert text.count(f"custom_call @{TRITON_CALL}") == calls


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_a_donated_pool_is_not_copied(implementation: str) -> None:
    pool = jax.ShapeDtypeStruct((4, 4096, 2, 8, 128), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((64,), jnp.int32)
    rows = jax.ShapeDtypeStruct((4, 64, 2, 8, 128), jnp.bfloat16)
    put = jax.jit(partial(scatter_rows, implementation=implementation), donate_argnums=0)
    memory = put.lower(pool, index, rows).compile().memory_analysis()
    size = pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size // 2


def test_bad_arguments_are_refused() -> None:
    pool, index = jnp.zeros((2, 8, 2, 1, 4)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=r"index \(3, 1\) \[W\]"):
        gather_rows(pool, index[:, None])
    with pytest.raises(ValueError, match=r"rows float32\(2, 4, 2, 1, 4\)"):
        scatter_rows(pool, index, jnp.zeros((2, 4, 2, 1, 4)))
    with pytest.raises(ValueError, match="implementation='cuda'"):
        gather_rows(pool, index, implementation="cuda")

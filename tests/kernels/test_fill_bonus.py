"""The bonus token of each request, against a loop in Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specjax.kernels.fill_bonus import fill_bonus_tokens

from .lowering import TRITON_CALL, lower_for_cuda
from .runs import DEVICE, RUNS, run_jitted


def brute_force(tokens: np.ndarray, counts: np.ndarray) -> list[int]:
    return [int(row[n - 1]) if n else 0 for row, n in zip(tokens, counts, strict=True)]


def check(tokens: np.ndarray, counts: np.ndarray, run: dict) -> None:
    bonus = run_jitted(fill_bonus_tokens, run, tokens, counts)
    assert bonus.dtype == jnp.int32
    assert bonus.tolist() == brute_force(tokens, counts)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (7, 1), (13, 9), (64, 16), (129, 5)])
def test_random_counts(batch: int, width: int, run: dict) -> None:
    rng = np.random.default_rng(batch * 100 + width)
    tokens = rng.integers(1, 2**31 - 1, (batch, width)).astype(np.int32)
    check(tokens, rng.integers(0, width + 1, batch).astype(np.int32), run)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_equal_counts(count: int, run: dict) -> None:
    # every entry is distinct, so a wrong stride shows
    tokens = np.arange(1, 31, dtype=np.int32).reshape(6, 5)
    check(tokens, np.full(6, count, np.int32), run)


@pytest.mark.parametrize("run", RUNS)
@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(0, 4), min_size=5, max_size=5))
def test_padding_rows_do_not_disturb_the_others(counts: list[int], run: dict) -> None:
    tokens = np.arange(1, 21, dtype=np.int32).reshape(5, 4)
    check(tokens, np.asarray(counts, np.int32), run)


@pytest.mark.parametrize("run", RUNS)
def test_empty_batch(run: dict) -> None:
    assert fill_bonus_tokens(jnp.zeros((0, 4), jnp.int32), jnp.zeros(0, jnp.int32), **run).size == 0


@pytest.mark.parametrize(("batch", "width"), [(1, 1), (13, 9), (300, 3)])
def test_lowers_for_cuda(batch: int, width: int) -> None:
    text = lower_for_cuda(
        partial(fill_bonus_tokens, **DEVICE),
        jax.ShapeDtypeStruct((batch, width), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    assert text.count(f"custom_call @{TRITON_CALL}") == 1
    assert "specjax_fill_bonus" in text


def test_bad_arguments_are_refused() -> None:
    tokens, counts = jnp.zeros((3, 4), jnp.int32), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=r"\(3, 4\) must be \[B, A\] .* \(4,\)"):
        fill_bonus_tokens(tokens, jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match="implementation='cuda'"):
        fill_bonus_tokens(tokens, counts, implementation="cuda")

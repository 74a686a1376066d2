"""Rotation and KV store, compared with numpy."""

from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.backend import WORD
from specjax.kernels.kv_format import from_pool, to_pool
from specjax.kernels.rope_store import rope_store

from .runs import DEVICE, RUNS

BOUNDS = {"float32": 1e-6, "bfloat16": 2**-7}
# batch, tokens, query heads, KV heads, head dim
CASES = [(2, 3, 4, 2, 16), (1, 1, 9, 3, 64), (4, 5, 2, 2, 8), (8, 40, 4, 1, 16), (2, 3, 4, 2, 96)]
GPU_CASES = [*CASES, (1, 6, 9, 3, 64), (32, 8, 32, 8, 128), (1, 1024, 32, 8, 128), (4, 8, 8, 2, 80)]


def make_case(case, dtype):
    batch, rows, heads, kv_heads, dim = case
    rng = np.random.default_rng(0)
    slots = rng.permutation(np.arange(4, 4 + 2 * batch * rows))[: batch * rows]
    slots = slots.reshape(batch, rows).astype(np.int32)
    slots[-1, 0] = 0
    if batch > 2:
        slots[1] = 0  # a padding row
    angles = rng.uniform(0, 6.3, (batch, rows, 1, dim // 2))
    q, k, v = (
        jnp.asarray(rng.standard_normal((batch, rows, n, dim)), dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    pool = jnp.asarray(rng.standard_normal((3, 4 + 2 * batch * rows, 2, kv_heads, dim)), dtype)
    tables = [jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)]
    return q, k, v, *tables, pool, jnp.asarray(slots)


def turned(x, cos, sin):
    """Each pair as a complex number, multiplied by the table's."""
    x, half = np.asarray(x, np.float64), x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * (np.asarray(cos) + 1j * np.asarray(sin))
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("run", RUNS[:2])
@pytest.mark.parametrize(("case", "dtype"), list(zip(CASES, cycle(BOUNDS), strict=False)), ids=str)
def test_equals_brute_force(case, dtype, run):
    check(case, dtype, run)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_equals_brute_force_on_gpu(case, dtype):
    check(case, dtype, DEVICE)


def check(case, dtype, run):
    q, k, v, cos, sin, pool, slots = make_case(case, dtype)
    call = jax.jit(lambda *args: rope_store(*args[:6], 1, args[6], **run))
    out, after = call(q, k, v, cos, sin, pool, slots)
    assert (out.dtype, after.dtype) == (q.dtype, pool.dtype)
    bound = BOUNDS[dtype] * 6
    np.testing.assert_allclose(np.asarray(out, np.float64), turned(q, cos, sin), atol=bound)
    at = np.asarray(slots)
    live = at > 0
    stored = np.asarray(after[1], np.float64)
    keys = turned(k, cos, sin)
    np.testing.assert_allclose(stored[at[live], 0], keys[live], atol=bound)
    np.testing.assert_array_equal(np.asarray(after)[1, at[live], 1], np.asarray(v)[live])
    # the padding slot holds any one of the tokens stored there
    assert np.isfinite(stored[0]).all()
    others = np.setdiff1d(np.arange(1, pool.shape[1]), at)
    before = np.asarray(pool)
    np.testing.assert_array_equal(np.asarray(after)[1, others], before[1, others])
    np.testing.assert_array_equal(np.asarray(after)[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_8_bit_floats_saturate(dtype, run):
    q, k, v, cos, sin, pool, slots = make_case(GPU_CASES[-1], dtype)
    k, v = 200 * k, 200 * v
    v = v.at[0, 1, 1, 3].set(jnp.nan)
    pool = to_pool(pool, WORD)
    call = jax.jit(lambda *args: rope_store(*args[:6], 1, args[6], **run))
    out, after = call(q, k, v, cos, sin, pool, slots)
    assert (out.dtype, after.dtype) == (q.dtype, pool.dtype)
    at = np.asarray(slots)
    live, stored = at > 0, np.asarray(from_pool(after[1], jnp.float32), np.float64)
    expected = np.stack([turned(k, cos, sin), np.asarray(v, np.float64)], axis=2)[live]
    assert (np.abs(expected) > 500).any()
    assert np.isnan(expected).sum() == 1
    expected = np.clip(expected, -448, 448)
    # three bits after the leading one, and in bfloat16 keys are rounded to eight bits before
    np.testing.assert_allclose(stored[at[live]], expected, rtol=2**-4 + 2**-8, atol=2**-9)


EPS = 0.1  # large, so that it matters


def make_scales(case, dtype):
    rng = np.random.default_rng(2)
    return [jnp.asarray(rng.uniform(0.5, 2, case[-1]), dtype) for _ in range(2)]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("case", "dtype"), list(zip(CASES, cycle(BOUNDS), strict=False)), ids=str)
def test_queries_and_keys_are_normed_first(case, dtype, run):
    q, k, v, cos, sin, pool, slots = make_case(case, dtype)
    scales = make_scales(case, dtype)

    def normed(x, scale):
        x, scale = np.asarray(x, np.float64), np.asarray(scale, np.float64)
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * scale

    call = jax.jit(
        lambda *args: rope_store(*args[:6], 1, args[6], norms=(args[7], args[8], EPS), **run)
    )
    out, after = call(q, k, v, cos, sin, pool, slots, *scales)
    assert (out.dtype, after.dtype) == (q.dtype, pool.dtype)
    bound, live = BOUNDS[dtype] * 6, np.asarray(slots) > 0
    expected = turned(normed(q, scales[0]), cos, sin)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=bound)
    stored = np.asarray(after[1], np.float64)[np.asarray(slots)[live]]
    expected = turned(normed(k, scales[1]), cos, sin)[live]
    np.testing.assert_allclose(stored[:, 0], expected, atol=bound)
    np.testing.assert_array_equal(stored[:, 1], np.asarray(v, np.float64)[live])


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("run", RUNS)
def test_partial_sums(run, with_norms):
    """Four partial sums give the same as their sum."""
    *qkv, cos, sin, pool, slots = make_case((2, 3, 4, 2, 16), "bfloat16")
    rng = np.random.default_rng(1)
    shares = [jnp.asarray(rng.standard_normal((3, *x.shape)), jnp.float32) for x in qkv]
    parts = [
        jnp.concatenate([s, x.astype(jnp.float32)[None] - s.sum(axis=0)[None]])
        for s, x in zip(shares, qkv, strict=True)
    ]
    norms = (*make_scales((2, 3, 4, 2, 16), "bfloat16"), EPS) if with_norms else None
    call = jax.jit(lambda *args: rope_store(*args[:6], 1, args[6], norms=norms, **run))
    for one, other in zip(
        call(*qkv, cos, sin, pool, slots), call(*parts, cos, sin, pool, slots), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2**-6, atol=2**-6
        )


def test_parts_of_one_product_are_not_copied():
    """Split and concatenation of queries, keys and values cancel out."""

    @jax.jit
    def joined(x, kernel):
        qkv = (x @ kernel).reshape(2, 3, 8, 16)
        return jnp.concatenate(jnp.split(qkv, (4, 6), axis=-2), axis=-2) * 2

    text = joined.lower(jnp.zeros((2, 3, 32)), jnp.zeros((32, 128))).compile().as_text()
    assert " slice(" not in text
    assert " concatenate(" not in text


def test_the_pool_is_updated_in_place():
    q, k, v, cos, sin, pool, slots = make_case(CASES[0], "float32")
    call = jax.jit(
        lambda *args: rope_store(*args[:6], 1, args[6], implementation="xla"), donate_argnums=5
    )
    compiled = call.lower(q, k, v, cos, sin, pool, slots).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= pool.nbytes


def test_bad_shapes():
    q, k, v, cos, sin, pool, slots = make_case(CASES[0], "float32")
    with pytest.raises(ValueError, match="expected "):
        rope_store(q, k, v, cos, sin, pool, 0, slots[:, :1])
    with pytest.raises(ValueError, match=r"norms \[\(16,\), \(8,\)\]: expected"):
        rope_store(q, k, v, cos, sin, pool, 0, slots, norms=(jnp.ones(16), jnp.ones(8), EPS))


@pytest.mark.gpu
@pytest.mark.parametrize("has_norms", [False, True])
def test_bits_do_not_depend_on_the_number_of_tokens(has_norms):
    """With ``"invariant"``; one token alone, and everywhere among up to 8,192 others."""
    heads, kv_heads, dim, tokens = 8, 2, 128, 8192
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, 1, tokens, n, dim)), jnp.float32)
        for n in (heads, kv_heads, kv_heads)
    )
    angles = jnp.asarray(rng.uniform(0, 6, (1, tokens, 1, dim // 2)), jnp.float32)
    scale = jnp.asarray(rng.standard_normal(dim), jnp.bfloat16)
    norms = (scale, scale, 1e-6) if has_norms else None
    call = jax.jit(
        lambda q, k, v, angles, pool, slots: rope_store(
            *(q, k, v, jnp.cos(angles), jnp.sin(angles), pool, 0, slots),
            norms=norms,
            implementation="invariant",
        )
    )
    pool = jnp.zeros((1, tokens, 2, kv_heads, dim), jnp.bfloat16)
    slots = jnp.arange(tokens, dtype=jnp.int32)[None]
    rotated, stored = call(q, k, v, angles, pool, slots)
    for first, count in ((0, 1), (5, 3), (100, 64), (1000, 500), (4000, 4096)):
        own = slice(first, first + count)
        part = (q[:, :, own], k[:, :, own], v[:, :, own], angles[:, own])
        alone, kept = call(*part, pool, slots[:, own])
        assert bool((alone == rotated[:, own]).all())
        assert bool((kept[:, own] == stored[:, own]).all())

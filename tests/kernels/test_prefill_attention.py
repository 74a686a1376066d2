"""Prefill attention: every implementation, compared with dense numpy in float64."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.backend import WORD
from specjax.kernels.kv_format import from_pool, to_pool
from specjax.kernels.paged import PagedInputs
from specjax.kernels.prefill_attention import PrefillTiles, prefill_attention

from .attention import BOUNDS, Forms


class Case(NamedTuple):
    tokens: int
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    page_size: int


CASES = [
    # segments of 0 and 1 tokens at the start, in the middle and at the end; then padding
    Case(40, (0, 1, 17, 0, 9, 0), (5, 30, 0, 7, 70, 0), 4, 1, 16, 4),
    # one segment that fills the row
    Case(48, (48,), (0,), 2, 2, 32, 1),
    Case(48, (48,), (100,), 9, 3, 64, 16),
    # no padding, several tiles per segment
    Case(150, (90, 60), (33, 0), 6, 2, 16, 16),
    # as in a packed verify pass: a few rows of each request, then padding
    Case(12, (1, 5, 0, 1, 3), (9, 40, 0, 0, 21), 8, 2, 32, 4),
    # only padding
    Case(8, (0, 0), (3, 0), 4, 4, 16, 4),
    # a head dim that is the sum of two powers of two
    Case(40, (20, 17), (5, 30), 4, 2, 96, 16),
]
WIDEST = Case(10, (6, 3), (5, 30), 4, 2, 512, 16)
GPU_CASES = [
    *CASES,
    WIDEST,
    Case(400, (130, 29, 128, 27), (0, 128, 63, 300), 32, 4, 512, 64),
    Case(1024, (1, 300, 0, 140, 33), (900, 0, 3, 211, 64), 8, 2, 128, 16),
    Case(1024, (600,), (48,), 6, 2, 64, 16),
    Case(400, (130, 29, 128, 27), (0, 128, 63, 300), 2, 1, 256, 64),
    Case(2048, tuple(range(0, 32, 2)), tuple(range(160, 0, -10)), 32, 8, 128, 16),
    Case(1024, (600, 300), (48, 1000), 32, 32, 96, 16),
]
FORMS = Forms(prefill_attention)


def make_case(case, dtype, seed=0, pages=None):
    """Arguments with NaN in all inputs that must not be read: unused pages and padding queries."""
    rng = np.random.default_rng(seed)
    counts, starts = np.array(case.counts), np.array(case.starts)
    used = np.where(counts > 0, -(-(starts + counts) // case.page_size), 0)
    pages = pages or max(used.max(), 1) + 1
    num_pages = len(counts) * pages + 1
    free = rng.permutation(np.arange(1, num_pages))
    # the table of an empty segment also lists pages, which no segment uses
    held = np.where(counts > 0, used, 1)
    table = np.zeros((len(counts), pages), np.int32)
    pool = np.full((2, num_pages, case.page_size, 2, case.kv_heads, case.dim), np.nan, np.float32)
    pool[:, 0] = rng.standard_normal(pool[:, 0].shape)
    for g, n in enumerate(held):
        table[g, :n], free = free[:n], free[n:]
        if counts[g]:
            pool[:, table[g, :n]] = rng.standard_normal(pool[:, table[g, :n]].shape)
    q = rng.standard_normal((case.tokens, case.heads, case.dim))
    q[counts.sum() :] = np.nan
    ints = [jnp.asarray(x, jnp.int32) for x in (table, starts, counts)]
    pool = pool.reshape(2, num_pages * case.page_size, *pool.shape[3:])
    return jnp.asarray(q, dtype), jnp.asarray(pool, dtype), *ints


def brute_force(
    q,
    pool,
    table,
    starts,
    counts,
    page_size,
    layer=1,
    window=10**9,
    softcap=1e9,
    sinks=None,
    sink_tokens=0,
):
    """Each segment in float64 over an explicit list of slots."""
    q, pool, table, starts, counts = (np.asarray(x) for x in (q, pool, table, starts, counts))
    q, pool = q.astype(np.float64), pool[layer].astype(np.float64)
    out = np.zeros_like(q)
    group = q.shape[1] // pool.shape[2]
    for g, end in enumerate(np.cumsum(counts)):
        own = slice(end - counts[g], end)
        keys = np.arange(starts[g] + counts[g])
        kv = pool[table[g, keys // page_size] * page_size + keys % page_size]
        gap = (starts[g] + np.arange(counts[g]))[:, None] - keys
        visible = (gap >= 0) & ((gap < window) | (keys < sink_tokens))
        for n in range(q.shape[1] if counts[g] else 0):
            scores = q[own, n] @ kv[:, 0, n // group].T / np.sqrt(q.shape[2])
            scores = softcap * np.tanh(scores / softcap)
            weights = np.where(visible, np.exp(scores), 0.0)
            total = weights.sum(axis=1, keepdims=True)
            total += 0.0 if sinks is None else np.exp(np.float64(sinks[n]))
            out[own, n] = weights @ kv[:, 1, n // group] / total
    return out


def check(function, case, dtype, **options):
    call = jitted(function, case, **options)
    compare(call, case, dtype, make_case(case, dtype), **options)


def jitted(function, case, **options):
    return jax.jit(
        lambda q, pool, table, starts, counts: function(
            q, PagedInputs(pool, 1, table, case.page_size, **options), starts, counts
        )
    )


def compare(call, case, dtype, arguments, stored=None, **options):
    """``stored`` replaces the pool in the call."""
    expected = brute_force(*arguments, case.page_size, **options)
    q, pool, table, starts, counts = arguments
    for g, start in enumerate(case.starts):  # keys before all windows may be another request's
        end = max(0, start - options.get("window", 10**9) + 1) * (case.counts[g] > 0)
        before = np.arange(options.get("sink_tokens", 0), end)
        slots = np.asarray(table)[g, before // case.page_size] * case.page_size
        pool = pool.at[:, slots + before % case.page_size].set(jnp.nan)
    out = call(q, pool if stored is None else stored, table, starts, counts)
    assert out.dtype == arguments[0].dtype
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    assert (out[sum(case.counts) :] == 0).all()
    assert np.abs(out - expected).max() <= BOUNDS[dtype] * np.abs(expected).max()


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (CASES[0], "float32"),
        (CASES[1], "float32"),
        (CASES[2], "bfloat16"),
        (CASES[3], "bfloat16"),
        (CASES[4], "float32"),
        (CASES[5], "float32"),
        (CASES[6], "float32"),
        (WIDEST, "float32"),
    ],
    ids=str,
)
@FORMS.on_cpu
def test_equals_brute_force(function, case, dtype):
    check(function, case, dtype)


@pytest.mark.parametrize(
    ("case", "options"),
    [(CASES[2], {}), (CASES[-1], {"softcap": 1.5}), (CASES[4], {"sinks": True})],
    ids=str,
)
@FORMS.with_kernel
def test_pools_of_8_bit_floats(function, case, options):
    options = with_sinks(case, options, "bfloat16")
    q, pool, *rest = make_case(case, "bfloat16")
    stored = to_pool(pool, WORD)
    arguments = (q, from_pool(stored, jnp.float32), *rest)
    call = jitted(function, case, **options)
    compare(call, case, "bfloat16", arguments, stored, **options)


# a window of one key, within a tile, over several blocks of keys, and over all
OPTIONS = [
    (CASES[0], {"window": 1}),
    (CASES[2], {"window": 20, "sinks": True}),
    (CASES[3], {"window": 50, "softcap": 1.5}),
    (CASES[3], {"softcap": 0.7, "sinks": True}),
    (CASES[4], {"window": 400}),
    (CASES[6], {"window": 9, "softcap": 2.0, "sinks": True}),
    (CASES[0], {"window": 1, "sink_tokens": 4}),
    (CASES[2], {"window": 20, "sink_tokens": 40, "sinks": True}),
    (CASES[3], {"window": 50, "sink_tokens": 4}),
    (CASES[6], {"window": 9, "sink_tokens": 30, "softcap": 2.0}),
]


def with_sinks(case, options, dtype):
    if "sinks" not in options:
        return options
    # one is far above all scores, and one far below
    sinks = np.linspace(-60, 60, case.heads).astype(np.float32)
    return options | {"sinks": jnp.asarray(sinks, dtype)}


@pytest.mark.parametrize(("case", "options"), OPTIONS, ids=str)
@FORMS.on_cpu
def test_options(function, case, options):
    check(function, case, "float32", **with_sinks(case, options, "float32"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("case", "options"), [*OPTIONS, (GPU_CASES[-2], {"window": 100, "softcap": 3.0})], ids=str
)
def test_options_on_gpu(case, options, dtype):
    check(FORMS.pallas, case, dtype, **with_sinks(case, options, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_kernel_on_gpu(case, dtype):
    check(FORMS.pallas, case, dtype)


def random_cases(number):
    rng = np.random.default_rng(7)
    for _ in range(number):
        ends = np.sort(rng.integers(0, 61, size=5))
        counts = np.diff(ends, prepend=0)
        counts[rng.random(5) < 0.3] = 0
        starts = rng.integers(0, 80, size=5) * rng.integers(0, 2, size=5)
        yield Case(60, tuple(map(int, counts)), tuple(map(int, starts)), 3, 1, 16, 4)


@FORMS.on_cpu
def test_random_counts(function):
    tiles = PrefillTiles(block_rows=32, block_keys=16, num_warps=4, num_stages=2)
    if function is FORMS.interpret:
        function = partial(function, tiles=tiles)
    call = None
    for seed, case in enumerate(random_cases(12)):
        call = call or jitted(function, case)
        compare(call, case, "float32", make_case(case, "float32", seed, pages=36))


@pytest.mark.parametrize(("block_rows", "block_keys"), [(16, 32), (64, 16)])
def test_tiles_do_not_change_the_result(block_rows, block_keys):
    tiles = PrefillTiles(block_rows, block_keys, num_warps=4, num_stages=2)
    check(partial(FORMS.interpret, tiles=tiles), CASES[3], "float32")


def check_no_slot_after_the_end(function, case):
    """Keys past the end repeat the last one: NaN there and in page 0 has no effect."""
    q, pool, table, starts, counts = make_case(case, "float32")
    for g, end in enumerate(np.add(case.starts, case.counts)):
        after = np.arange(end, -(-end // case.page_size) * case.page_size)
        slots = np.asarray(table)[g, after // case.page_size] * case.page_size
        pool = pool.at[:, slots + after % case.page_size].set(jnp.nan)
    pool = pool.at[:, : case.page_size].set(jnp.nan)
    compare(jitted(function, case), case, "float32", (q, pool, table, starts, counts))


def test_kernel_reads_no_slot_after_the_end():
    check_no_slot_after_the_end(FORMS.interpret, CASES[0])


@pytest.mark.parametrize(
    "implementation", ["invariant-interpret", pytest.param("invariant", marks=pytest.mark.gpu)]
)
# the last case has a head dim that these kernels do not take
@pytest.mark.parametrize("case", CASES[:-1], ids=str)
def test_deterministic_kernels_equal_brute_force(implementation, case):
    function = partial(prefill_attention, implementation=implementation)
    check_no_slot_after_the_end(function, case)


def test_unsupported_inputs_are_refused():
    q, pool, table, *ints = make_case(CASES[0], "float32")
    inputs = PagedInputs(pool, 0, table, 4)
    with pytest.raises(NotImplementedError, match=r"got 12\)"):
        FORMS.pallas(q[..., :12], replace(inputs, pool=pool[..., :12]), *ints)
    with pytest.raises(NotImplementedError, match=r"most 64 query heads .* \(got 80\)"):
        FORMS.pallas(jnp.tile(q, (1, 20, 1)), inputs, *ints)
    with pytest.raises(ValueError, match="must be"):
        FORMS.reference(q, replace(inputs, pool=pool[..., :8]), *ints)
    with pytest.raises(ValueError, match="must have 3 dimensions"):
        FORMS.reference(q[None], inputs, *ints)
    with pytest.raises(ValueError, match=r"starts \(5,\)"):
        FORMS.reference(q, inputs, ints[0][:5], ints[1])
    with pytest.raises(ValueError, match="window=0"):
        FORMS.reference(q, replace(inputs, window=0), *ints)
    with pytest.raises(ValueError, match="block_rows=48"):
        PrefillTiles(block_rows=48, block_keys=16, num_warps=4, num_stages=2)


def test_choice_of_tiles():
    choose = partial(PrefillTiles.choose, group=4)
    assert choose(tokens=8192, head_dim=128, dtype=jnp.bfloat16) == PrefillTiles(128, 64, 4, 3)
    assert choose(tokens=256, head_dim=64, dtype=jnp.bfloat16) == PrefillTiles(64, 128, 4, 3)
    assert choose(tokens=8192, head_dim=512, dtype=jnp.bfloat16) == PrefillTiles(64, 32, 8, 2)
    assert choose(tokens=8192, head_dim=128, dtype=jnp.float32) == PrefillTiles(64, 32, 4, 2)

"""Tree attention: every implementation, compared with dense numpy in float64."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels import tree_attention as module
from specjax.kernels.backend import WORD
from specjax.kernels.kv_format import from_pool, to_pool
from specjax.kernels.paged import PagedInputs
from specjax.kernels.prefill_attention import PrefillTiles, prefill_attention
from specjax.kernels.rope_store import rope_store
from specjax.kernels.tree_attention import AttentionTiles, tree_attention

from ..support.lowering import TRITON_CALL, lower_for_cuda
from .attention import BOUNDS, Forms, brute_force, make_case, relative_error

# batch, tokens, query heads, KV heads, head dim, page size, pages per request
CASES = [
    (2, 1, 4, 2, 16, 1, 40),
    (3, 5, 4, 2, 32, 4, 20),
    (2, 8, 9, 3, 64, 16, 20),
    (2, 40, 4, 1, 16, 64, 2),
    (1, 64, 8, 2, 16, 16, 6),
    # a head dim that is the sum of two powers of two
    (2, 8, 4, 2, 96, 16, 20),
    # the widest head
    (2, 3, 4, 2, 512, 16, 3),
]
GPU_CASES = [
    *CASES,
    (2, 1, 4, 2, 64, 1, 400),
    (4, 64, 8, 2, 64, 64, 20),
    (32, 4, 32, 8, 128, 16, 70),
    (8, 8, 32, 8, 128, 16, 300),
    (8, 8, 32, 32, 96, 16, 70),
    (4, 8, 16, 8, 256, 16, 70),
    (4, 4, 24, 8, 80, 16, 70),
    (8, 8, 32, 4, 512, 16, 70),
]
FORMS = Forms(tree_attention)


def check(function, case, dtype, tree, level=None, window=None, in_words=False, lens=None):
    """With ``level``, only the last ``level`` rows are queries; they attend over all new keys."""
    q, pool, table, drawn, mask, page_size = make_case(case, dtype, tree)
    lens = drawn if lens is None else jnp.asarray(lens, jnp.int32)
    stored = pool
    if in_words:
        stored = to_pool(pool, WORD)
        pool = from_pool(stored, jnp.float32)
    if level is not None:
        q, mask = q[:, -level:], mask[:, -level:]
    expected = brute_force(q, pool, table, lens, mask, page_size, window=window)
    inputs = PagedInputs(stored, 1, table, page_size, window)
    out = jax.jit(function)(q, inputs, lens, mask if tree else None)
    assert out.dtype == q.dtype
    assert relative_error(out, expected) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("case", "dtype", "tree"),
    [
        (CASES[0], "float32", False),
        (CASES[1], "float32", True),
        (CASES[2], "bfloat16", True),
        (CASES[3], "bfloat16", False),
        (CASES[4], "float32", True),
        (CASES[5], "float32", True),
        (CASES[6], "float32", True),
    ],
    ids=str,
)
@FORMS.on_cpu
def test_equals_brute_force(function, case, dtype, tree):
    check(function, case, dtype, tree)


@pytest.mark.parametrize(
    ("case", "dtype", "tree", "window"),
    [
        (CASES[2], "bfloat16", False, None),
        (CASES[2], "bfloat16", True, 30),
        (CASES[5], "float32", True, None),
    ],
    ids=str,
)
@FORMS.with_kernel
def test_pools_of_8_bit_floats(function, case, dtype, tree, window):
    check(function, case, dtype, tree, window=window, in_words=True)


@pytest.mark.parametrize(
    ("window", "in_words", "lens"),
    [
        (None, False, (0, 13)),
        (None, True, (16, 30)),
        (None, False, (64, 79)),
        (None, True, (301, 18)),
        (10, True, (33, 100)),
    ],
)
@pytest.mark.parametrize(
    "function",
    [FORMS.interpret, pytest.param(FORMS.pallas, marks=pytest.mark.gpu)],
    ids=["interpret", "gpu"],
)
def test_keys_before_the_new_ones_need_no_mask(function, window, in_words, lens):
    """With one split and no window, the kernel has two loops over the keys."""
    tiled = partial(function, tiles=AttentionTiles(16, 16, 1, num_warps=4, num_stages=3))
    check(tiled, CASES[2], "float32", True, window=window, in_words=in_words, lens=lens)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_kernel_with_8_bit_floats_on_gpu(case):
    if case[4] % 32:
        with pytest.raises(NotImplementedError, match="KV in words: 32"):
            check(FORMS.pallas, case, "bfloat16", True, in_words=True)
        return
    check(FORMS.pallas, case, "bfloat16", True, in_words=True)


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [False, True], ids=["causal", "tree"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_kernel_on_gpu(case, dtype, tree):
    check(FORMS.pallas, case, dtype, tree)


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_splits_do_not_change_the_result(num_splits):
    tiles = AttentionTiles(
        block_rows=16, block_keys=16, num_splits=num_splits, num_warps=4, num_stages=2
    )
    check(partial(FORMS.interpret, tiles=tiles), CASES[1], "float32", True)


# rows of a level after those of the levels above, in two and in four words of the mask
LEVELS = [((3, 12, 4, 2, 32, 4, 20), 4), ((2, 80, 4, 1, 16, 16, 9), 16)]


@pytest.mark.parametrize(("case", "level"), LEVELS, ids=str)
@FORMS.with_kernel_dtypes
def test_a_level_sees_its_ancestors(function, case, level, dtype):
    check(function, case, dtype, True, level)


@FORMS.on_cpu
@pytest.mark.parametrize(("window", "sink_tokens"), [(None, 0), (3, 0), (12, 0), (3, 2)])
def test_rows_of_a_block_see_each_other(function, window, sink_tokens):
    q, pool, table, lens, mask, page_size = make_case(CASES[1], "float32", False)
    mask = jnp.ones_like(mask)
    options = {"window": window, "sink_tokens": sink_tokens}
    expected = brute_force(q, pool, table, lens, mask, page_size, **options)
    out = function(q, PagedInputs(pool, 1, table, page_size, **options), lens, mask)
    assert relative_error(out, expected) < BOUNDS["float32"]


# a window within the new rows, one of one key, one over a part of the context, and one over all
WINDOWS = [
    ((2, 8, 4, 2, 16, 4, 30), None, 4),
    ((3, 5, 4, 2, 32, 4, 20), None, 1),
    ((2, 3, 4, 2, 16, 16, 40), None, 70),
    ((2, 40, 4, 1, 16, 64, 2), None, 30),
    ((2, 6, 9, 3, 64, 16, 20), None, 400),
    ((3, 12, 4, 2, 32, 4, 60), 4, 20),
]


@pytest.mark.parametrize(("case", "level", "window"), WINDOWS, ids=str)
@FORMS.with_kernel_dtypes
def test_a_window_hides_earlier_keys(function, case, level, window, dtype):
    check(function, case, dtype, level is not None, level, window)


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("window", [1, 17, 40])
@pytest.mark.parametrize("sink_tokens", [0, 5, 50])
def test_keys_before_all_windows_are_not_read(num_splits, window, sink_tokens):
    """They are NaN, which a mask would not hide."""
    case = (1, 5, 4, 2, 16, 4, 40)
    q, pool, table, lens, mask, page_size = make_case(case, "float32", True)
    lens = jnp.full_like(lens, 150)
    options = {"window": window, "sink_tokens": sink_tokens}
    expected = brute_force(q, pool, table, lens, mask, page_size, **options)
    unread = np.arange(sink_tokens, 150 - window + 1)
    slots = np.asarray(table)[0, unread // page_size] * page_size + unread % page_size
    tiles = AttentionTiles(16, 16, num_splits, num_warps=4, num_stages=2)
    pool = pool.at[:, slots].set(jnp.nan)
    for form in (partial(FORMS.interpret, tiles=tiles), FORMS.reference, FORMS.chunked):
        out = form(q, PagedInputs(pool, 1, table, page_size, **options), lens, mask)
        assert relative_error(out, expected) < BOUNDS["float32"]


def test_blocks_between_first_tokens_and_window_are_skipped(monkeypatch):
    q, pool, table, lens, _, page_size = make_case((1, 1, 4, 2, 16, 16, 260), "float32", False)
    gather, blocks = module._gather, []

    def counted(inputs, keys, dtype):
        jax.debug.callback(blocks.append, keys[0])
        return gather(inputs, keys, dtype)

    monkeypatch.setattr(module, "_gather", counted)
    inputs = PagedInputs(pool, 1, table, page_size, 200, sink_tokens=4)
    jax.block_until_ready(FORMS.chunked(q, inputs, jnp.full_like(lens, 4096), None))
    jax.effects_barrier()
    assert sorted(map(int, blocks)) == [0, 15 * module.CHUNK, 16 * module.CHUNK]


# case, tree or not, rows of a level, options
OPTIONS = [
    ((3, 6, 4, 2, 32, 4, 20), True, None, {"window": 9}),
    ((2, 16, 4, 1, 16, 16, 9), True, None, {"window": 3}),
    ((3, 12, 4, 2, 32, 4, 60), True, 4, {"window": 2}),
    ((3, 12, 4, 2, 32, 4, 60), True, 4, {"window": 40}),
    ((2, 1, 4, 2, 16, 4, 40), False, None, {"window": 5, "softcap": 2.0, "sinks": True}),
    ((3, 5, 4, 2, 32, 4, 60), False, None, {"softcap": 0.7}),
    ((3, 5, 6, 2, 96, 4, 60), True, None, {"window": 30, "softcap": 1.5, "sinks": True}),
    ((2, 40, 4, 1, 16, 64, 4), True, None, {"window": 80, "sinks": True}),
    # the first tokens are before the new ones, among them, and overlap the window
    ((2, 1, 4, 2, 16, 4, 60), False, None, {"window": 5, "sink_tokens": 4}),
    ((3, 5, 4, 2, 32, 4, 60), False, None, {"window": 3, "sink_tokens": 2}),
    ((3, 12, 4, 2, 32, 4, 60), True, None, {"window": 2, "sink_tokens": 3}),
    ((3, 12, 4, 2, 32, 4, 60), True, 4, {"window": 2, "sink_tokens": 1}),
    ((3, 12, 4, 2, 32, 4, 60), True, 4, {"window": 40, "sink_tokens": 70, "sinks": True}),
    ((2, 8, 9, 3, 64, 16, 40), True, None, {"window": 300, "sink_tokens": 290}),
]


def check_options(function, case, dtype, tree, level, options):
    q, pool, table, lens, mask, page_size = make_case(case, dtype, tree)
    positions = lens[:, None] + mask.sum(axis=2, dtype=jnp.int32) - 1
    if level is not None:
        q, mask, positions = q[:, -level:], mask[:, -level:], positions[:, -level:]
    options = dict(options)
    if options.pop("sinks", False):
        # one is far above all scores, and one far below
        sinks = np.linspace(-60, 60, case[2]).astype(np.float32)
        options["sinks"] = sinks = jnp.asarray(sinks, dtype)
    expected = brute_force(q, pool, table, lens, mask, page_size, tree=True, **options)
    mask, positions = (mask, positions) if tree else (None, None)
    inputs = PagedInputs(pool, 1, table, page_size, **options)
    out = jax.jit(function)(q, inputs, lens, mask, positions=positions)
    assert out.dtype == q.dtype
    assert relative_error(out, expected) < BOUNDS[dtype]


@pytest.mark.parametrize(("case", "tree", "level", "options"), OPTIONS, ids=str)
@FORMS.with_kernel_dtypes
def test_options(function, case, tree, level, options, dtype):
    check_options(function, case, dtype, tree, level, options)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_splits_share_one_sink(num_splits):
    tiles = AttentionTiles(16, 16, num_splits, num_warps=4, num_stages=2)
    function = partial(FORMS.interpret, tiles=tiles)
    check_options(function, *OPTIONS[6][:1], "float32", *OPTIONS[6][1:])


def test_causal_rows_beyond_a_mask_word():
    check(FORMS.interpret, (1, 100, 4, 2, 16, 16, 9), "float32", False)


def test_unsupported_inputs_are_refused():
    q, pool, table, lens, _mask, page_size = make_case(CASES[0], "float32", False)
    inputs = PagedInputs(pool, 0, table, page_size)
    with pytest.raises(NotImplementedError, match="multiples of 16"):
        FORMS.pallas(q[..., :12], replace(inputs, pool=pool[..., :12]), lens, None)
    mask = jnp.ones((2, 1, 129), bool)
    with pytest.raises(NotImplementedError, match=r"new keys .* \(got 129\)"):
        FORMS.pallas(q, inputs, lens, mask)
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        tree_attention(q, replace(inputs, window=0), lens, None)
    with pytest.raises(ValueError, match="sink_tokens=4 must be 0, or above with a window"):
        tree_attention(q, replace(inputs, sink_tokens=4), lens, None)
    with pytest.raises(ValueError, match="must be a multiple of"):
        tree_attention(q[:, :, :3], inputs, lens, None, implementation="xla")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 32])
def test_tiles_of_the_widest_heads_fit_shared_memory(batch, dtype):
    """Queries, and keys and values of all stages, in 232,448 bytes; kernels lower for a GPU."""
    sizes = {"batch": batch, "kv_heads": 4, "rows": 64, "context": 4096}
    tiles = AttentionTiles.choose(**sizes, dtype=jnp.dtype(dtype), head_dim=512)
    prompt = PrefillTiles.choose(tokens=4096, group=8, head_dim=512, dtype=jnp.dtype(dtype))
    for each in (tiles, prompt):
        rows = each.block_rows + 2 * each.num_stages * each.block_keys
        assert 512 * rows * jnp.dtype(dtype).itemsize < 232448 - 2**14
    shape = jax.ShapeDtypeStruct
    ints = partial(shape, dtype=jnp.int32)
    pool, table = shape((2, 4096, 2, 4, 512), dtype), ints((batch, 64))
    q, lens, how = shape((batch, 8, 32, 512), dtype), ints((batch,)), {"implementation": "pallas"}
    inputs = PagedInputs(pool, ints(()), table, page_size=16)
    small = shape((batch, 8, 4, 512), dtype), shape((batch, 8, 1, 256), jnp.float32)
    scales = (shape((512,), dtype), shape((512,), dtype))
    for function, *arguments in (
        (partial(tree_attention, tree_mask=None, **how), q, inputs, lens),
        (
            partial(prefill_attention, **how),
            *(shape((64, 32, 512), dtype), inputs, lens, lens),
        ),
        (
            lambda q, k, angles, pool, slots, *norms: rope_store(
                q, k, k, angles, angles, pool, 1, slots, norms=(*norms, 1e-6), **how
            ),
            *(q, *small, pool, ints((batch, 8)), *scales),
        ),
    ):
        assert TRITON_CALL in lower_for_cuda(function, *arguments)

"""Deterministic attention: values against dense numpy, and on a GPU the bits of its rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.backend import WORD
from specjax.kernels.invariant_attention import block_size
from specjax.kernels.kv_format import from_pool, to_pool
from specjax.kernels.paged import PagedInputs
from specjax.kernels.prefill_attention import prefill_attention
from specjax.kernels.tree_attention import tree_attention

from ..support.lowering import lower_for_cuda
from .attention import BOUNDS, brute_force, make_case, relative_error

# batch, tokens, query heads, KV heads, head dim, page size, pages per request
CASES = [
    (2, 1, 4, 2, 16, 16, 20),
    (3, 5, 6, 2, 32, 64, 5),
    (2, 8, 9, 3, 64, 16, 20),
    (33, 2, 8, 4, 16, 16, 10),
    (2, 3, 4, 2, 256, 16, 10),
]
RUNS = ["invariant-interpret", pytest.param("invariant", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("implementation", RUNS)
@pytest.mark.parametrize(
    ("case", "dtype", "tree"),
    [
        (CASES[0], "float32", False),
        (CASES[1], "float32", True),
        (CASES[2], "bfloat16", True),
        (CASES[3], "bfloat16", False),
        (CASES[4], "bfloat16", True),
    ],
    ids=str,
)
def test_tree_attention_equals_brute_force(implementation, case, dtype, tree):
    """Slots that no request uses are NaN, which a mask would not hide."""
    q, pool, table, lens, mask, page_size = make_case(case, dtype, tree)
    unread = np.ones(pool.shape[1], bool)
    for pages, length in zip(np.asarray(table), lens.tolist(), strict=True):
        unread[slots_of(pages, np.arange(length + case[1]), page_size)] = False
    expected = brute_force(q, pool, table, lens, mask, page_size)
    pool = pool.at[:, unread].set(jnp.nan)
    call = jax.jit(partial(tree_attention, implementation=implementation))
    out = call(q, PagedInputs(pool, 1, table, page_size), lens, mask if tree else None)
    assert out.dtype == q.dtype
    assert relative_error(out, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("implementation", RUNS)
def test_pools_of_8_bit_floats(implementation):
    q, pool, table, lens, mask, page_size = make_case(CASES[2], "bfloat16", True)
    stored = to_pool(pool, WORD)
    call = jax.jit(partial(tree_attention, implementation=implementation))
    out = call(q, PagedInputs(stored, 1, table, page_size), lens, mask)
    expected = brute_force(q, from_pool(stored, jnp.float32), table, lens, mask, page_size)
    assert relative_error(out, expected) < BOUNDS["bfloat16"]


HEADS = [(32, 8, 128), (9, 3, 64), (16, 4, 256)]


def sequence(heads, length, page_size, seed=0):
    """Queries, keys and values of one text, and its shuffled pages in a pool of two texts."""
    (num_heads, kv_heads, dim), rng = heads, np.random.default_rng(seed)
    q = jnp.asarray(rng.standard_normal((length, num_heads, dim)), jnp.bfloat16)
    kv = jnp.asarray(rng.standard_normal((length, 2, kv_heads, dim)), jnp.bfloat16)
    table = rng.permutation(np.arange(1, 2 * length // page_size + 1)).reshape(2, -1)
    pool = jnp.zeros((1, (2 * length // page_size + 1) * page_size, 2, kv_heads, dim), kv.dtype)
    return q, kv, pool, jnp.asarray(table, jnp.int32)


def slots_of(table, positions, page_size):
    return table[positions // page_size] * page_size + positions % page_size


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_bits_do_not_depend_on_batch_prompt_or_tree(heads):
    length, page_size, rng = 8192, 16, np.random.default_rng(1)
    block = block_size(heads[2])
    q, kv, pool, table = sequence(heads, length, page_size)
    every = jnp.arange(length)
    pool = pool.at[0, slots_of(table[0], every, page_size)].set(kv)
    prefill = jax.jit(partial(prefill_attention, implementation="invariant"))
    decode = jax.jit(partial(tree_attention, implementation="invariant"))
    ints = partial(jnp.asarray, dtype=jnp.int32)
    text = PagedInputs(pool, 0, table[:1], page_size)
    expected = np.asarray(prefill(q, text, ints([0]), ints([length])))
    # in pieces
    for start, count, width in (
        (0, 100, 128),
        (1000, 33, 64),
        (4000, 512, 512),
        (5001, 1500, 2048),
    ):
        rows = jnp.zeros((width, *q.shape[1:]), q.dtype).at[:count].set(q[start : start + count])
        out = prefill(rows, text, ints([start]), ints([count]))
        assert (np.asarray(out[:count]) == expected[start : start + count]).all(), (start, count)
    # plain decoding and chains, in batches of 1 to 64, at every residue of a block
    for batch, tokens in (
        (1, 1),
        (1, 8),
        (4, 3),
        (8, 1),
        (8, 8),
        (16, 4),
        (32, 8),
        (64, 1),
        (64, 4),
    ):
        for residue in range(0, block, 1 if batch == 64 else 31):
            lens = rng.integers(0, length // block - 1, batch) * block + residue
            lens[0] = residue
            places = lens[:, None] + np.arange(tokens)
            texts = PagedInputs(pool, 0, jnp.repeat(table[:1], batch, 0), page_size)
            out = decode(q[places], texts, ints(lens), None)
            assert (np.asarray(out) == expected[places]).all(), (batch, tokens, residue)
    # a tree in which one path is the text, at every residue
    for batch, rows in ((1, 16), (8, 16), (32, 16), (2, 64)):
        for residue in range(0, block, 1 if batch == 1 else 17):
            lens = rng.integers(0, length // block - 2, batch) * block + residue
            mask, path = np.zeros((rows, rows), bool), [0]
            mask[0, 0] = True
            for node in range(1, rows):
                is_next = rng.random() < 0.3
                parent = path[-1] if is_next else rng.integers(0, node)
                mask[node] = mask[parent]
                mask[node, node] = True
                if is_next:
                    path.append(node)
            one = int(lens[0])
            nodes = np.array(path)
            kept = pool.at[0, slots_of(table[1], every, page_size)].set(kv)
            where = slots_of(table[1], one + np.arange(rows), page_size)
            noise = jnp.asarray(rng.standard_normal((rows, *kv.shape[1:])), kv.dtype)
            kept = kept.at[0, where].set(noise.at[nodes].set(kv[one : one + len(path)]))
            queries = jnp.asarray(rng.standard_normal((batch, rows, *q.shape[1:])), q.dtype)
            queries = queries.at[0, nodes].set(q[one : one + len(path)])
            tables = jnp.concatenate([table[1:], jnp.repeat(table[:1], batch - 1, 0)])
            masks = jnp.asarray(np.broadcast_to(mask, (batch, rows, rows)))
            out = decode(queries, PagedInputs(kept, 0, tables, page_size), ints(lens), masks)
            wanted = expected[one : one + len(path)]
            assert (np.asarray(out)[0, nodes] == wanted).all(), (batch, rows, residue)


@pytest.mark.parametrize("name", ["window", "softcap", "sinks"])
def test_options_of_a_layer_are_refused(name):
    pool, ints = jnp.zeros((1, 32, 2, 1, 16)), jnp.zeros(1, jnp.int32)
    inputs = PagedInputs(pool, 0, jnp.zeros((1, 2), jnp.int32), 16, **{name: 1})
    how = {"implementation": "invariant"}
    with pytest.raises(NotImplementedError, match=name):
        tree_attention(jnp.zeros((1, 1, 1, 16)), inputs, ints, None, **how)
    with pytest.raises(NotImplementedError, match=name):
        prefill_attention(jnp.zeros((1, 1, 16)), inputs, ints, ints, **how)


@pytest.mark.slow
def test_kernels_lower_for_cuda():
    tree = partial(tree_attention, implementation="invariant")
    prefill = partial(prefill_attention, implementation="invariant")
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    for heads, kv_heads, dim in HEADS:
        pool = jax.ShapeDtypeStruct((2, 640, 2, kv_heads, dim), jnp.bfloat16)
        for batch, rows in ((1, 1), (2, 16), (64, 8)):
            q = jax.ShapeDtypeStruct((batch, rows, heads, dim), pool.dtype)
            mask = jax.ShapeDtypeStruct((batch, rows, rows), jnp.bool_) if rows == 16 else None
            inputs = PagedInputs(pool, ints(()), ints((batch, 20)), 16)
            text = lower_for_cuda(tree, q, inputs, ints((batch,)), mask)
            names = ("shared", "own") if batch < 64 else ("prefill",)
            assert all(f"specjax_invariant_{name}" in text for name in names)
        q = jax.ShapeDtypeStruct((96, heads, dim), pool.dtype)
        inputs = PagedInputs(pool, ints(()), ints((2, 20)), 16)
        text = lower_for_cuda(prefill, q, inputs, ints((2,)), ints((2,)))
        assert "specjax_invariant_prefill" in text

"""A head's pass for one row per request: its output equals the full pass; all rows store KV."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kv.pages import PageView
from specjax.models.eagle import build_head
from specjax.models.flat import FlatModel
from specjax.testing import EAGLE3

from ..support.runners import EAGLE, head_weights

BATCH, WIDTH, PAGE_SIZE, PAGES = 4, 5, 4, 4
HEADS = {
    "eagle3": EAGLE3,
    "eagle3 normed": replace(EAGLE3, norm_output=True, norm_before_residual=True),
    "eagle": EAGLE,
    "eagle of three layers": replace(EAGLE, num_layers=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_one_row_a_request_is_that_row_of_the_full_pass(config, dtype):
    """The first, the last and a middle row, and a padding request without pages."""
    config = replace(config, dtype=dtype)
    head = FlatModel.of(partial(build_head, config)).rebuild(head_weights(config))
    rng = np.random.default_rng(0)
    table = np.arange(1, BATCH * PAGES + 1).reshape(BATCH, PAGES)
    table[3] = 0
    lens = jnp.array([0, 3, 9, 0], jnp.int32)
    row = jnp.array([0, WIDTH - 1, WIDTH // 2, 0], jnp.int32)
    view = PageView((jnp.asarray(table, jnp.int32),), PAGE_SIZE, "chunked")
    slots = (BATCH * PAGES + 1) * PAGE_SIZE
    pool_shape = (config.num_layers, slots, 2, config.num_kv_heads, config.head_dim)
    row_shape = (BATCH, WIDTH, config.hidden_size)
    pool, embeds, hidden = (
        jnp.asarray(rng.standard_normal(shape), config.dtypes.activations)
        for shape in (pool_shape, row_shape, row_shape)
    )
    positions = lens[:, None] + jnp.arange(WIDTH, dtype=jnp.int32)

    @jax.jit
    def run(kv, row):
        return head(embeds, hidden, positions, kv, view.attend(lens, WIDTH), row)

    everything, kv = run(pool, None)
    picked, kv_picked = run(pool, row)
    assert picked.shape == (BATCH, 1, config.hidden_size)
    assert picked.dtype == everything.dtype
    expected = np.asarray(everything, np.float32)[np.arange(BATCH), row]
    bound = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        np.asarray(picked[:, 0], np.float32), expected, rtol=bound, atol=bound
    )
    np.testing.assert_array_equal(np.asarray(kv_picked), np.asarray(kv))
    # the comparison is meaningful: rows differ, and every layer has stored KV
    assert np.abs(expected - np.asarray(everything[:, 0], np.float32)).max() > 0.1
    assert all((np.asarray(kv[i]) != np.asarray(pool[i])).any() for i in range(config.num_layers))


WINDOWED = {
    "eagle3": replace(EAGLE3, windows=(3,)),
    "p-eagle": replace(EAGLE3, windows=(0, 3), num_layers=2, mask_token_id=7),
    "eagle": replace(EAGLE, windows=(3,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("config", WINDOWED.values(), ids=WINDOWED)
def test_a_layer_with_a_window_does_not_read_the_keys_before_it(config):
    """In chunks and in branches of a tree: other keys before the window change nothing."""
    head = FlatModel.of(partial(build_head, config)).rebuild(head_weights(config))
    rng, lens = np.random.default_rng(0), jnp.array([9], jnp.int32)
    view = PageView((jnp.arange(1, PAGES + 1, dtype=jnp.int32)[None],), PAGE_SIZE, "xla")
    layer, count = len(config.windows) - 1, (PAGES + 1) * PAGE_SIZE
    shape = (config.num_layers, count, 2, config.num_kv_heads, config.head_dim)
    pool, rows = rng.normal(size=shape), (1, 2, config.hidden_size)
    embeds, hidden = (jnp.asarray(rng.normal(size=rows), jnp.float32) for _ in range(2))

    @jax.jit
    def run(kv):
        chunk = lens[:, None] + jnp.arange(2, dtype=jnp.int32)
        flat = jnp.full((1, 2), 9, jnp.int32)
        tree = view.attend(lens, 2, tree_mask=jnp.eye(2, dtype=bool)[None], positions=flat)
        pairs = (chunk, view.attend(lens, 2)), (flat, tree)
        return [head(embeds, hidden, places, kv, attend)[0] for places, attend in pairs]

    def changed(first, end):
        """The states if the last layer's keys and values at these positions are others."""
        other = pool.copy()
        other[layer, PAGE_SIZE + first : PAGE_SIZE + end] += 1.0
        return run(jnp.asarray(other, jnp.float32))

    states = run(jnp.asarray(pool, jnp.float32))
    for state, before, inside in zip(states, changed(0, 7), changed(7, 8), strict=True):
        np.testing.assert_array_equal(state, before)
        assert np.abs(state[:, 0] - inside[:, 0]).max() > 1e-3

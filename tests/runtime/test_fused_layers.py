"""Networks with interpreted Pallas kernels against the same networks with XLA's functions."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kv.pages import PageView
from specjax.models.block import BlockDraft
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Weights
from specjax.speculative.algorithm import kv_pool
from specjax.testing import TARGET, random_weights
from specjax.testing.dense import dense_attend

from ..support.model_files import BLOCK

WIDE = replace(TARGET, hidden_size=128, intermediate_size=256, num_layers=2, head_dim=32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "limit", "rows"),
    [("float32", 1e-6, 40), ("bfloat16", 2e-2, 1), ("bfloat16", 2e-2, 40), ("bfloat16", 2e-2, 70)],
)
def test_fused_layers_compute_the_same(dtype, limit, rows) -> None:
    """Row counts below and above the limit for products as partial sums."""
    config = replace(WIDE, dtype=dtype)
    build = {
        implementation: partial(CausalLM, config, implementation=implementation)
        for implementation in ("xla", "interpret")
    }
    flats = {implementation: FlatModel.of(one) for implementation, one in build.items()}
    weights = random_weights(flats["xla"], 3)
    tokens = np.random.default_rng(1).integers(config.vocab_size, size=(1, rows), dtype=np.int32)
    positions = jnp.arange(rows, dtype=jnp.int32)[None]

    def logits(implementation: str) -> tuple[str, np.ndarray]:
        """The jaxpr and its result."""

        @jax.jit
        def run(weights: Weights, tokens: jax.Array) -> jax.Array:
            model = flats[implementation].rebuild(weights)
            return model.logits(model(tokens, positions, None, dense_attend)[0])

        return str(run.trace(weights, tokens).jaxpr), np.asarray(run(weights, tokens), np.float32)

    (fused, ours), (plain, theirs) = logits("interpret"), logits("xla")
    assert "pallas_call" in fused
    assert "pallas_call" not in plain
    assert np.abs(ours - theirs).max() <= limit * np.abs(theirs).max()


def test_products_come_as_partial_sums_if_that_pays() -> None:
    config = replace(WIDE, dtype="bfloat16")
    build = partial(CausalLM, config, implementation="interpret")
    flat = FlatModel.of(build)
    weights = random_weights(flat, 3)

    def shapes(rows: int) -> str:
        tokens = jnp.zeros((1, rows), jnp.int32)
        positions = jnp.arange(rows, dtype=jnp.int32)[None]

        def run() -> jax.Array:
            return flat.rebuild(weights)(tokens, positions, None, dense_attend)[0]

        return str(jax.make_jaxpr(run)())

    # two halves of the inner axis of 128, with a float32 sum each
    assert "f32[2,1,40,128]" in shapes(40)
    for rows in (1, 70):
        assert f"f32[2,1,{rows},128]" not in shapes(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 4e-2)])
def test_a_block_drafter_computes_the_same(dtype: str, limit: float) -> None:
    """Over pages, with full and causal sliding layers, after contexts of different lengths."""
    config = replace(
        BLOCK,
        **{"hidden_size": 128, "target_hidden_size": 128, "intermediate_size": 256},
        **{"head_dim": 32, "feature_layers": (0, 1), "dtype": dtype},
        **{"windows": (0, 6), "causal": (False, True), "markov_head": None, "markov_rank": 0},
    )
    model = replace(WIDE, vocab_size=config.vocab_size, dtype=dtype)
    target = FlatModel.of(partial(CausalLM, model))
    rng, lens, size = np.random.default_rng(1), jnp.array([9, 13], jnp.int32), config.block
    features = jnp.asarray(rng.normal(size=(2, 13, 256)), model.dtypes.activations)
    tokens = jnp.asarray(rng.integers(config.vocab_size, size=(2, size)), jnp.int32)

    def run(implementation: str) -> tuple[jax.Array, jax.Array]:
        flat = FlatModel.of(partial(BlockDraft, config, implementation=implementation))
        draft, table = flat.rebuild(random_weights(flat, 3)), jnp.arange(1, 11).reshape(2, 5)
        pages, zero = PageView((table,), 4, implementation), jnp.zeros(2, jnp.int32)
        kv = jnp.zeros(kv_pool(config, 44).shape, config.dtypes.kv)
        places = jnp.broadcast_to(jnp.arange(13, dtype=jnp.int32), (2, 13))
        kv = draft.store(features, places, kv, pages.store(zero, 13))
        attends = pages.attend(lens, size, tree_mask=jnp.ones((2, size, size), bool))
        positions = lens[:, None] + jnp.arange(size, dtype=jnp.int32)
        causal = pages.attend(lens, size)
        vocabulary = target.rebuild(random_weights(target, 4))
        return draft(tokens, positions, kv, attends, causal, vocabulary)

    for ours, theirs in zip(run("interpret"), run("xla"), strict=True):
        difference = np.abs(np.asarray(ours, np.float32) - np.asarray(theirs, np.float32))
        assert difference.max() <= limit * np.abs(np.asarray(theirs, np.float32)).max()

"""Networks with interpreted Pallas kernels against the same networks with XLA's functions."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Weights
from specjax.models.layers import dense_attend
from specjax.testing import TARGET, random_weights

WIDE = replace(TARGET, hidden_size=128, intermediate_size=256, num_layers=2, head_dim=32)


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

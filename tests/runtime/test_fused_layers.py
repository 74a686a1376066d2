"""Networks of Pallas kernels, interpreted, against the same networks of XLA's own functions."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.engine.diagnostics import dense_attend
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel

from ..tiny import TARGET

WIDE = replace(TARGET, hidden_size=128, intermediate_size=256, num_layers=2, head_dim=32)


@pytest.mark.parametrize("rows", [1, 40, 70])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_fused_layers_compute_the_same(dtype, limit, rows) -> None:
    """Row counts on both sides of where products come as partial sums."""
    config = replace(WIDE, dtype=dtype)
    build = {kernels: partial(CausalLM, config, kernels=kernels) for kernels in ("xla", "pallas")}
    flats = {kernels: FlatModel.of(one) for kernels, one in build.items()}
    weights = flats["xla"].init(build["xla"], 3)
    tokens = jax.random.randint(jax.random.key(1), (1, rows), 0, config.vocab_size)
    positions = jnp.arange(rows, dtype=jnp.int32)[None]

    def logits(kernels: str) -> jax.Array:
        model = flats[kernels].rebuild(weights)
        return model.logits(model(tokens, positions, None, dense_attend)[0])

    assert "pallas_call" in str(jax.make_jaxpr(lambda: logits("pallas"))())
    assert "pallas_call" not in str(jax.make_jaxpr(lambda: logits("xla"))())
    ours, theirs = (np.asarray(logits(name), np.float32) for name in ("pallas", "xla"))
    assert np.abs(ours - theirs).max() <= limit * np.abs(theirs).max()


def test_products_come_as_partial_sums_where_that_pays() -> None:
    config = replace(WIDE, dtype="bfloat16")
    build = partial(CausalLM, config, kernels="pallas")
    flat = FlatModel.of(build)
    weights = flat.init(build, 3)

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

"""Structures of models without weights."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.testing import TARGET


class Quantised(nnx.Module):
    """A scale that is not that of a norm."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.zeros((64, 64), jnp.float32), stddev=0.125)
        self.norm = nnx.Param(jnp.ones((8,), jnp.bfloat16), mean=1.0)
        self.scale = nnx.Param(jnp.zeros((8,), jnp.float32))


def test_random_weights_follow_the_variables_not_their_names() -> None:
    flat = FlatModel.of(Quantised)
    named = dict(zip(flat.names, flat.random(0), strict=True))
    np.testing.assert_allclose(named["kernel"].std(), 0.125, rtol=0.05)
    assert (named["norm"] == 1).all()
    assert (named["scale"] == 0).all()
    assert [w.dtype for w in flat.random(0)] == [a.dtype for a in flat.abstract]


def test_every_matrix_of_a_target_has_a_spread_and_every_norm_a_mean() -> None:
    flat = FlatModel.of(partial(CausalLM, TARGET))
    for name, (mean, stddev), leaf in zip(flat.names, flat.initial, flat.abstract, strict=True):
        assert (stddev > 0) == (len(leaf.shape) == 2), name
        assert mean == (0.0 if len(leaf.shape) == 2 else 1.0), name

"""The declarations of a recurrent mixer, and the pools that follow from them."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.delta_inputs import DeltaGates

from specjax.config import Quantization
from specjax.models.declare import (
    Cache,
    pool_layers,
    pool_shapes,
    request_layers,
    request_shapes,
    token_kv,
)
from specjax.models.flat import FlatModel
from specjax.models.gated_delta import DeltaConfig, GatedDelta
from specjax.models.layers import LayerKind
from specjax.testing.models import SIZES, random_weights

HEADS: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
CONFIG = DeltaConfig(model_type="test", num_layers=1, **SIZES, **HEADS)


def network(config: DeltaConfig) -> GatedDelta:
    return GatedDelta(config, LayerKind.of(config, implementation="xla"), "layers.0.")


def test_it_declares_the_tensors_of_files() -> None:
    plain = ("layers.0.linear_attn.in_proj_a", "layers.0.linear_attn.in_proj_b")
    config = replace(CONFIG, quantization=Quantization("int8", plain=plain))
    recipes = FlatModel.of(partial(network, config)).recipes
    tensors = {
        name: [(part.name.removeprefix("layers.0.linear_attn."), part.shape) for part in x.parts]
        for name, x in recipes.items()
    }
    assert tensors == {
        "mixed_and_gate.kernel.values": [
            ("in_proj_qkv.weight", (96, 32)),
            ("in_proj_z.weight", (32, 32)),
        ],
        "mixed_and_gate.kernel.scale": [
            ("in_proj_qkv.weight_scale", (96, 1)),
            ("in_proj_z.weight_scale", (32, 1)),
        ],
        "products.kernel": [("in_proj_b.weight", (4, 32)), ("in_proj_a.weight", (4, 32))],
        "conv": [("conv1d.weight", (96, 1, 4))],
        "log_rates": [("A_log", (4,))],
        "biases": [("dt_bias", (4,))],
        "norm.scale": [("norm.weight", (8,))],
        "output.kernel.values": [("out_proj.weight", (32, 32))],
        "output.kernel.scale": [("out_proj.weight_scale", (32, 1))],
    }
    # these have exponents, so few bits would cost digits
    assert {recipes[name].dtype for name in ("log_rates", "biases")} == {"float32"}


def test_one_row_may_be_picked_after_the_recurrence() -> None:
    flat = FlatModel.of(partial(network, CONFIG))
    layer = flat.rebuild(random_weights(flat, 0))
    seen = []

    def recur(cache: Any, index: int, mixed: Any, gates: DeltaGates, weights: Any) -> Any:
        seen.append((cache, index, mixed.shape, gates.products.shape, weights.shape))
        return "after", mixed[..., :32].reshape(2, 3, 4, 8)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 32)), jnp.float32)
    whole, cache = layer(x, None, "before", 5, recur)
    picked, _ = layer(x, None, "before", 5, recur, jnp.array([2, 0]))
    assert cache == "after"
    assert seen == [("before", 5, (2, 3, 96), (6, 8), (96, 4))] * 2
    np.testing.assert_allclose(picked[:, 0], [whole[0, 2], whole[1, 0]], rtol=1e-5)


def test_layers_with_states_share_a_pool_of_requests() -> None:
    recurrent = network(CONFIG).cache
    keys = token_kv(np.dtype(np.float32), 2, 8)
    caches = [recurrent, Cache(keys), recurrent, Cache(keys, 4), recurrent]
    assert request_layers(caches) == [0, 2, 4]
    assert pool_layers(caches, 1) == ([1, 3],)
    assert pool_layers(caches, 2) == ([1], [3])
    assert [x.shape for x in pool_shapes(caches, (48, 32))] == [(1, 48, 2, 2, 8), (1, 32, 2, 2, 8)]
    shapes = request_shapes(caches, 7)
    assert [(x.shape, x.dtype.name) for x in shapes] == [
        ((3, 7, 4, 8, 16), "float32"),
        ((3, 7, 3, 96), "float32"),
    ]
    assert request_shapes([Cache(keys)], 7) == ()
    assert pool_shapes([recurrent], (48,)) == (None,)


def test_layers_with_other_states_cannot_share_a_pool() -> None:
    other = network(replace(CONFIG, linear_value_head_dim=16)).cache
    with pytest.raises(ValueError, match=r"layers \[0, 1\] keep different values of a request"):
        request_shapes([network(CONFIG).cache, other], 3)


def test_windows_have_the_dtype_of_activations() -> None:
    state, window = network(replace(CONFIG, dtype="bfloat16")).cache.per_request
    assert (state.dtype, window.dtype) == (jnp.float32, jnp.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 .* linear_num_key_heads=2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 must be at least 2"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)


def test_a_state_takes_no_memory_per_token() -> None:
    """At the shape of 9B, a request has 2.1 MB per layer, and its window 48 KiB."""
    sizes = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    sizes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    cache = network(replace(CONFIG, dtype="bfloat16", **sizes)).cache
    assert cache.per_token is None
    assert [x.size * x.dtype.itemsize for x in cache.per_request] == [
        32 * 128 * 128 * 4,
        3 * 8192 * 2,
    ]
    assert jax.tree.leaves(pool_shapes([cache], (100,))) == []

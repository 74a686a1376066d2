"""Experts of gpt-oss against a loop over tokens in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from specjax.kernels import mxfp4

from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.models.gpt_oss import BiasedExperts, GptOssConfig
from specjax.models.layers import LayerKind
from specjax.models.registry import refusals
from specjax.testing.models import SIZES
from specjax.types import TokenInputs

COUNT, CHOSEN, SIZE, INNER, LIMIT = 8, 3, 64, 128, 1.5


def config_of(**changes: Any) -> GptOssConfig:
    sizes = {**SIZES, "hidden_size": SIZE, "num_experts": COUNT, "num_experts_per_tok": CHOSEN}
    sizes |= {"moe_intermediate_size": INNER, "swiglu_limit": LIMIT, "model_type": "gpt_oss"}
    return GptOssConfig(num_layers=1, **{**sizes, **changes})


def make(*, is_packed: bool) -> BiasedExperts:
    config = config_of(has_packed_experts=is_packed)
    kind = LayerKind.of(config, implementation="xla")
    graph, state = nnx.split(BiasedExperts(config, kind, "model.layers.0."))
    rng = np.random.default_rng(0)

    def values(leaf: Any) -> Any:
        if leaf.dtype == jnp.uint16:
            return rng.integers(1 << 16, size=leaf.shape, dtype=np.uint16)
        if leaf.dtype == jnp.uint32:
            count, blocks, outputs = leaf.shape
            return mxfp4.pack_scales(rng.integers(122, 126, (count, outputs, 4 * blocks), np.uint8))
        return np.asarray(rng.normal(size=leaf.shape) * leaf.shape[-1] ** -0.25, leaf.dtype)

    return nnx.merge(graph, jax.tree.map(values, state))


def reference(layer: BiasedExperts, x: np.ndarray) -> np.ndarray:
    """The output of one token f64 ``[D]``."""
    if layer.gate_up_scale is None:
        wide = [layer.gate_up[...], layer.down[...]]
    else:
        sizes = SIZE, INNER
        wide = [mxfp4.unpacked(*y, size) for y, size in zip(layer.matrices(), sizes, strict=True)]
    matrices = [np.float64(y).reshape(COUNT, -1, y.shape[-1]) for y in wide]
    of_gates, of_outputs = (np.float64(y) for y in layer.biases)
    logits = np.float64(layer.router[...]) @ x + np.float64(layer.router_bias[...])
    chosen = np.argsort(-logits)[:CHOSEN]
    weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
    out = np.zeros(SIZE)
    for expert, weight in zip(chosen, weights, strict=True):
        gate, up = np.split(matrices[0][expert] @ x + of_gates[expert], 2)
        gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
        hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
        out += weight * (matrices[1][expert] @ hidden + of_outputs[expert])
    return out


@pytest.mark.parametrize("is_packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tokens_equal_a_loop(is_packed: bool) -> None:
    """Padding reads no expert, and does not change other tokens."""
    layer = make(is_packed=is_packed)
    x = np.random.default_rng(1).normal(size=(2, 4, SIZE)).astype(np.float32)
    is_real = np.array([[1, 1, 0, 1], [0, 1, 1, 0]], bool)
    unread: Any = None
    out = layer(jnp.asarray(x), TokenInputs(jnp.asarray(is_real), unread, unread))
    assert (np.asarray(layer.chosen).reshape(2, 4, CHOSEN)[~is_real] == -1).all()
    found = np.asarray(out.sum(axis=0))
    assert not found[~is_real].any()
    expected = np.stack([reference(layer, np.float64(row)) for row in x[is_real]])
    np.testing.assert_allclose(found[is_real], expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_random_weights_are_packed_and_of_usual_size() -> None:
    flat = FlatModel.of(partial(CausalLM, config_of(has_packed_experts=True, windows=(4,))))
    named = dict(zip(flat.names, flat.random(0), strict=True))
    for name, size in (("gate_up", SIZE), ("down", INNER)):
        codes, scales = named[f"layers.0.mlp.{name}"], named[f"layers.0.mlp.{name}_scale"]
        values = np.asarray(mxfp4.unpacked(codes, scales, size))
        assert 0.7 < values.std() * size**0.5 < 1.5
        assert set(np.unique(np.asarray(codes).view(np.uint8))) == set(range(256))


def test_sinks_and_windows_are_refused_where_bits_must_be_equal() -> None:
    config = config_of(windows=(4,))
    found = [*refusals(config, jax.devices()[0], deterministic=True)]
    assert found == [
        "enable_deterministic_inference=True does not support the attention options "
        "['sinks', 'window'] of the model's layers"
    ]
    assert not [*refusals(config, jax.devices()[0], deterministic=False)]

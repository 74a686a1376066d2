"""Scales of stored keys and values as parts of weights."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.tensors import TensorInfo, TensorSource, make_weight
from specjax.models.decoder import CausalLM
from specjax.models.experts import MixtureConfig
from specjax.models.flat import FlatModel
from specjax.models.gated_delta import DeltaConfig
from specjax.models.gemma4 import Gemma4Config
from specjax.models.layers import dense_attention, rotated
from specjax.models.muse import MuseConfig
from specjax.models.registry import FAMILIES, layer_kinds
from specjax.models.short_conv import ConvConfig
from specjax.testing.files import TARGET

EXPONENTS = ((-3, 2), (1, -4))
# families in which each layer stores keys and values
OTHERS = DeltaConfig, ConvConfig
ATTENTIVE = [name for name, x in FAMILIES.items() if not issubclass(x.config, OTHERS)]
TOKENS = jnp.asarray([[3, 1, 4, 15, 9, 26, 5, 35]])


def passes(config: Any, tensors: dict[str, np.ndarray]) -> tuple[np.ndarray, list[Any]]:
    """Logits, and the keys and values that each layer stores."""
    path = Path("tensors")
    infos = {name: TensorInfo(x.shape, path, "float32") for name, x in tensors.items()}
    source = TensorSource(path, infos, tensors.__getitem__)
    flat = FlatModel.of(partial(CausalLM, config))
    recipes, dtype = flat.recipes, np.dtype(np.float32)
    weights = flat.order({name: make_weight(r, source, dtype) for name, r in recipes.items()})
    stored = []

    def attend(kv: Any, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
        stored.append((k, v))
        mask = jnp.tril(jnp.ones((TOKENS.size, TOKENS.size), bool))
        options = {name: x for name, x in options.items() if name != "window"}
        return kv, dense_attention(q, k, v, mask=mask, **options)

    model = flat.rebuild(tuple(map(jnp.asarray, weights)))
    positions = jnp.arange(TOKENS.size)[None]
    hidden, _, _ = model(TOKENS, positions, None, rotated(attend))
    return np.asarray(model.logits(hidden)), stored


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIVE)
def test_outputs_stay_the_same(name: str) -> None:
    shared = {f: getattr(TARGET, f) for f in ("vocab_size", "hidden_size", "num_heads", "head_dim")}
    shared |= {f: getattr(TARGET, f) for f in ("intermediate_size", "num_layers", "num_kv_heads")}
    shared |= {"qk_norm": "olmo" not in name, "qkv_bias": True, "output_bias": True}
    if issubclass(FAMILIES[name].config, MixtureConfig):
        shared |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if FAMILIES[name].config is MuseConfig:
        shared |= {"qk_norm": False, "qk_scale_factor": 3.87, "post_norm_eps": 1e-8}
    if FAMILIES[name].config is Gemma4Config:
        shared |= {"global_head_dim": 16, "num_global_key_value_heads": 1, "full_layers": (1,)}
        wide = TARGET.rope._replace(head_dim=16)
        shared |= {"attention_k_eq_v": False, "layer_ropes": (None, wide)}
    config = FAMILIES[name].config(model_type=name, **shared)
    recipes = FlatModel.of(partial(CausalLM, config)).recipes
    parts = [part for recipe in recipes.values() for part in recipe.parts]
    rng = np.random.default_rng(0)
    tensors = {p.name: np.float32(rng.normal(size=p.shape) / p.shape[-1] ** 0.5) for p in parts}
    logits, stored = passes(config, tensors)
    scaled, others = passes(replace(config, kv_exponents=EXPONENTS), tensors)
    np.testing.assert_allclose(scaled, logits, rtol=1e-5, atol=1e-6)
    kinds = layer_kinds(config)
    for i, (key, value) in enumerate(EXPONENTS):
        if any("qkv" in part.name for part in parts):
            key, value = 0, 0
        if kinds[i].norm_offset and kinds[i].qk_norm:
            key = 0
        if FAMILIES[name].config is Gemma4Config:  # a norm of values removes factors
            value = 0
        for one, other, exponent in zip(stored[i], others[i], (key, value), strict=True):
            np.testing.assert_allclose(other * 2.0**exponent, one, rtol=1e-5, atol=1e-6)

"""GLM-4 (9B and 32B): half of each head is rotated, in neighbouring pairs."""

from dataclasses import replace
from functools import partial
from typing import Any

from specjax.config import ModelConfig
from specjax.json_file import Fields, Flag
from specjax.models.family import Family, Recipe, alike, decoder_layer, fused, renamed, rotated
from specjax.models.layers import LayerKind

# the norms after attention and feed-forward have names of their own
_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def _glm(config: Fields) -> dict[str, Any]:
    return {"qkv_bias": config.get("attention_bias", Flag, True)}


def _layer(config: ModelConfig, kind: LayerKind, flat: str, prefix: str) -> dict[str, Recipe]:
    recipes = decoder_layer(config, kind, flat, prefix)
    if kind.post_norm:
        recipes = renamed(recipes, _NORMS)
    rotated(config, recipes, interleaved=True)
    fused(recipes, f"{flat}mlp.gate_up", f"{prefix}mlp.gate_up_proj")
    return recipes


_DEFAULTS = {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}
GLM = Family(architecture="GlmForCausalLM", read=_glm, recipe=_layer, defaults=_DEFAULTS)
GLM4 = replace(GLM, architecture="Glm4ForCausalLM", layers=partial(alike, post_norm=True))

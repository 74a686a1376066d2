"""Phi-3, Phi-3.5 and Phi-4: projections stored together, LongRoPE, heads rotated in part."""

from typing import Any

from specjax.config import ModelConfig
from specjax.json_file import Fields
from specjax.models.family import Family, Recipe, decoder_layer, fused, layer_windows
from specjax.models.layers import LayerKind


def _phi3(config: Fields) -> dict[str, Any]:
    return layer_windows(config, lambda i: True)


def _layer(config: ModelConfig, kind: LayerKind, flat: str, prefix: str) -> dict[str, Recipe]:
    recipes = decoder_layer(config, kind, flat, prefix)
    fused(recipes, f"{flat}attention.qkv", f"{prefix}self_attn.qkv_proj")
    fused(recipes, f"{flat}mlp.gate_up", f"{prefix}mlp.gate_up_proj")
    return recipes


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    read=_phi3,
    recipe=_layer,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
)

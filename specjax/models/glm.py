"""GLM-4 (9B and 32B): half of each head is rotated, in neighbouring pairs."""

from dataclasses import replace
from functools import partial
from typing import Any

from specjax.json_file import Fields, Flag
from specjax.models.family import GGUF, Family, alike

# the norms after attention and feed-forward have names of their own
_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def _glm(config: Fields) -> dict[str, Any]:
    return {"qkv_bias": config.get("attention_bias", Flag, True)}


_DEFAULTS = {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}
_layers = partial(alike, interleaved=True, fused=("gate_up_proj",))
GLM = Family(
    architecture="GlmForCausalLM",
    read=_glm,
    layers=_layers,
    defaults=_DEFAULTS,
    gguf=GGUF(arch="chatglm"),
)
_layers4 = partial(_layers, post_norm=True, renamed=tuple(_NORMS.items()))
GLM4 = replace(GLM, architecture="Glm4ForCausalLM", layers=_layers4, gguf=GGUF(arch="glm4"))

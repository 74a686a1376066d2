"""Llama 2 and 3.x, and families that differ from it in sizes and scales only."""

from typing import Any

from specjax.config import Scale
from specjax.json_file import Fields, Flag
from specjax.models.family import GGUF, Family, attention_biases, layer_windows


def _llama(config: Fields) -> dict[str, Any]:
    windows = layer_windows(config, lambda i: False) if "layer_types" in config else {}
    return attention_biases(config) | windows | {"mlp_bias": config.get("mlp_bias", Flag, False)}


def _granite(config: Fields) -> dict[str, Any]:
    return _llama(config) | {
        "embedding_scale": config.get("embedding_multiplier", Scale, 1.0),
        "residual_scale": config.get("residual_multiplier", Scale, 1.0),
        "attention_scale": config.get("attention_multiplier", Scale, 1.0),
        "logit_scale": 1.0 / config.get("logits_scaling", Scale, 1.0),
    }


def _mistral(config: Fields) -> dict[str, Any]:
    return layer_windows(config, lambda i: True)


LLAMA = Family(
    architecture="LlamaForCausalLM", read=_llama, gguf=GGUF(arch="llama", interleaved=True)
)
GRANITE = Family(
    architecture="GraniteForCausalLM",
    read=_granite,
    gguf=GGUF(arch="granite", interleaved=True),
)
_WINDOW = {"sliding_window": 4096}
MISTRAL = Family(
    architecture="MistralForCausalLM",
    read=_mistral,
    defaults=_WINDOW,
    gguf=GGUF(arch="llama", interleaved=True, needs=("attention.sliding_window",)),
)
MINISTRAL = Family(architecture="MinistralForCausalLM", read=_mistral, defaults=_WINDOW)
MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    read=_mistral,
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    gguf=GGUF(arch="mistral3", interleaved=True),
)

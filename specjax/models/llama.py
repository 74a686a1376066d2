"""Llama 2 and 3.x, and Mistral."""

from typing import Any

from specjax.json_file import Fields, Flag
from specjax.models.family import Family, attention_biases, sliding_window


def _llama(config: Fields) -> dict[str, Any]:
    return attention_biases(config) | {"mlp_bias": config.get("mlp_bias", Flag, False)}


def _mistral(config: Fields) -> dict[str, Any]:
    return {"sliding_window": sliding_window(config)}


LLAMA = Family(architecture="LlamaForCausalLM", read=_llama, gguf="interleaved")
MISTRAL = Family(architecture="MistralForCausalLM", read=_mistral)

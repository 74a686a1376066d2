"""Qwen2, Qwen2.5, Qwen3, and MiMo, which is a Qwen2 with modules for multi-token prediction."""

from dataclasses import replace
from typing import Any

from specjax.json_file import Fields, Flag, Size
from specjax.models.family import GGUF, Family, attention_biases, layer_windows


def _window(config: Fields) -> dict[str, Any]:
    begin = config.get("max_window_layers", Size, 28)
    is_on = config.get("use_sliding_window", Flag, False)
    return layer_windows(config, lambda i: i >= begin) if is_on else {}


def _qwen2(config: Fields) -> dict[str, Any]:
    return _window(config) | {"qkv_bias": True}


def _mimo(config: Fields) -> dict[str, Any]:
    return _window(config) | {"qkv_bias": config.get("attention_bias", Flag, True)}


def _qwen3(config: Fields) -> dict[str, Any]:
    return _window(config) | attention_biases(config) | {"qk_norm": True}


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    read=_qwen2,
    defaults={"use_sliding_window": False},
    gguf=GGUF(arch="qwen2"),
)
QWEN3 = replace(QWEN2, architecture="Qwen3ForCausalLM", read=_qwen3, gguf=GGUF(arch="qwen3"))
MIMO = replace(QWEN2, architecture="MiMoForCausalLM", read=_mimo, gguf=None)

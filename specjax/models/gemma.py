"""Gemma 1, 2 and 3 (text)."""

from dataclasses import replace
from functools import partial
from typing import Any

from specjax.config import Rope, Scale
from specjax.json_file import Fields, Flag, PositiveSize, Size
from specjax.models.family import (
    GGUF,
    Family,
    alike,
    attention_biases,
    layer_windows,
    sliding_layers,
)
from specjax.models.rope import local_theta


def _gemma(config: Fields) -> dict[str, Any]:
    values = attention_biases(config)
    values["embedding_scale"] = config.get("hidden_size", Size) ** 0.5
    if config.get("use_bidirectional_attention", Flag, False):
        raise config.wrong("use_bidirectional_attention", "is not supported; only false is")
    if "gelu" in (config.get(key, str, "") for key in ("hidden_act", "hidden_activation")):
        values["activation"] = "gelu_pytorch_tanh"  # what the first files mean
    return values


def _gemma2(config: Fields, pattern: int = 2) -> dict[str, Any]:
    every = config.get("sliding_window_pattern", PositiveSize, pattern)
    return {
        **_gemma(config),
        **layer_windows(config, lambda i: (i + 1) % every > 0),
        "attention_scale": config.get("query_pre_attn_scalar", Scale, 256.0) ** -0.5,
        "attention_softcap": config.get("attn_logit_softcapping", Scale, None),
        "logit_softcap": config.get("final_logit_softcapping", Scale, None),
    }


def _gemma3(config: Fields) -> dict[str, Any]:
    every = config.get("sliding_window_pattern", PositiveSize, 6)
    local = Rope(config.get("head_dim", Size), local_theta(config, 10000.0))
    slides = sliding_layers(config, lambda i: (i + 1) % every > 0)
    ropes = tuple(local if is_local else None for is_local in slides)
    return _gemma2(config, pattern=6) | {"qk_norm": True, "layer_ropes": ropes}


def _score_scale(depth_of_27b: int, config: Fields) -> dict[str, Any]:
    """The scale of scores is that of a head, except in the model of 27B."""
    if config.get("num_hidden_layers", Size) != depth_of_27b:
        return {"query_pre_attn_scalar": config.get("head_dim", Size)}
    heads = config.get("num_attention_heads", PositiveSize)
    return {"query_pre_attn_scalar": config.get("hidden_size", Size) / heads}


_DEFAULTS = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vocab_size": 256000,
}
# sizes of the 4B model, which its files omit
_DEFAULTS3 = _DEFAULTS | {
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "vocab_size": 262208,
}
GEMMA = Family(
    architecture="GemmaForCausalLM",
    read=_gemma,
    layers=partial(alike, norm_offset=1.0),
    defaults=_DEFAULTS,
    gguf=GGUF(arch="gemma"),
)
GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    read=_gemma2,
    layers=partial(alike, norm_offset=1.0, post_norm=True),
    defaults=_DEFAULTS
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
    # the first files lack the window, but have it
    gguf=GGUF(arch="gemma2", needs=("attention.sliding_window",), derive=partial(_score_scale, 46)),
)
GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    read=_gemma3,
    defaults=_DEFAULTS3,
    gguf=GGUF(arch="gemma3", derive=partial(_score_scale, 62)),
)

"""LFM2 and LFM2.5, dense or as mixtures: short convolutions in most layers, attention in others."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specjax.config import Epsilon, Scale
from specjax.json_file import Fields, Flag, PositiveSize, Size
from specjax.models.experts import MixtureConfig, mixture_layers, read_experts
from specjax.models.family import Family, alike
from specjax.models.layers import LayerKind
from specjax.models.short_conv import ConvConfig, ShortConv

NAMES = {  # Llama's words, and those of files
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "norm": "embedding_norm",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "out_proj",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}


@dataclass(frozen=True, kw_only=True)
class ConvMixtureConfig(ConvConfig, MixtureConfig):
    """A language model with short convolutions, and mixtures of experts in most layers."""


def _layers(
    base: Callable[..., tuple[LayerKind, ...]], config: ConvConfig, **differences: Any
) -> tuple[LayerKind, ...]:
    kinds = base(config, qk_norm=True, renamed=tuple(NAMES.items()), **differences)
    return tuple(
        replace(kind, mixer=ShortConv) if i in config.conv_layers else kind
        for i, kind in enumerate(kinds)
    )


def _inner_size(config: Fields) -> int:
    """The width of the feed-forward, which files state before its adjustment."""
    size = config.get("block_ff_dim", PositiveSize, config.get("intermediate_size", PositiveSize))
    if not config.get("block_auto_adjust_ff_dim", Flag, True):
        return size
    multiple = config.get("block_multiple_of", PositiveSize, 256)
    size = int(config.get("block_ffn_dim_multiplier", Scale, 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _conv_layers(config: Fields) -> tuple[int, ...]:
    count = config.get("num_hidden_layers", Size)
    full = config.get("full_attn_idxs", list[int], list(range(count)))
    by_number = ["full_attention" if i in full else "conv" for i in range(count)]
    kinds = config.get("layer_types", list[str], by_number)
    if len(kinds) != count or not {*kinds} <= {"conv", "full_attention"}:
        demand = f"must be conv or full_attention for each of {count} layers"
        raise config.wrong("layer_types", demand)
    return tuple(i for i, kind in enumerate(kinds) if kind == "conv")


def _lfm2(config: Fields) -> dict[str, Any]:
    is_tied = config.get("tie_word_embeddings", Flag)
    return {
        "activation": "silu",
        "intermediate_size": _inner_size(config),
        "rms_norm_eps": config.get(
            "norm_eps", Epsilon, config.get("block_norm_eps", Epsilon, 1e-5)
        ),
        "tie_word_embeddings": config.get("tie_embedding", Flag, is_tied),
        "conv_layers": _conv_layers(config),
        "conv_L_cache": config.get("conv_L_cache", Size, 3),
        "conv_bias": config.get("conv_bias", Flag, False),
    }


def _lfm2_moe(config: Fields) -> dict[str, Any]:
    count = config.get("num_hidden_layers", Size)
    sizes = read_experts(
        config,
        scoring="sigmoid",
        has_correction_bias=config.get("use_expert_bias", Flag, True),
        routed_scaling_factor=config.get("routed_scaling_factor", Scale, 1.0),
        dense_layers=tuple(range(min(config.get("num_dense_layers", Size, 2), count))),
    )
    return _lfm2(config) | sizes


LFM2 = Family(
    architecture="Lfm2ForCausalLM",
    read=_lfm2,
    layers=partial(_layers, alike),
    config=ConvConfig,
    defaults={"intermediate_size": 12288, "rope_theta": 1e6, "tie_word_embeddings": True},
    gguf=None,
)
LFM2_MOE = replace(
    LFM2,
    architecture="Lfm2MoeForCausalLM",
    read=_lfm2_moe,
    layers=partial(_layers, mixture_layers),
    config=ConvMixtureConfig,
    defaults={**LFM2.defaults, "intermediate_size": 7168, "block_auto_adjust_ff_dim": False},
)

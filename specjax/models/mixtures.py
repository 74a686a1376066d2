"""Mixtures of experts: Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE, Granite-MoE and GLM-4 MoE."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from msgspec import Meta

from specjax.config import Count
from specjax.json_file import Fields, Flag, PositiveSize, Size
from specjax.models.experts import MixtureConfig, mixture_layers, read_experts
from specjax.models.family import GGUF, Family, Modules, attention_biases, layer_windows
from specjax.models.llama import GRANITE
from specjax.models.qwen import QWEN2, QWEN3

# of multi-token prediction modules
_Modules = Annotated[int, Meta(ge=0, le=1024)]


def _sparse_layers(config: Fields) -> dict[str, Any]:
    """Read which layers of Qwen's models have a plain feed-forward."""
    step = config.get("decoder_sparse_step", PositiveSize, 1)
    dense = {*config.get("mlp_only_layers", list[Size], [])}
    count = config.get("num_hidden_layers", Size)
    return {"dense_layers": tuple(i for i in range(count) if i in dense or (i + 1) % step)}


def _qwen3_moe(config: Fields) -> dict[str, Any]:
    is_on = config.get("use_sliding_window", Flag, False)
    windows = layer_windows(config, lambda i: True) if is_on else {}
    biases = attention_biases(config) | {"qk_norm": True}
    return windows | biases | read_experts(config, **_sparse_layers(config))


def _qwen2_moe(config: Fields) -> dict[str, Any]:
    if config.get("use_sliding_window", Flag, False):
        raise config.wrong("use_sliding_window", "is not supported for qwen2_moe")
    shared = config.get("shared_expert_intermediate_size", Size, 0)
    changes = {"shared_expert_intermediate_size": shared, "has_shared_expert_gate": shared > 0}
    biases = {"qkv_bias": config.get("qkv_bias", Flag, True)}
    return biases | read_experts(config, **_sparse_layers(config), **changes)


def _inner(config: Fields) -> dict[str, Any]:
    """Read sizes of families whose experts have the width of a plain feed-forward."""
    width = config.get("intermediate_size", PositiveSize)
    return read_experts(config, moe_intermediate_size=width)


def _mixtral(config: Fields) -> dict[str, Any]:
    return layer_windows(config, lambda i: True) | _inner(config)


def _olmoe(config: Fields) -> dict[str, Any]:
    if "clip_qkv" in config:
        raise config.wrong("clip_qkv", "is not supported; only null is")
    return attention_biases(config) | _inner(config)


def _granite_moe(config: Fields) -> dict[str, Any]:
    return GRANITE.read(config) | _inner(config)


def _glm4_moe(config: Fields) -> dict[str, Any]:
    num_layers = config.get("num_hidden_layers", Size)
    sizes = read_experts(
        config,
        scoring="sigmoid",
        has_correction_bias=True,
        routed_scaling_factor=config.get("routed_scaling_factor", float, 1.0),
        n_group=config.get("n_group", PositiveSize, 1),
        topk_group=config.get("topk_group", PositiveSize, 1),
        dense_layers=tuple(range(min(config.get("first_k_dense_replace", Size, 1), num_layers))),
        num_nextn_predict_layers=config.get("num_nextn_predict_layers", _Modules, 0),
    )
    shared = config.get("n_shared_experts", Count, 1) * sizes["moe_intermediate_size"]
    has_norms = config.get("use_qk_norm", Flag, False)
    biases = {"qkv_bias": config.get("attention_bias", Flag, False), "qk_norm": has_norms}
    return sizes | biases | {"shared_expert_intermediate_size": shared}


def _family(name: str, base: Family = QWEN3, **changes: Any) -> Family:
    values: Mapping[str, Any] = {"config": MixtureConfig, "layers": mixture_layers}
    return replace(base, architecture=f"{name}ForCausalLM", **{**values, **changes})


_SPARSE = ("mlp", "block_sparse_moe")
_MIXTRAL = (_SPARSE, ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
QWEN2_MOE = _family(
    "Qwen2Moe",
    QWEN2,
    read=_qwen2_moe,
    defaults={**QWEN2.defaults, "norm_topk_prob": False},
    gguf=GGUF(arch="qwen2moe"),
)
QWEN3_MOE = _family(
    "Qwen3Moe",
    read=_qwen3_moe,
    defaults={**QWEN3.defaults, "norm_topk_prob": False},
    # as in llama.cpp: files do not say it
    gguf=GGUF(arch="qwen3moe", derive=lambda _: {"norm_topk_prob": True}),
)
MIXTRAL = _family(
    "Mixtral",
    read=_mixtral,
    layers=partial(mixture_layers, renamed=_MIXTRAL),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    gguf=GGUF(arch="llama", interleaved=True, needs=("expert_count",)),
)
OLMOE = _family(
    "Olmoe",
    read=_olmoe,
    layers=partial(mixture_layers, joint_qk_norm=True),
    defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False},
    gguf=GGUF(arch="olmoe"),
)
GRANITE_MOE = _family(
    "GraniteMoe",
    read=_granite_moe,
    layers=partial(mixture_layers, renamed=(_SPARSE, ("gate", "router.layer"))),
    defaults=GRANITE.defaults,
    gguf=GGUF(arch="granitemoe", interleaved=True),
)
GLM4_MOE = _family(
    "Glm4Moe",
    read=_glm4_moe,
    layers=partial(mixture_layers, renamed=(("shared_expert", "shared_experts"),)),
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    gguf=None,
    modules=Modules(
        at="model.layers.{layer}.",
        hidden_norm="hnorm",
        token_norm="enorm",
        projection="eh_proj",
        norm="shared_head.norm",
        is_token_first=True,
        copies=("embed_tokens.weight", "shared_head.head.weight"),
    ),
)

"""Shapes of published targets and drafts, to measure speed with ``load_format="dummy"``."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from specjax.checkpoints.block import DFLASH_SPECULATORS, DSPARK_SPECULATORS
from specjax.checkpoints.export import published_target, write_zeros
from specjax.config import BlockConfig, DraftConfig, ModelConfig, Rope, RopeScaling
from specjax.models.experts import MixtureConfig
from specjax.models.gemma4 import Gemma4Config
from specjax.models.gpt_oss import GptOssConfig
from specjax.models.qwen35 import Qwen35Config

_LLAMA31_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
LLAMA31_8B = ModelConfig(
    model_type="llama",
    num_layers=32,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(rope_type="llama3", factor=8.0),
    **_LLAMA31_8B,
)
_QWEN3_8B: dict[str, Any] = _LLAMA31_8B | {
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
QWEN3_8B = ModelConfig(model_type="qwen3", num_layers=36, qk_norm=True, **_QWEN3_8B)
_QWEN3_30B: dict[str, Any] = _QWEN3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_kv_heads": 4,
}
QWEN3_30B_A3B = MixtureConfig(
    model_type="qwen3_moe",
    num_layers=48,
    qk_norm=True,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    **_QWEN3_30B,
)
_GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_heads": 64,
    "num_kv_heads": 8,
    "head_dim": 64,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


def _gpt_oss(num_layers: int, num_experts: int) -> tuple[GptOssConfig, DraftConfig]:
    """A gpt-oss with experts in MXFP4, and an EAGLE-3 head."""
    rope = RopeScaling(
        rope_type="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        attention_factor=0.1 * math.log(32) + 1,
        truncate=False,
    )
    model = GptOssConfig(
        model_type="gpt_oss",
        num_layers=num_layers,
        num_experts=num_experts,
        num_experts_per_tok=4,
        moe_intermediate_size=2880,
        has_packed_experts=True,
        rope_scaling=rope,
        qkv_bias=True,
        output_bias=True,
        windows=(128, 0) * (num_layers // 2),
        **_GPT_OSS,
    )
    return model, _eagle3(model, _GPT_OSS | {"intermediate_size": 17280})


QWEN3_8B_DFLASH = BlockConfig(
    checkpoint_format=DFLASH_SPECULATORS,
    target_hidden_size=QWEN3_8B.hidden_size,
    draft_vocab_size=QWEN3_8B.vocab_size,
    num_layers=5,
    feature_layers=(1, 9, 17, 25, 33),
    num_drafts=15,
    anchor_first=False,
    mask_token_id=151669,
    **_QWEN3_8B,
)
QWEN3_8B_DSPARK = dataclasses.replace(
    QWEN3_8B_DFLASH,
    checkpoint_format=DSPARK_SPECULATORS,
    num_drafts=7,
    anchor_first=True,
    markov_head="vanilla",
    markov_rank=256,
    has_confidence_head=True,
    confidence_with_markov=True,
)
_QWEN35_9B: dict[str, Any] = _QWEN3_8B | {
    "vocab_size": 248320,
    "num_heads": 16,
    "num_kv_heads": 4,
    "head_dim": 256,
    "rotary_dim": 64,
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_QWEN35_27B: dict[str, Any] = _QWEN35_9B | {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_heads": 24,
    "linear_num_value_heads": 48,
}


def _qwen35(num_layers: int, sizes: dict[str, Any]) -> tuple[Qwen35Config, Qwen35Config]:
    """A Qwen3.5, and the module that drafts for it."""
    layers = tuple(i for i in range(num_layers) if (i + 1) % 4)
    name, sizes = "qwen3_5_text", sizes | {"linear_layers": layers}
    model = Qwen35Config(model_type=name, num_layers=num_layers, **sizes)
    return model, dataclasses.replace(model, num_layers=1, first_layer=num_layers)


_GEMMA4_31B: dict[str, Any] = _LLAMA31_8B | {
    "vocab_size": 262144,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_heads": 32,
    "num_kv_heads": 16,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
}
_GEMMA4_ROPE = RopeScaling(rope_type="proportional", partial_rotary_factor=0.25)
GEMMA4_31B = Gemma4Config(
    model_type="gemma4_text",
    activation="gelu_pytorch_tanh",
    attention_scale=1.0,
    embedding_scale=5376**0.5,
    rope_theta=1e6,
    rope_scaling=_GEMMA4_ROPE,
    layer_ropes=(*[Rope(256, 1e4)] * 5, Rope(512, 1e6, _GEMMA4_ROPE)) * 10,
    num_layers=60,
    windows=(1024, 1024, 1024, 1024, 1024, 0) * 10,
    full_layers=tuple(range(5, 60, 6)),
    global_head_dim=512,
    num_global_key_value_heads=4,
    attention_k_eq_v=True,
    tie_word_embeddings=True,
    **_GEMMA4_31B,
)


def _eagle3(model: ModelConfig, sizes: dict[str, Any]) -> DraftConfig:
    return DraftConfig(
        checkpoint_format="eagle-3",
        draft_vocab_size=32000,
        target_hidden_size=model.hidden_size,
        num_layers=1,
        feature_layers=model.default_feature_layers,
        **sizes,
    )


def _eagle(model: ModelConfig, sizes: dict[str, Any]) -> DraftConfig:
    return DraftConfig(
        checkpoint_format="eagle-1",
        draft_vocab_size=model.vocab_size,
        target_hidden_size=model.hidden_size,
        num_layers=1,
        has_own_lm_head=False,
        **sizes,
    )


PRESETS: dict[str, tuple[ModelConfig, DraftConfig | BlockConfig | ModelConfig]] = {
    "llama3.1-8b": (LLAMA31_8B, _eagle3(LLAMA31_8B, _LLAMA31_8B)),
    "llama3.1-8b-eagle": (LLAMA31_8B, _eagle(LLAMA31_8B, _LLAMA31_8B)),
    "qwen3-8b": (QWEN3_8B, _eagle3(QWEN3_8B, _QWEN3_8B)),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, _eagle3(QWEN3_30B_A3B, _QWEN3_30B)),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "qwen3-8b-dflash-b16": (QWEN3_8B, QWEN3_8B_DFLASH),
    "qwen3-8b-dspark-b7": (QWEN3_8B, QWEN3_8B_DSPARK),
    "qwen3.5-9b": _qwen35(32, _QWEN35_9B),
    "qwen3.5-27b": _qwen35(64, _QWEN35_27B),
    "gemma4-31b": (GEMMA4_31B, _eagle3(GEMMA4_31B, _GEMMA4_31B)),
}


def preset_algorithm(name: str | None) -> str | None:
    """Return the algorithm of a preset's draft; ``None`` if it is an EAGLE-3 head."""
    if name not in PRESETS:
        return None
    draft = PRESETS[name][1]
    if isinstance(draft, BlockConfig):
        return "DSPARK" if draft.markov_head else "DFLASH"
    return None if isinstance(draft, DraftConfig) and draft.fuses_features else "EAGLE"


def write_preset(name: str, folder: Path) -> tuple[Path, Path]:
    """Write a preset's configurations and a draft of zeros; return their two folders."""
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is not one of {sorted(PRESETS)}")
    (config, head), paths = PRESETS[name], (folder / name / "target", folder / name / "draft")
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    (paths[0] / "config.json").write_text(json.dumps(published_target(config)))
    write_zeros(paths[1], head)
    return paths

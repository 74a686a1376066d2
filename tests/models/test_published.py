"""The configurations that the families' publishers distribute, and the keys that they omit."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checkpoints import open_target
from specjax.checkpoints.huggingface import huggingface_config
from specjax.config import ModelConfig, Rope
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.models.registry import layer_kinds
from specjax.testing.files import write_folder

from ..support.checkpoint_files import CONFIG, target_tensors

Json = dict[str, Any]

GEMMA2 = {  # google/gemma-2-2b-it
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
GEMMA3 = {  # google/gemma-3-12b-it: also reads images, and omits what is as in the 4B model
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
PHI3 = {  # microsoft/Phi-3-mini-4k-instruct
    "architectures": ["Phi3ForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
FACTORS = {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"}
PHI4_MINI = PHI3 | {  # microsoft/Phi-4-mini-instruct
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": FACTORS,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
OLMO3 = {  # allenai/Olmo-3-7B-Instruct
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": ([*["sliding_attention"] * 3, "full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}
SMOLLM3 = {  # HuggingFaceTB/SmolLM3-3B
    "architectures": ["SmolLM3ForCausalLM"],
    "eos_token_id": 128012,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
GRANITE = {  # ibm-granite/granite-3.3-8b-instruct
    "architectures": ["GraniteForCausalLM"],
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49159,
}
GLM4 = {  # zai-org/GLM-4-9B-0414
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
MISTRAL_SMALL = {  # mistralai/Mistral-Small-3.2-24B-Instruct-2506
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral"},
}
MINISTRAL3 = {  # mistralai/Ministral-3-8B-Instruct-2512-BF16
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral"},
}
QWEN25 = {  # Qwen/Qwen2.5-7B-Instruct with the scaling that its page recommends for long texts
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
LFM2 = {  # LiquidAI/LFM2-1.2B
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_use_swiglu": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "tie_embedding": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
EXAONE4 = {  # LGAI-EXAONE/EXAONE-4.0-32B
    "architectures": ["Exaone4ForCausalLM"],
    "eos_token_id": 361,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
    "max_position_embeddings": 131072,
    "model_type": "exaone4",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "vocab_size": 102400,
}
# published configuration, generation_config.json, end tokens, number of weights in billions
PUBLISHED: dict[str, tuple[Json, Json, tuple[int, ...], float]] = {
    "gemma2": (GEMMA2, {"eos_token_id": [1, 107]}, (1, 107), 2.61),
    "gemma3": (GEMMA3, {"eos_token_id": [1, 106]}, (1, 106), 11.77),
    "phi3": (PHI3, {"eos_token_id": [32000, 32001, 32007]}, (32000, 32001, 32007), 3.82),
    "phi4_mini": (PHI4_MINI, {"eos_token_id": [200020, 199999]}, (200020, 199999), 3.84),
    "olmo3": (OLMO3, {"eos_token_id": [100265, 100257]}, (100265, 100257), 7.3),
    "smollm3": (SMOLLM3, {"eos_token_id": 128012}, (128012,), 3.08),
    "granite": (GRANITE, {}, (0,), 8.17),
    "glm4": (GLM4, {}, (151329, 151336, 151338), 9.4),
    "mistral_small": (MISTRAL_SMALL, {"eos_token_id": 2}, (2,), 23.57),
    "ministral3": (MINISTRAL3, {"eos_token_id": 2}, (2,), 8.49),
    "lfm2": (LFM2, {}, (7,), 1.17),
    "exaone4": (EXAONE4, {"eos_token_id": 361}, (361,), 32.0),
    "qwen25": (QWEN25, {"eos_token_id": [151645, 151643]}, (151645, 151643), 7.62),
}


def read(folder: Path, config: Json, generation: Json) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    # only an output head that is stored is not tied, in models that also read images
    tensors = {} if config["model_type"] == "gemma3" else {"language_model.lm_head.weight": 0}
    write_folder(folder, config, {name: np.float32([x]) for name, x in tensors.items()})
    return huggingface_config(folder, "bfloat16")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name: str, tmp_path: Path) -> None:
    config, generation, ends, billions = PUBLISHED[name]
    found = read(tmp_path, config, generation)
    assert found.eos_token_ids == ends
    recipes = FlatModel.of(partial(CausalLM, found)).recipes
    parts = {p.name: p for recipe in recipes.values() for p in recipe.parts}
    count = sum(float(np.prod(part.shape)) for part in parts.values())
    assert count / 1e9 == pytest.approx(billions, abs=0.006 * billions)


def test_null_is_not_the_default(tmp_path: Path) -> None:
    """transformers reads a soft cap or window of null as none, and has defaults for absent keys."""
    named = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
    without = {key: value for key, value in GEMMA2.items() if key not in named}
    absent = read(tmp_path, without, {})
    assert (absent.attention_softcap, absent.logit_softcap) == (50.0, 30.0)
    assert absent.windows == (4096, 0) * 13
    null = read(tmp_path, GEMMA2 | dict.fromkeys(named), {})
    assert (null.attention_softcap, null.logit_softcap, null.windows) == (None, None, ())


def test_what_is_special_is_read(tmp_path: Path) -> None:
    def of(name: str) -> ModelConfig:
        return read(tmp_path, *PUBLISHED[name][:2])

    gemma3 = of("gemma3")
    assert (gemma3.vocab_size, gemma3.head_dim, gemma3.bos_token_id) == (262208, 256, None)
    assert gemma3.max_position_embeddings == 131072
    assert gemma3.tie_word_embeddings
    assert gemma3.windows == (1024, 1024, 1024, 1024, 1024, 0) * 8
    # windows that a short context does not reach still mark layers with a base of their own
    for config in (gemma3, gemma3.within(1024), gemma3.within(1025)):
        near, far = (layer_kinds(config)[i].rope for i in (0, 5))
        assert near == Rope(256, 10000.0)
    assert gemma3.within(1024).windows == ()
    assert (far.theta, far.scaling and far.scaling.factor) == (1e6, 8.0)
    gemma2 = of("gemma2")
    assert gemma2.windows == (4096, 0) * 13
    assert (gemma2.attention_scale, gemma2.attention_softcap) == (1 / 16, 50.0)
    assert gemma2.embedding_scale == 2304**0.5
    granite = of("granite")
    assert (granite.embedding_scale, granite.residual_scale) == (12.0, 0.22)
    assert (granite.attention_scale, granite.logit_scale) == (1 / 128, 1 / 16)
    assert of("phi3").windows == (2047,) * 32
    mini = of("phi4_mini")
    assert (mini.rotary_dim, mini.rope_scaling.factor) == (96, 32.0)
    assert mini.within(mini.context_length(None)).windows == ()
    assert mini.within(4096).rope_scaling.long_factor == (1.0,) * 48
    assert mini.within(4097).rope_scaling.long_factor == (2.0,) * 48
    olmo = of("olmo3")
    assert {kind.rope.scaling is None for kind in layer_kinds(olmo) if kind.window} == {True}
    assert layer_kinds(olmo)[3].rope.scaling.attention_factor == pytest.approx(1.2079, abs=1e-4)
    assert [kind.rope.rotary_dim for kind in layer_kinds(of("smollm3"))[:4]] == [None] * 3 + [0]
    exaone = layer_kinds(of("exaone4"))[:4]
    assert [kind.window for kind in exaone] == [4096] * 3 + [None]
    assert [kind.rope.rotary_dim for kind in exaone] == [None] * 3 + [0]
    lfm2 = of("lfm2")
    caches = FlatModel.of(partial(CausalLM, lfm2)).caches
    assert [cache.window for cache in caches[:3]] == [3, 3, None]
    assert [cache.num_places for cache in caches[:3]] == [2, 2, 1]
    assert (lfm2.intermediate_size, lfm2.tie_word_embeddings) == (8192, True)
    assert not of("mistral_small").tie_word_embeddings
    qwen = of("qwen25")
    assert (qwen.windows, qwen.context_length(None), qwen.context_limit) == ((), 32768, 131072)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_one_that_reads_images(prefix: str, tmp_path: Path) -> None:
    """Files of transformers 4 and 5 name tensors differently; those of images are left out."""
    tensors = target_tensors()
    renamed = {name.replace("model.", prefix, 1): x for name, x in tensors.items()}
    renamed |= {"vision_tower.embed.weight": np.zeros(3, np.float32)}
    renamed |= {"model.multi_modal_projector.linear.weight": np.zeros(3, np.float32)}
    text = {key: value for key, value in CONFIG.items() if key != "architectures"}
    config = {"model_type": "mistral3", "text_config": text | {"model_type": "mistral"}}
    path = write_folder(tmp_path / "images", config, renamed)
    plain = write_folder(tmp_path / "text", CONFIG, tensors)
    ours, theirs = open_target(path).load_weights(), open_target(plain).load_weights()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        np.testing.assert_array_equal(weight, theirs[name])
    packed = {"lm_head.weight_packed": renamed.pop("lm_head.weight"), **renamed}
    write_folder(tmp_path / "packed", config, packed)
    assert not huggingface_config(tmp_path / "packed", "float32").tie_word_embeddings

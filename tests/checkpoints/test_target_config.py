"""Configurations of Hugging Face directories: both formats, families, errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from specjax.checkpoints import open_target
from specjax.config import ModelConfig, RopeScaling
from specjax.testing.files import write_folder

from ..support.checkpoint_files import CONFIG, LAYERS, target_tensors

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


DEFAULT, THETA = {"rope_type": "default"}, {"rope_theta": 7e5}


def read(path: Path, changes: dict[str, Any], dtype: str = "auto") -> ModelConfig:
    body = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(body))
    return open_target(path, dtype=dtype).config


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 5000.0, None),
        ({"rope_theta": ...}, 10000.0, None),
        ({"rope_scaling": None}, 5000.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 5000.0, ("linear", 2.0)),
        ({"rope_scaling": LLAMA3}, 5000.0, ("llama3", 8.0)),
        ({"rope_theta": ..., "rope_parameters": DEFAULT | THETA}, 7e5, None),
        ({"rope_theta": ..., "rope_parameters": LLAMA3 | THETA}, 7e5, ("llama3", 8.0)),
        # an empty set of parameters must not hide the top-level base
        ({"rope_parameters": {}}, 5000.0, None),
        ({"rope_parameters": DEFAULT}, 5000.0, None),
    ],
)
def test_rope_formats(
    tmp_path: Path, changes: dict[str, Any], theta: float, scaling: tuple[str, float] | None
) -> None:
    config = read(tmp_path, changes)
    assert config.rope_theta == theta
    found = config.rope_scaling
    assert (found and (found.rope_type, found.factor)) == scaling
    if scaling == ("llama3", 8.0):
        assert found == RopeScaling(**LLAMA3)


@pytest.mark.parametrize(
    ("changes", "dtype", "expected"),
    [
        ({}, "auto", "float32"),
        ({"torch_dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"torch_dtype": ..., "dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"torch_dtype": "float16"}, "auto", "bfloat16"),
        ({"torch_dtype": "float16"}, "float32", "float32"),
        ({}, "bfloat16", "bfloat16"),
        ({"torch_dtype": ...}, "auto", "float32"),  # the dtype of the weights
    ],
)
def test_dtype(tmp_path: Path, changes: dict[str, Any], dtype: str, expected: str) -> None:
    write_folder(tmp_path, CONFIG, target_tensors())
    assert read(tmp_path, changes, dtype).dtype == expected
    with pytest.raises(ValueError, match=r"dtype='float16'.*'bfloat16', 'float32'"):
        read(tmp_path, changes, "float16")


def family(model_type: str, name: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [f"{name}ForCausalLM"], **changes}


MISTRAL, QWEN2, QWEN3 = (family(name.lower(), name) for name in ("Mistral", "Qwen2", "Qwen3"))
BIASES = {"qkv_bias": True, "output_bias": True}
WINDOW = {"sliding_window": 32}
USED = WINDOW | {"use_sliding_window": True}
NONE, ALL = {"windows": ()}, {"windows": (32,) * LAYERS}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"head_dim": 8}),
        ({"head_dim": 16}, {"head_dim": 16}),
        ({"num_key_value_heads": ...}, {"num_kv_heads": 4}),
        ({"attention_bias": True}, BIASES | {"mlp_bias": False}),
        ({"mlp_bias": True}, {"qkv_bias": False, "output_bias": False, "mlp_bias": True}),
        (MISTRAL, {"qkv_bias": False, "windows": (4096,) * LAYERS}),
        (MISTRAL | {"sliding_window": None}, NONE),
        (MISTRAL | WINDOW, ALL),
        (QWEN2, {"qkv_bias": True, "output_bias": False, "qk_norm": False}),
        (QWEN3 | {"head_dim": 16}, {"qkv_bias": False, "qk_norm": True, "head_dim": 16}),
        (QWEN3 | {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        (QWEN3 | {"attention_bias": True}, BIASES),
        (QWEN2 | WINDOW, NONE),
        (QWEN2 | USED | {"use_sliding_window": False}, NONE),
        (QWEN2 | USED | {"max_window_layers": 0}, ALL),
        (QWEN2 | USED | {"max_window_layers": 1}, {"windows": (0, 32, 32)}),
        (QWEN2 | USED | {"max_window_layers": LAYERS}, NONE),
        (QWEN3 | USED | {"layer_types": KINDS}, {"windows": (32, 0, 32)}),
    ],
)
def test_families(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = read(tmp_path, changes)
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt9"}, r"model_type='gpt9' must be one of .*'gemma', .*'llama', "),
        (
            {"model_type": "ernie4_5_moe"},
            "needs mixtures of experts of another kind, which ",
        ),
        ({"model_type": "cohere2"}, "needs LayerNorm layers, which are not supported yet"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
        ({"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu' .* supported: .*'gelu'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq'"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "'ntk'.*'linear', 'dynamic'"),
        ({"rope_scaling": LONGROPE}, r"short_factor=\[1.0\] must be 4 numbers above 0"),
        ({"rope_parameters": {"other": {"rope_theta": 1.0}}}, "must be one set, or have one for"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 must be at most 1"),
        ({"hidden_size": ...}, "no hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be an integer"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers='3' must be an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (MISTRAL | WINDOW | {"layer_types": KINDS[:2]}, "must name the kinds of 3 layers"),
        (MISTRAL | WINDOW | {"layer_types": ["chunked"] * 3}, r"has kinds \['chunked'\] that are"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, changes)
    assert str(tmp_path) in str(error.value)


def test_broken_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        open_target(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a JSON list"):
        open_target(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        open_target(tmp_path)


def test_end_tokens_are_a_union_in_order(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    tokenizer_config = {
        "eos_token": {"content": "<eos>"},
        "added_tokens_decoder": {"11": {"content": "<eos>"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert read(tmp_path, {"eos_token_id": [9, 3]}).eos_token_ids == (7, 9, 3, 11)
    assert read(tmp_path, {"eos_token_id": None}).eos_token_ids == (7, 9, 11)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    assert read(tmp_path, {}).eos_token_ids == (7, 9, 3)
    body = {"added_tokens": [{"id": 12, "content": "<eos>"}], "model": {"vocab": {}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    assert read(tmp_path, {}).eos_token_ids == (7, 9, 3, 12)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<eos>": 5}}}))
    assert read(tmp_path, {}).eos_token_ids == (7, 9, 3, 5)

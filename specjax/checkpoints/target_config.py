"""Configuration of a target model from the JSON files of a Hugging Face directory."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints.rope_config import read_rope
from specjax.checkpoints.tensors import open_directory
from specjax.config import ModelConfig
from specjax.json_file import read_json
from specjax.text.tokenizer import find_eos_token_id

logger = logging.getLogger(__name__)

# model_type to the class that the weights must be of
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DTYPES = {
    "float32": "float32",
    "F32": "float32",
    "bfloat16": "bfloat16",
    "BF16": "bfloat16",
    "float16": "bfloat16",
    "F16": "bfloat16",
    "float64": "float32",
    "F64": "float32",
}


def require(config: Mapping[str, Any], key: str, path: Path) -> Any:
    """A value of a configuration that must be there."""
    value = config.get(key)
    if value is None:
        raise ValueError(f"{path} has no {key}")
    return value


def require_size(config: Mapping[str, Any], key: str, path: Path) -> int:
    """A count that must be there."""
    value = require(config, key, path)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{path}: {key}={value!r} must be an integer of at least 1")
    return value


def refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    """Raise for what no network here can do: quantised weights and other activations.

    Raises:
        ValueError: naming the value and what is supported.
    """
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise ValueError(
            f"{path}: quantization_config (quant_method={method!r}) is not supported; use the "
            "float16, bfloat16 or float32 weights of the model, or a GGUF file"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"{path}: hidden_act={activation!r} is not supported; supported: 'silu'")


def resolve_dtype(config: Mapping[str, Any], directory: Path, dtype: str) -> str:
    """``dtype``, or for ``"auto"`` the checkpoint's: of the configuration, else of the weights."""
    if dtype != "auto":
        return dtype
    named = config.get("dtype") or config.get("torch_dtype")
    if named in (None, "auto"):
        named = _stored_dtype(directory)
    named = str(named).removeprefix("torch.")
    if named not in _DTYPES:
        raise ValueError(
            f"{directory}: dtype {named!r} is not supported; pass dtype='float32' or 'bfloat16'"
        )
    if _DTYPES[named] != named and named in ("float16", "F16"):
        logger.info("%s: float16 weights are loaded as bfloat16", directory)
    return _DTYPES[named]


def _stored_dtype(directory: Path) -> str:
    """Dtype name of the first tensor that every model has."""
    source = open_directory(directory)
    name = "model.norm.weight"
    if name not in source.names():
        raise ValueError(f"{directory} has no tensor {name!r}")
    return source.info(name).dtype


def huggingface_config(directory: Path, dtype: str) -> ModelConfig:
    """The configuration that ``config.json`` and its companions describe.

    Raises:
        ValueError: if a key is missing or names something that is not supported.
    """
    path = directory / "config.json"
    config = read_json(path)
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"{path}: model_type={model_type!r} is not supported; supported: {sorted(FAMILIES)}"
        )
    architectures = config.get("architectures") or [FAMILIES[model_type]]
    if FAMILIES[model_type] not in architectures:
        raise ValueError(
            f"{path}: architectures={architectures} is not supported for model_type="
            f"{model_type!r}; supported: {FAMILIES[model_type]}"
        )
    refuse_unsupported(config, path)
    heads = require_size(config, "num_attention_heads", path)
    hidden = require_size(config, "hidden_size", path)
    theta, scaling = read_rope(config, path)
    attention_bias = bool(config.get("attention_bias")) and model_type in ("llama", "qwen3")
    values: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": require_size(config, "vocab_size", path),
        "hidden_size": hidden,
        "intermediate_size": require_size(config, "intermediate_size", path),
        "num_layers": require_size(config, "num_hidden_layers", path),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": require_size(config, "max_position_embeddings", path),
        "dtype": resolve_dtype(config, directory, dtype),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": attention_bias or model_type == "qwen2",
        "output_bias": attention_bias,
        "mlp_bias": bool(config.get("mlp_bias")) and model_type == "llama",
        "qk_norm": model_type == "qwen3",
        "sliding_window": _sliding_window(config, path),
        "eos_token_ids": _eos_token_ids(config, directory),
        "bos_token_id": _first(_as_ids(config.get("bos_token_id"))),
    }
    try:
        return ModelConfig(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _sliding_window(config: Mapping[str, Any], path: Path) -> int | None:
    """The attention window of all layers, None if none applies within the context.

    Raises:
        ValueError: if only some layers have one.
    """
    window = config.get("sliding_window")
    if config["model_type"] == "llama" or not window:
        return None
    num_layers = config["num_hidden_layers"]
    if config["model_type"].startswith("qwen") and not config.get("use_sliding_window", False):
        return None
    if layer_types := config.get("layer_types"):
        windowed = [kind == "sliding_attention" for kind in layer_types]
    else:
        first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
        windowed = [i >= first for i in range(num_layers)]
    if not any(windowed) or window >= config["max_position_embeddings"]:
        return None
    if not all(windowed):
        raise ValueError(
            f"{path}: a sliding window in {sum(windowed)} of {num_layers} layers is not "
            "supported; all layers or none must have one"
        )
    return window


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list) else [int(value)]


def _first(ids: Iterable[int]) -> int | None:
    return next(iter(ids), None)


def _eos_token_ids(config: Mapping[str, Any], directory: Path) -> tuple[int, ...]:
    """End tokens of generation_config.json, config.json and the tokenizer, in that order."""
    generation = directory / "generation_config.json"
    ids = _as_ids(read_json(generation).get("eos_token_id")) if generation.is_file() else []
    ids += _as_ids(config.get("eos_token_id"))
    ids += _as_ids(find_eos_token_id(directory))
    return tuple(dict.fromkeys(ids))

"""Configuration of a target model from the JSON files of a Hugging Face directory."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints.tensors import open_directory
from specjax.config import DTYPES, ModelConfig, RopeScaling
from specjax.json_file import Fields, Flag, PositiveSize, Size
from specjax.models.registry import FAMILIES
from specjax.text.tokenizer import find_eos_token_id, unique_ids

logger = logging.getLogger(__name__)

# stored dtype to the dtype of computation
_DTYPES = {name: name for name in DTYPES} | {"float16": "bfloat16", "float64": "float32"}


def huggingface_config(directory: Path, dtype: str) -> ModelConfig:
    """The configuration that ``config.json`` and its companions describe."""
    config = Fields.read(directory / "config.json")
    model_type = config.get("model_type", str, None)
    if model_type not in FAMILIES:
        raise config.wrong("model_type", f"is not supported; supported: {sorted(FAMILIES)}")
    family = FAMILIES[model_type]
    if family.architecture not in (
        config.get("architectures", list[str], []) or [family.architecture]
    ):
        demand = f"is not supported for model_type={model_type!r}; supported: {family.architecture}"
        raise config.wrong("architectures", demand)
    values = layer_sizes(config, family.hidden_act) | {
        "model_type": model_type,
        "vocab_size": config.get("vocab_size", Size),
        "num_layers": config.get("num_hidden_layers", Size),
        "max_position_embeddings": config.get("max_position_embeddings", Size),
        "dtype": _resolve_dtype(config, directory) if dtype == "auto" else dtype,
        "tie_word_embeddings": config.get("tie_word_embeddings", Flag, False),
        "eos_token_ids": _eos_token_ids(config, directory),
        "bos_token_id": next(iter(config.ids("bos_token_id")), None),
    }
    return config.build(family.config, values | family.read(config))


def layer_sizes(config: Fields, hidden_act: tuple[str, ...] = ("silu", "swish")) -> dict[str, Any]:
    """What targets and draft heads say of a layer in the same keys."""
    quantization = config.fields("quantization_config")
    if quantization.values:
        method = quantization.get("quant_method", Any, None)
        raise ValueError(
            f"{config.where}: quantization_config (quant_method={method!r}) is not supported; use "
            "the float16, bfloat16 or float32 weights of the model, or a GGUF file"
        )
    if config.get("hidden_act", str, hidden_act[0]) not in hidden_act:
        raise config.wrong("hidden_act", f"is not supported; supported: {hidden_act[0]!r}")
    heads = config.get("num_attention_heads", PositiveSize)
    hidden = config.get("hidden_size", Size)
    theta, scaling = _read_rope(config)
    return {
        "hidden_size": hidden,
        "intermediate_size": config.get("intermediate_size", Size),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", Size, heads),
        "head_dim": config.get("head_dim", Size, hidden // heads),
        "rms_norm_eps": config.get("rms_norm_eps", float, 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _read_rope(config: Fields) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling of a ``config.json``.

    transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 one
    ``rope_parameters``; 10000 is both libraries' default base for the supported families.
    """
    new, old = config.fields("rope_parameters"), config.fields("rope_scaling")
    for key, place in (("rope_parameters", new), ("rope_scaling", old)):
        if any(isinstance(value, Mapping) for value in place.values.values()):
            raise config.wrong(key, "must be one set of parameters for all layers")
    parameters = new if new.values else old
    for place in (parameters, config):
        if place.get("partial_rotary_factor", float, 1.0) != 1.0:
            raise place.wrong("partial_rotary_factor", "is not supported; only 1.0 is")
    theta = parameters.get("rope_theta", float, config.get("rope_theta", float, 10000.0))
    return theta, _scaling(parameters)


def _scaling(parameters: Fields) -> RopeScaling | None:
    rope_type = parameters.get("rope_type", str, parameters.get("type", str, "default"))
    if rope_type == "default":
        return None
    # an unknown type is refused below
    llama3 = ("factor", "low_freq_factor", "high_freq_factor")
    names = {"linear": llama3[:1], "llama3": llama3}.get(rope_type, ())
    values = {"rope_type": rope_type} | {name: parameters.get(name, float) for name in names}
    if rope_type == "llama3":
        length = "original_max_position_embeddings"
        values[length] = parameters.get(length, PositiveSize)
    return parameters.build(RopeScaling, values)


def _resolve_dtype(config: Fields, directory: Path) -> str:
    named = config.get("dtype", str, config.get("torch_dtype", str, "auto")).removeprefix("torch.")
    if named == "auto":
        info = open_directory(directory).infos.get("model.norm.weight")
        if info is None:
            raise ValueError(f"{directory} has no tensor 'model.norm.weight'")
        named = info.dtype
    if named not in _DTYPES:
        raise ValueError(
            f"{config.where}: dtype {named!r} is not supported; pass dtype='float32' or 'bfloat16'"
        )
    if named == "float16":
        logger.info("%s: float16 weights are loaded as bfloat16", directory)
    return _DTYPES[named]


def _eos_token_ids(config: Fields, directory: Path) -> tuple[int, ...]:
    """End tokens of generation_config.json, config.json and the tokenizer, in that order."""
    generation = Fields.read_if_there(directory / "generation_config.json")
    ids = [*generation.ids("eos_token_id"), *config.ids("eos_token_id")]
    return unique_ids([*ids, find_eos_token_id(directory)])

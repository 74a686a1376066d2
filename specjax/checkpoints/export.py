"""Write drafts, targets in FP8, and configurations of targets in published formats."""

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save

from specjax.checkpoints.block import block_config
from specjax.checkpoints.huggingface import draft_config
from specjax.checkpoints.target import open_target
from specjax.checkpoints.tensors import SAFETENSORS_INDEX, TensorInfo, TensorSource
from specjax.checks import check_integer, check_regular
from specjax.config import BlockConfig, DraftConfig, ModelConfig, Quantization, TransformerConfig
from specjax.models.block import BlockDraft
from specjax.models.declare import Recipes
from specjax.models.eagle import MtpHead, build_head
from specjax.models.flat import recipes_of

# published name of a setting -> our name
_PUBLISHED = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "attention_bias": "qkv_bias",
    "mlp_bias": "mlp_bias",
    "tie_word_embeddings": "ties_lm_head",
    "torch_dtype": "dtype",
    "fc_norm": "has_fc_norm",
    "num_hidden_layers": "num_layers",
} | {
    name: name
    for name in (
        *("hidden_size", "target_hidden_size", "intermediate_size", "head_dim", "vocab_size"),
        *("draft_vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling", "norm_output"),
        *("max_position_embeddings", "norm_before_residual", "norm_before_fc", "mask_token_id"),
    )
}
# settings of mixtures of experts, recurrent and full layers, which have their published names
_SAME = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("shared_expert_intermediate_size", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"),
)
# routers of experts, and rates of recurrent layers: they stay whole
_WHOLE = (
    r"re:.*\.(mlp|block_sparse_moe)\.(gate|shared_expert_gate|router\.layer)$",
    r"re:.*\.linear_attn\.in_proj_[ab]$",
)


def export_draft(
    path: str | os.PathLike[str],
    config: DraftConfig | BlockConfig,
    weights: Mapping[str, Any],
    *,
    max_shard_bytes: int = 4 * 1024**3,
) -> None:
    """Write a draft as ``config.json`` and safetensors.

    An EAGLE-3 head is written as SGLang and SpecForge expect it. A block drafter is written for
    speculators, as ``dspark`` if it has a Markov head, else as ``dflash``.

    Args:
        path: directory to create; existing weights and configuration in it are replaced.
        weights: arrays by name, as :meth:`DraftCheckpoint.load_weights` returns them. A block
            drafter's ``context.*`` weights repeat other weights and may be left out.
        max_shard_bytes: maximum size of a file; a larger tensor gets its own file.

    Raises:
        ValueError: if files would be read back as another draft, or weights do not fit.
    """
    check_integer("max_shard_bytes", max_shard_bytes, 1)
    recipes, repeats, text = _published_draft(Path(path), config)
    weights = {name: weights[name] for name in weights if name not in repeats}
    tensors = published_tensors(config, recipes, weights)
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    for stale in (*directory.glob("model*.safetensors"), directory / SAFETENSORS_INDEX):
        stale.unlink(missing_ok=True)
    (directory / "config.json").write_text(text, encoding="utf-8")
    _write_shards(directory, tensors, max_shard_bytes)


def export_fp8(
    path: str | os.PathLike[str],
    model: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 4 * 1024**3,
) -> None:
    """Write a target with FP8 matrices, in the format of compressed-tensors.

    Values and scales are those of an engine with ``quantization="fp8"``, which loads the files in
    half of the time. Rows of activations have dynamic scales in other engines. The output head
    stays whole, as in published files. All weights must fit into the host's memory.

    Args:
        path: new or empty directory.
        model: Hugging Face directory or repository id of whole weights.
        max_shard_bytes: maximum size of a file; a larger tensor gets its own file.

    Raises:
        ValueError: if ``path`` has files, or if the model is not such a directory or incomplete.
    """
    check_integer("max_shard_bytes", max_shard_bytes, 1)
    target, directory = open_target(model), Path(path)
    described = target.path / "config.json"
    body = json.loads(described.read_text("utf-8")) if described.is_file() else {}
    if target.config.quantization is not None or not body or "text_config" in body:
        raise ValueError(
            f"model={os.fspath(model)!r} must be a directory with the whole weights of a text model"
        )
    if any(part.made_of for recipe in target.recipes.values() for part in recipe.parts):
        raise ValueError(f"model={os.fspath(model)!r} has experts of its own layout; keep MXFP4")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"path={os.fspath(path)!r} must be a new or an empty directory")
    target.check_weights()
    patterns = ("*.json", "*.jinja", "*.model", "*.txt")
    copied = [file for pattern in patterns for file in target.path.glob(pattern)]
    for file in copied:
        check_regular(file)
    format = Quantization("fp8", plain=("lm_head",))
    config = dataclasses.replace(target.config, quantization=format)
    source = dataclasses.replace(target, config=config).source()
    tensors = {name: np.ascontiguousarray(source.read(name)) for name in source.infos}
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": float8 | {"strategy": "channel", "dynamic": False},
        "input_activations": float8 | {"strategy": "token", "dynamic": True},
    }
    body["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", *(f"re:{re.escape(x)}.*" for x in target.modules), *_WHOLE],
    }
    directory.mkdir(parents=True, exist_ok=True)
    for file in copied:
        if not file.name.endswith(".index.json"):
            shutil.copyfile(file, directory / file.name)
    (directory / "config.json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    _write_shards(directory, tensors, max_shard_bytes)


def write_zeros(directory: Path, config: DraftConfig | BlockConfig | ModelConfig) -> None:
    """Write a draft whose weights are all zero, in a sparse file that takes no space on disk.

    With the configuration of a target's module, it is a target of which only the module is there.
    """
    if isinstance(config, ModelConfig):
        target = dataclasses.replace(config, num_layers=config.first_layer)
        recipes, text = recipes_of(MtpHead, config), json.dumps(published_target(target))
    else:
        recipes, _, text = _published_draft(directory, config)
    header, end = {}, 0
    for tensor in (x for recipe in recipes.values() for x in recipe.parts):
        start, end = end, end + 2 * math.prod(tensor.shape)
        kind = "I16" if tensor.name == "d2t" else "BF16"
        header[tensor.name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": (start, end)}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    (directory / "config.json").write_text(text, encoding="utf-8")
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        file.truncate(file.tell() + end)


def _published_draft(
    path: Path, config: DraftConfig | BlockConfig
) -> tuple[Recipes, set[str], str]:
    """Return recipes of the tensors to write, weights that repeat them, and ``config.json``."""
    network, publish, _ = _FORMATS[type(config)]
    recipes, text = recipes_of(network, config), json.dumps(publish(config), indent=2) + "\n"
    repeats = {name for name in recipes if name.startswith("context.")}  # of a block drafter
    recipes = {name: recipes[name] for name in recipes if name not in repeats}
    _check_read_back(path, config, text, recipes)
    return recipes, repeats, text


def _check_read_back(
    output: Path, config: DraftConfig | BlockConfig, text: str, recipes: Recipes
) -> None:
    """Raise ValueError if ``config.json`` with this text would be read as another configuration."""
    layers = {"num_layers": max([1, *(layer + 1 for layer in config.feature_layers)])}
    sizes = {"hidden_size": config.target_hidden_size, "max_position_embeddings": 1} | layers
    target: Any = SimpleNamespace(**vars(config) | sizes)
    pair: Any = SimpleNamespace(config=target)
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(text, encoding="utf-8")
        stored = [tensor for recipe in recipes.values() for tensor in recipe.parts]
        infos = {tensor.name: TensorInfo(tensor.shape, path, config.dtype) for tensor in stored}
        source = TensorSource(path, infos, lambda name: np.empty(infos[name].shape))
        try:
            read_back: Any = _FORMATS[type(config)][2](path, source, pair)
        except ValueError as error:
            error.args = (str(error).replace(folder, str(output)),)
            raise
    for name, value in vars(config).items():
        if name != "checkpoint_format" and (other := getattr(read_back, name)) != value:
            raise ValueError(f"cannot export {name}={value!r}: it would be read back as {other!r}")


def published_target(config: ModelConfig) -> dict[str, Any]:
    """Return the ``config.json`` of a target whose family has no settings of its own."""
    values = dataclasses.asdict(config)
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    return {
        **{name: values[ours] for name, ours in _PUBLISHED.items() if ours in values},
        **{name: values[name] for name in _SAME if name in values},
        **(packed if values.get("has_packed_experts") else {}),
        "model_type": config.model_type,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
    }


def _published_head(config: DraftConfig) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    body = {
        "model_type": "llama",
        "hidden_act": config.activation,
        **{name: values[ours] for name, ours in _PUBLISHED.items()},
    }
    if not config.fuses_features:
        return {"architectures": ["LlamaForCausalLMEagle"], **body, "bias": config.fc_bias}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **body,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
            "use_aux_hidden_state": True,
        },
    }


def _published_block(config: BlockConfig) -> dict[str, Any]:
    slides, window = [window > 0 for window in config.windows], max(config.windows)
    by_default = {  # causality of each layer -> the keys that express it
        tuple(slides): {"sliding_window_non_causal": False},
        (False,) * config.num_layers: {"sliding_window_non_causal": True},
        (True,) * config.num_layers: {"is_causal": True},
    }
    values = dataclasses.asdict(config)
    body = {field.name for field in dataclasses.fields(TransformerConfig)}
    body |= {"qkv_bias", "mlp_bias"}
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    algorithm = "dspark" if config.markov_head else "dflash"
    method = {"proposal_type": "greedy", "speculative_tokens": config.num_drafts}
    return {
        "architectures": [{"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator"}[algorithm]],
        "speculators_model_type": algorithm,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_act": config.activation,
            **{name: values[ours] for name, ours in _PUBLISHED.items() if ours in body},
            "layer_types": kinds,
            "sliding_window": window or None,
        },
        "torch_dtype": config.dtype,
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block if not config.anchor_first else config.num_drafts,
        "sample_from_anchor": config.anchor_first,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.feature_layers],
        **by_default.get(config.causal, {}),
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.has_confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


# kind of draft -> its network, what writes config.json, and what reads that for a target
_FORMATS: dict[type, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    DraftConfig: (
        build_head,
        _published_head,
        lambda *of: draft_config(of[0], of[1], of[2].config),
    ),
    BlockConfig: (BlockDraft, _published_block, block_config),
}


def published_tensors(
    config: TransformerConfig, recipes: Recipes, weights: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Convert weights to tensors by published name, and add both vocabulary maps of a draft."""
    missing, unknown = sorted(set(recipes) - set(weights)), sorted(set(weights) - set(recipes))
    if missing or unknown:
        raise ValueError(f"weights do not fit the head: missing {missing}, unknown {unknown}")
    tensors = {}
    for name, recipe in recipes.items():
        array = np.asarray(weights[name])
        if array.shape != recipe.shape:
            raise ValueError(
                f"weight {name!r} has shape {array.shape}, but the head needs {recipe.shape}"
            )
        ends = np.cumsum([tensor.shape[0] for tensor in recipe.parts])
        stripes = np.split(array.T if recipe.transpose else array, ends[:-1])
        for tensor, stripe in zip(recipe.parts, stripes, strict=True):
            if tensor.rows is not None:
                stripe = stripe[np.argsort(tensor.rows)]
            # safetensors writes the buffer in its memory order
            tensors[tensor.name] = np.ascontiguousarray(stripe)
    if "d2t" in tensors:
        offsets = tensors["d2t"] = tensors["d2t"].astype(np.int64)
        chosen = np.zeros(config.vocab_size, bool)
        chosen[offsets + np.arange(len(offsets))] = True
        tensors["t2d"] = chosen
    return tensors


def _write_shards(directory: Path, tensors: dict[str, np.ndarray], max_shard_bytes: int) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda array: array.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        # save_file would create files that only their owner can read
        shard = save({name: tensors[name] for name in names}, {"format": "pt"})
        (directory / file).write_bytes(shard)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2) + "\n"
        (directory / SAFETENSORS_INDEX).write_text(text, encoding="utf-8")

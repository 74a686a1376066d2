"""Writing EAGLE-3 heads in the published format, which other engines read too."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from specjax.checkpoints.draft_names import draft_recipes
from specjax.checkpoints.tensors import SAFETENSORS_INDEX
from specjax.config import DraftConfig


def export_draft(
    path: str | os.PathLike[str],
    config: DraftConfig,
    weights: Mapping[str, Any],
    *,
    max_shard_bytes: int = 4 * 1024**3,
) -> None:
    """Write a head as ``config.json`` and safetensors, in SGLang's and SpecForge's names.

    Args:
        path: directory to create; weights and configuration already there are replaced.
        config: of an EAGLE-3 head.
        weights: arrays by flat name, as :meth:`DraftCheckpoint.load_weights` gives them.
        max_shard_bytes: tensors are spread over files of at most this size; a larger tensor gets a
            file of its own.

    Raises:
        ValueError: if the head is not EAGLE-3 or the weights do not fit the configuration.
    """
    if config.algorithm != "EAGLE3":
        raise ValueError(f"algorithm={config.algorithm!r}: only EAGLE3 heads can be exported")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be positive")
    tensors = _published_tensors(config, weights)
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    for stale in (*directory.glob("model*.safetensors"), directory / SAFETENSORS_INDEX):
        stale.unlink(missing_ok=True)
    body = json.dumps(published_config(config), indent=2) + "\n"
    (directory / "config.json").write_text(body, encoding="utf-8")
    _write_shards(directory, tensors, max_shard_bytes)


def published_config(config: DraftConfig) -> dict[str, Any]:
    """``config.json`` of a published EAGLE-3 head."""
    scaling = config.rope_scaling
    body: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.qkv_bias,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.ties_lm_head,
        "torch_dtype": config.dtype,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.has_fc_norm,
        "norm_output": config.norm_output,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
            "use_aux_hidden_state": True,
        },
    }
    if scaling is not None:
        body["rope_scaling"] = dataclasses.asdict(scaling)
    return body


def _published_tensors(config: DraftConfig, weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Weights split and transposed into their published names, with both vocabulary maps."""
    recipes = draft_recipes(config)
    if set(recipes) != set(weights):
        missing, unknown = sorted(set(recipes) - set(weights)), sorted(set(weights) - set(recipes))
        raise ValueError(f"weights do not fit the head: missing {missing}, unknown {unknown}")
    tensors = {}
    for name, recipe in recipes.items():
        array = np.asarray(weights[name])
        rows = array.T if recipe.transpose else array
        expected = (sum(part.shape[0] for part in recipe.parts), *recipe.parts[0].shape[1:])
        if rows.shape != expected:
            raise ValueError(f"weight {name!r} has shape {array.shape}, its parts are {expected}")
        start = 0
        for part in recipe.parts:
            # safetensors writes the buffer as it lies in memory
            tensors[part.name] = np.ascontiguousarray(rows[start : start + part.shape[0]])
            start += part.shape[0]
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].astype(np.int64)
        chosen = np.zeros(config.vocab_size, bool)
        chosen[tensors["d2t"] + np.arange(config.draft_vocab_size)] = True
        tensors["t2d"] = chosen
    return tensors


def _write_shards(directory: Path, tensors: Mapping[str, np.ndarray], max_shard_bytes: int) -> None:
    shards: list[dict[str, np.ndarray]] = [{}]
    used = 0
    for name, array in tensors.items():
        if shards[-1] and used + array.nbytes > max_shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = array
        used += array.nbytes
    metadata = {"format": "pt"}
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2) + "\n"
    (directory / SAFETENSORS_INDEX).write_text(text, encoding="utf-8")

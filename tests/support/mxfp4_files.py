"""Files of gpt-oss with experts in MXFP4."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from .checkpoint_files import Tensors, write_gguf

KIND = gguf.GGMLQuantizationType.MXFP4


def to_mxfp4(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks u8 ``[..., K / 32, 16]`` and scales u8 as published, and the values that they have."""
    stored = gguf.quants.quantize(np.ascontiguousarray(matrix, np.float32), KIND)
    values = gguf.quants.dequantize(stored, KIND)
    by_block = stored.reshape(*matrix.shape[:-1], -1, 17)
    low, high = by_block[..., 1:] & 15, by_block[..., 1:] >> 4
    codes = np.concatenate([low, high], axis=-1)
    scales = np.ascontiguousarray(by_block[..., 0])  # safetensors writes memory as it is
    return codes[..., ::2] | codes[..., 1::2] << 4, scales, values


def packed(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Tensors of a bfloat16 directory with experts in MXFP4, and those that have their values."""
    stored, whole = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, values = to_mxfp4(tensor.swapaxes(1, 2))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            whole[name] = np.ascontiguousarray(values.swapaxes(1, 2))
        else:
            stored[name] = whole[name] = tensor
    return stored, whole


def write_packed_gguf(path: Path, tensors: Tensors, config: Any, **keys: Any) -> Path:
    """Write tensors of a bfloat16 directory as llama.cpp's converter does, with MXFP4 experts.

    ``config`` is transformers' configuration; ``keys`` replace metadata.
    """
    named = {}
    for name, tensor in tensors.items():
        at, _, ending = name.replace(".mlp.router.", ".mlp.gate.").partition("experts.")
        if not ending:
            named[at + ".weight" * at.endswith("sinks")] = tensor
            continue
        kind = "bias" if ending.endswith("_bias") else "weight"
        rows = tensor if kind == "bias" else tensor.swapaxes(1, 2)
        modules = ("gate", "up") if ending.startswith("gate_up") else ("down",)
        for i, module in enumerate(modules):
            values = np.ascontiguousarray(rows[:, i :: len(modules)])
            stored = values if kind == "bias" else gguf.quants.quantize(values, KIND)
            named[f"{at}experts.{module}_proj.{kind}"] = stored
    rope = config.rope_parameters
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "expert_feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    return write_gguf(path, named, arch="gpt-oss", keys=metadata | keys)

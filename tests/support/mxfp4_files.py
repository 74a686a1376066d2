"""Files of gpt-oss with experts in MXFP4."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specjax.checkpoints import export_draft
from specjax.testing import letter_tokenizer
from specjax.testing.files import CONFIG, HEAD, write_folder
from specjax.testing.models import PERTURBATION, copying_head, copying_target

from .checkpoint_files import Tensors, write_gguf
from .model_files import read_folder

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


SIZE, INNER, NUM_EXPERTS = 64, 64, 6


def write_gpt_oss(path: Path, target: Path, *, is_packed: bool = True) -> Path:
    """Write the copying target with zeros as further dimensions, and experts, packed or whole."""
    config, tensors = read_folder(target)
    config |= {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    config |= {"hidden_size": SIZE, "intermediate_size": INNER, "sliding_window": 12}
    config |= {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "attention_bias": True}
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "truncate": False}
    config["rope_scaling"]["original_max_position_embeddings"] = 32
    rng, size = np.random.default_rng(3), CONFIG.hidden_size

    def random(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    named = {}
    for name, tensor in tensors.items():
        widths = [(0, (SIZE - size) * (length == size)) for length in tensor.shape]
        if "norm" in name:  # the mean of squares becomes smaller
            named[name] = np.pad(tensor * np.float32((size / SIZE) ** 0.5), widths)
        elif ".mlp." not in name:
            if "_proj" in name:
                widths["o_proj" not in name] = (0, SIZE - size)
                widths["o_proj" in name] = (0, 0)
            named[name] = np.pad(tensor, widths)
    for i in range(CONFIG.num_layers):
        at = f"model.layers.{i}.self_attn."
        for x in "qkvo":
            count = len(named[f"{at}{x}_proj.weight"])
            named[f"{at}{x}_proj.bias"] = random(count, scale=0.1 * PERTURBATION)
        named[f"{at}sinks"] = random(CONFIG.num_heads)
        at = f"model.layers.{i}.mlp."
        named |= {
            f"{at}router.weight": random(NUM_EXPERTS, SIZE, scale=0.5),
            f"{at}router.bias": random(NUM_EXPERTS),
            f"{at}experts.gate_up_proj": random(NUM_EXPERTS, SIZE, 2 * INNER, scale=0.2),
            f"{at}experts.gate_up_proj_bias": random(NUM_EXPERTS, 2 * INNER),
            f"{at}experts.down_proj": random(NUM_EXPERTS, INNER, SIZE, scale=0.2 * PERTURBATION),
            f"{at}experts.down_proj_bias": random(NUM_EXPERTS, SIZE, scale=0.2 * PERTURBATION),
        }
    stored, whole = packed(named)
    if is_packed:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    return write_folder(path, config, stored if is_packed else whole, letter_tokenizer())


def write_wide_head(path: Path, **changes: Any) -> Path:
    """Write the EAGLE-3 head for :func:`write_gpt_oss`, with embeddings of its own."""
    changes |= {"target_hidden_size": SIZE, "has_own_embedding": True}
    head, target = replace(HEAD, **changes), copying_target(CONFIG, HEAD)
    named = copying_head(head, target)
    export_draft(path, head, named | {"embedding.table": target["embedding.table"]})
    return path

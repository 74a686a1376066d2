"""Files of mixtures of experts that are the target of ``specjax.testing`` with experts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.testing import letter_tokenizer
from specjax.testing.files import CONFIG, write_folder
from specjax.testing.models import PERTURBATION

from .model_files import read_folder

NUM_EXPERTS, INNER = 6, 48


EXPERTS: dict[str, Any] = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
EXPERTS |= {"norm_topk_prob": True, "moe_intermediate_size": INNER, "mlp_only_layers": []}


def with_experts(tensors: dict[str, np.ndarray], layers: Sequence[str]) -> dict[str, np.ndarray]:
    """Replace the feed-forwards of layers, of which the router chooses others for each token."""
    tensors = {name: x for name, x in tensors.items() if ".mlp." not in name}
    rng, size = np.random.default_rng(3), CONFIG.hidden_size

    def random(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)

    for layer in layers:
        tensors[f"{layer}mlp.gate.weight"] = random(NUM_EXPERTS, size, scale=3.0)
        for j in range(NUM_EXPERTS):
            expert = f"{layer}mlp.experts.{j}."
            down = random(size, INNER, scale=2 * PERTURBATION)
            tensors |= {f"{expert}{x}_proj.weight": random(INNER, size) for x in ("gate", "up")}
            tensors[f"{expert}down_proj.weight"] = down
    return tensors


def write_mixture(path: Path, target: Path) -> Path:
    """Write the copying target with experts in all layers."""
    config, tensors = read_folder(target)
    config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]} | EXPERTS
    layers = [f"model.layers.{i}." for i in range(CONFIG.num_layers)]
    tensors = with_experts(tensors, layers)
    for layer in layers:
        for name in ("q_norm", "k_norm"):
            tensors[f"{layer}self_attn.{name}.weight"] = np.ones(CONFIG.head_dim, np.float32)
    return write_folder(path, config, tensors, letter_tokenizer())


def write_hybrid_mixture(path: Path, hybrid: Path) -> Path:
    """Write a Qwen3.5 with experts in all layers, also in the one that drafts."""
    config, tensors = read_folder(hybrid)
    config |= {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
    config |= EXPERTS | {"shared_expert_intermediate_size": 0}
    layers = [f"model.layers.{i}." for i in range(CONFIG.num_layers)]
    tensors = with_experts(tensors, [*layers, "mtp.layers.0."])
    return write_folder(path, config, tensors, letter_tokenizer())


def write_glm(path: Path, mixture: Path) -> Path:
    """Write a mixture as a GLM-4.5 with a module, which applies layer 0 to the last token."""
    config, tensors = read_folder(mixture)
    del config["num_experts"], config["mlp_only_layers"]
    config |= {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}
    config |= {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "use_qk_norm": True}
    config |= {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0}
    config |= {"num_nextn_predict_layers": 1}
    rng, size, count = np.random.default_rng(4), CONFIG.hidden_size, CONFIG.num_layers
    for i in range(count):
        mlp = f"model.layers.{i}.mlp."
        bias = 0.3 * rng.normal(size=NUM_EXPERTS)
        tensors[f"{mlp}gate.e_score_correction_bias"] = bias.astype(np.float32)
        for name in ("gate_proj", "up_proj", "down_proj"):
            expert = tensors[f"{mlp}experts.0.{name}.weight"]
            tensors[f"{mlp}shared_experts.{name}.weight"] = rng.permuted(expert)
    first, module = "model.layers.0.", f"model.layers.{count}."
    copied = {name: x for name, x in tensors.items() if name.startswith(first)}
    tensors |= {name.replace(first, module): x for name, x in copied.items()}
    ones = np.ones(size, np.float32)
    tensors |= {f"{module}{name}.weight": ones for name in ("enorm", "hnorm")}
    tensors[f"{module}eh_proj.weight"] = np.eye(size, 2 * size, dtype=np.float32)
    tensors[f"{module}shared_head.norm.weight"] = tensors["model.norm.weight"]
    tensors[f"{module}shared_head.head.weight"] = tensors["lm_head.weight"]
    tensors[f"{module}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    return write_folder(path, config, tensors, letter_tokenizer())

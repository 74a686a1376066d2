"""Files of random models, and of drafts of every kind for the target of ``specjax.testing``."""

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from specjax.checkpoints import export_draft, open_target
from specjax.checkpoints.export import published_target, published_tensors
from specjax.config import BlockConfig, ModelConfig
from specjax.models.block import BlockDraft
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.models.lfm2 import NAMES as LFM2_NAMES
from specjax.testing import letter_tokenizer, random_weights
from specjax.testing.files import CONFIG, HEAD, write_folder
from specjax.testing.models import PERTURBATION, copying_target
from specjax.text.tokenizer import Tokenizer

BLOCK = BlockConfig(
    checkpoint_format="DSpark of speculators",
    vocab_size=CONFIG.vocab_size,
    hidden_size=CONFIG.hidden_size,
    intermediate_size=CONFIG.intermediate_size,
    num_layers=2,
    num_heads=CONFIG.num_heads,
    num_kv_heads=CONFIG.num_kv_heads,
    head_dim=CONFIG.head_dim,
    target_hidden_size=CONFIG.hidden_size,
    draft_vocab_size=CONFIG.vocab_size,
    feature_layers=(-1, 1),
    num_drafts=5,
    anchor_first=True,
    mask_token_id=CONFIG.vocab_size - 1,
    markov_head="vanilla",
    markov_rank=CONFIG.num_kv_heads * CONFIG.head_dim,
    max_position_embeddings=128,
)


def write_model(
    path: Path,
    config: ModelConfig,
    *,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> Path:
    """Write a target with random weights; ``settings`` are added to its ``config.json``."""
    flat = FlatModel.of(partial(CausalLM, config))
    weights = dict(zip(flat.names, random_weights(flat, seed), strict=True))
    tensors = published_tensors(config, flat.recipes, weights)
    return write_folder(path, published_target(config) | settings, tensors, tokenizer)


def chaining_block(config: BlockConfig, target: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Make the weights of a block drafter for the copying target, by name.

    With a Markov head of rank KV * H or more, the head is the target without its layers. The rest
    perturbs it, and drafts are often right. Without one, only the first mask row is often right,
    because its first layer copies the embedding of the row before it.
    """
    flat = FlatModel.of(partial(BlockDraft, config))
    named = dict(zip(flat.names, map(np.array, random_weights(flat, 2)), strict=True))
    table, heads = target["embedding.table"], target["lm_head.kernel"]
    dim, width = config.head_dim, config.num_kv_heads * config.head_dim
    if config.draft_vocab_size != config.vocab_size:
        ids = np.arange(0, config.vocab_size, 2)[: config.draft_vocab_size]
        rest = np.setdiff1d(np.arange(config.vocab_size), ids)
        ids = np.sort(np.concatenate([ids, rest])[: config.draft_vocab_size])
        named["d2t"] = (ids - np.arange(len(ids))).astype(np.int32)
        named["lm_head.kernel"] = heads = heads[:, ids]
    if config.markov_head:
        normed = table / np.sqrt(np.mean(table**2, axis=1, keepdims=True))
        named["markov.embedding.table"] = np.zeros((len(table), config.markov_rank), np.float32)
        named["markov.embedding.table"][:, :width] = normed[:, :width]
        named["markov.output.kernel"][:width] = heads[:width]
        named["norm.scale"] *= np.float32(0.1)
        return named
    named["fc.kernel"][:, 0] = 0.0  # only the constant coordinate makes keys: the context has none
    q_size = config.num_heads * dim
    qkv = np.zeros((config.hidden_size, q_size + 2 * width), np.float32)
    # the score is highest for the row before: rotate queries back by one radian
    qkv[0, 0:q_size:dim], qkv[0, dim // 2 : q_size : dim] = np.cos(1.0), -np.sin(1.0)
    qkv[0, q_size : q_size + width : dim] = 1.0
    qkv[:width, q_size + width :] = np.eye(width)
    output = np.zeros((q_size, config.hidden_size), np.float32)
    group = config.num_heads // config.num_kv_heads
    for i in range(width):  # larger than the residual
        output[i // dim * group * dim + i % dim, i] = 1e3
    named |= {"layers.0.attention.qkv.kernel": qkv, "layers.0.attention.output.kernel": output}
    named["layers.0.attention.q_norm.scale"] *= np.float32(1e4)
    kv = named["context.kernel"].reshape(config.hidden_size, 2, config.num_layers, width)
    kv[:, 0, 0], kv[:, 1, 0] = np.split(qkv[:, q_size:], 2, axis=1)
    for i in range(config.num_layers):
        named[f"layers.{i}.mlp.down.kernel"] *= np.float32(1e-3)
    return named


def write_block_draft(path: Path, **changes: Any) -> Path:
    """Write ``BLOCK`` with ``changes``; ``markov_head=None`` makes it a DFLASH drafter."""
    if changes.get("markov_head", BLOCK.markov_head) is None:
        changes = {"markov_rank": 0, "anchor_first": False} | changes
    config = dataclasses.replace(BLOCK, **changes)
    export_draft(path, config, chaining_block(config, copying_target(CONFIG, HEAD)))
    return path


def write_eagle_head(path: Path, target: Path) -> Path:
    """Write an EAGLE-1 head that applies the target's first layer to the last token."""
    config, tensors = read_folder(target)
    size, name = CONFIG.hidden_size, "layers.0."
    head = {
        key.removeprefix("model."): value
        for key, value in tensors.items()
        if key.startswith(f"model.{name}") and "input_layernorm" not in key
    }
    # scale embeddings to the norm of states after the target's final norm
    head["fc.weight"] = np.eye(size, 2 * size, dtype=np.float32) * np.float32(size / 10) ** 0.5
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "bias": False}
    return write_folder(path, config, head, letter_tokenizer())


def write_draft_model(path: Path, target: Path) -> Path:
    """Write the target without its last layer."""
    config, tensors = read_folder(target)
    count = CONFIG.num_layers - 1
    kept = {name: x for name, x in tensors.items() if f"model.layers.{count}." not in name}
    return write_folder(path, config | {"num_hidden_layers": count}, kept, letter_tokenizer())


def write_modules(path: Path, target: Path, count: int) -> Path:
    """Write MTP modules, which apply the target's layers to the last token's embedding."""
    config, tensors = read_folder(target)
    size, ones = CONFIG.hidden_size, np.ones(CONFIG.hidden_size, np.float32)
    modules = {name: x for name, x in tensors.items() if ".layers." not in name}
    for i in range(count):
        name, layer = f"model.mtp_layers.{i}.", f"model.layers.{i % CONFIG.num_layers}."
        modules |= {key.replace(layer, name): x for key, x in tensors.items() if layer in key}
        modules |= {f"{name}{kind}_layernorm.weight": ones for kind in ("token", "hidden")}
        modules[f"{name}final_layernorm.weight"] = tensors["model.norm.weight"]
        modules[f"{name}input_proj.weight"] = np.eye(size, 2 * size, size, dtype=np.float32)
    changes = {"num_hidden_layers": 1, "num_nextn_predict_layers": count}
    return write_folder(path, config | changes, modules, letter_tokenizer())


def read_folder(target: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read the configuration and the tensors of a directory."""
    config = json.loads((target / "config.json").read_text())
    return config, load_file(target / "model.safetensors")


MIXTURE: dict[str, Any] = published_target(CONFIG) | {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
}


def write_mixture(path: Path) -> dict[str, np.ndarray]:
    """Write a mixture of experts with random weights, and return its tensors."""
    rng, recipes = np.random.default_rng(0), open_target(write_folder(path, MIXTURE, {})).recipes
    parts = [part for recipe in recipes.values() for part in recipe.parts]
    tensors = {part.name: rng.normal(size=part.shape).astype(np.float32) for part in parts}
    write_folder(path, MIXTURE, tensors)
    return tensors


DELTA_HEADS = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 16}


def write_hybrid(path: Path, target: Path) -> Path:
    """Write the copying target with a recurrent layer, gates, and a layer that drafts.

    Half of the heads keep a state for hundreds of tokens. The draft layer normalises the last
    token's embedding, and adds the target's attention to it.
    """
    config, tensors = read_folder(target)
    config |= {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    config |= {f"linear_{name}": value for name, value in DELTA_HEADS.items()}
    config |= {"layer_types": ["linear_attention", "full_attention"]}
    config |= {"partial_rotary_factor": 0.5}
    rng, size, dim = np.random.default_rng(3), CONFIG.hidden_size, CONFIG.head_dim

    def random(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)

    # norms add 1 to the stored scale
    named = {x: y - 1 if "norm" in x else y for x, y in tensors.items()}
    named = {x: y for x, y in named.items() if not x.startswith("model.layers.0.self_attn.")}
    at, channels, values = "model.layers.0.linear_attn.", 2 * 2 * 16 + 4 * 16, 4 * 16
    named |= {
        f"{at}in_proj_qkv.weight": random(channels, size),
        f"{at}in_proj_z.weight": random(values, size),
        f"{at}in_proj_a.weight": random(4, size),
        f"{at}in_proj_b.weight": random(4, size),
        f"{at}conv1d.weight": random(channels, 1, 4),
        f"{at}A_log": random(4),
        f"{at}dt_bias": np.array([-6, -5, -1, 1], np.float32),
        f"{at}norm.weight": np.ones(16, np.float32),
        f"{at}out_proj.weight": random(size, values, scale=8 * PERTURBATION),
    }
    at = "model.layers.1.self_attn."
    queries = tensors[f"{at}q_proj.weight"].reshape(-1, dim, size)
    both = np.concatenate([queries, random(*queries.shape, scale=3.0)], axis=1)
    named[f"{at}q_proj.weight"] = both.reshape(-1, size)
    named |= {f"{at}{x}_norm.weight": np.zeros(dim, np.float32) for x in "qk"}
    module = {x: y for x, y in named.items() if x.startswith("model.layers.1.")}
    named |= {x.replace("model.layers.1.", "mtp.layers.0."): y for x, y in module.items()}
    named["mtp.fc.weight"] = np.eye(size, 2 * size, dtype=np.float32)
    norms = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
    named |= {f"mtp.{name}.weight": np.zeros(size, np.float32) for name in norms}
    return write_folder(path, config, named, letter_tokenizer())


def write_lfm2(path: Path, target: Path) -> Path:
    """Write the copying target with a short convolution in place of its first attention."""
    config, tensors = read_folder(target)
    config |= {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"]}
    config |= {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    conv, size, rng = "model.layers.0.conv.", CONFIG.hidden_size, np.random.default_rng(3)
    shapes = {"in_proj": (3 * size, size), "conv": (size, 1, 3), "out_proj": (size, size)}
    named = {x: y for x, y in tensors.items() if "layers.0.self_attn." not in x}
    for name, shape in shapes.items():
        values = rng.normal(size=shape) * shape[-1] ** -0.5
        named[f"{conv}{name}.weight"] = values.astype(np.float32)
    named[f"{conv}out_proj.weight"] *= np.float32(8 * PERTURBATION)
    for norm in ("q_norm", "k_norm"):
        named[f"model.layers.1.self_attn.{norm}.weight"] = np.ones(CONFIG.head_dim, np.float32)

    def renamed(name: str) -> str:
        return ".".join(LFM2_NAMES.get(word, word) for word in name.split("."))

    named = {renamed(name): tensor for name, tensor in named.items()}
    return write_folder(path, config, named, letter_tokenizer())

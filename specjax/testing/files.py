"""A tiny model and its EAGLE-3 head on disk, with a tokenizer of single characters."""

import dataclasses
import json
import string
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from specjax.checkpoints import export_draft
from specjax.checkpoints.export import published_target, published_tensors
from specjax.config import BlockConfig, ModelConfig
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.testing.models import (
    EAGLE3,
    TARGET,
    chaining_block,
    copying_head,
    copying_target,
    random_weights,
)
from specjax.text.tokenizer import Tokenizer

LETTERS = string.ascii_letters + string.digits + string.punctuation
EOS = "</s>"
EOS_ID = len(LETTERS) + 1
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
# two more ids than the tokenizer has, as in padded vocabularies
CONFIG = dataclasses.replace(
    TARGET,
    vocab_size=EOS_ID + 3,
    num_layers=2,
    max_position_embeddings=128,
    eos_token_ids=(EOS_ID,),
)
HEAD = dataclasses.replace(
    EAGLE3,
    vocab_size=CONFIG.vocab_size,
    draft_vocab_size=80,
    feature_layers=(0, 0, 1),
    max_position_embeddings=128,
)
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


def letter_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per character of printable ASCII, and an end token."""
    vocabulary = {letter: i for i, letter in enumerate([*LETTERS, "Ġ", EOS])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return Tokenizer(backend, special_tokens={"eos_token": EOS}, chat_template=TEMPLATE)


def write_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Write a tokenizer into a Hugging Face directory."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer.special_tokens))
    if tokenizer.chat_template is not None:
        (path / "chat_template.jinja").write_text(tokenizer.chat_template)


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
    _save(path, published_target(config) | settings, tensors)
    if tokenizer is not None:
        write_tokenizer(path, tokenizer)
    return path


def write_target(path: Path) -> Path:
    """Write the copying target as a Hugging Face directory, without the package's name maps."""
    named = copying_target(CONFIG, HEAD)
    dim = CONFIG.head_dim
    q_size, kv_size = CONFIG.num_heads * dim, CONFIG.num_kv_heads * dim
    tensors = {
        "model.embed_tokens.weight": named["embedding.table"],
        "model.norm.weight": named["norm.scale"],
        "lm_head.weight": named["lm_head.kernel"].T,
    }
    for i in range(CONFIG.num_layers):
        flat, name = f"layers.{i}.", f"model.layers.{i}."
        q, k, v = np.split(named[flat + "attention.qkv.kernel"].T, [q_size, q_size + kv_size])
        gate, up = np.split(named[flat + "mlp.gate_up.kernel"].T, 2)
        tensors |= {
            name + "self_attn.q_proj.weight": q,
            name + "self_attn.k_proj.weight": k,
            name + "self_attn.v_proj.weight": v,
            name + "self_attn.o_proj.weight": named[flat + "attention.output.kernel"].T,
            name + "mlp.gate_proj.weight": gate,
            name + "mlp.up_proj.weight": up,
            name + "mlp.down_proj.weight": named[flat + "mlp.down.kernel"].T,
            name + "input_layernorm.weight": named[flat + "input_norm.scale"],
            name + "post_attention_layernorm.weight": named[flat + "post_attention_norm.scale"],
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_theta": CONFIG.rope_theta,
        "max_position_embeddings": CONFIG.max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": EOS_ID,
    }
    return _write(path, config, tensors)


def write_head(path: Path, **changes: Any) -> Path:
    """Write the head with changed settings; ``mask_token_id`` makes it a P-EAGLE head."""
    head = dataclasses.replace(HEAD, **changes)
    export_draft(path, head, copying_head(head, copying_target(CONFIG, HEAD)))
    return path


def write_block_draft(path: Path, **changes: Any) -> Path:
    """Write ``BLOCK`` with ``changes``; ``markov_head=None`` makes it a DFLASH drafter."""
    if changes.get("markov_head", BLOCK.markov_head) is None:
        changes = {"markov_rank": 0, "anchor_first": False} | changes
    config = dataclasses.replace(BLOCK, **changes)
    export_draft(path, config, chaining_block(config, copying_target(CONFIG, HEAD)))
    return path


def write_eagle_head(path: Path, target: Path) -> Path:
    """Write an EAGLE-1 head that applies the target's first layer to the last token."""
    config, tensors = _read(target)
    size, name = CONFIG.hidden_size, "layers.0."
    head = {
        key.removeprefix("model."): value
        for key, value in tensors.items()
        if key.startswith(f"model.{name}") and "input_layernorm" not in key
    }
    # scale embeddings to the norm of states after the target's final norm
    head["fc.weight"] = np.eye(size, 2 * size, dtype=np.float32) * np.float32(size / 10) ** 0.5
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "bias": False}
    return _write(path, config, head)


def write_draft_model(path: Path, target: Path) -> Path:
    """Write the target without its last layer."""
    config, tensors = _read(target)
    count = CONFIG.num_layers - 1
    kept = {name: x for name, x in tensors.items() if f"model.layers.{count}." not in name}
    return _write(path, config | {"num_hidden_layers": count}, kept)


def write_modules(path: Path, target: Path, count: int) -> Path:
    """Write MTP modules, which apply the target's layers to the last token's embedding."""
    config, tensors = _read(target)
    size, ones = CONFIG.hidden_size, np.ones(CONFIG.hidden_size, np.float32)
    modules = {name: x for name, x in tensors.items() if ".layers." not in name}
    for i in range(count):
        name, layer = f"model.mtp_layers.{i}.", f"model.layers.{i % CONFIG.num_layers}."
        modules |= {key.replace(layer, name): x for key, x in tensors.items() if layer in key}
        modules |= {f"{name}{kind}_layernorm.weight": ones for kind in ("token", "hidden")}
        modules[f"{name}final_layernorm.weight"] = tensors["model.norm.weight"]
        modules[f"{name}input_proj.weight"] = np.eye(size, 2 * size, size, dtype=np.float32)
    changes = {"num_hidden_layers": 1, "num_nextn_predict_layers": count}
    return _write(path, config | changes, modules)


def _read(target: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = json.loads((target / "config.json").read_text())
    return config, load_file(target / "model.safetensors")


def _write(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    write_tokenizer(_save(path, config, tensors), letter_tokenizer())
    return path


def _save(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path

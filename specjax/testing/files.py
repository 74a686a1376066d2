"""A tiny model and its EAGLE-3 head on disk, with a tokenizer of single characters."""

import dataclasses
import json
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from specjax.checkpoints import export_draft
from specjax.testing.copying import PERTURBATION, copying_head, copying_target
from specjax.testing.tiny import EAGLE3, TARGET
from specjax.text.tokenizer import Tokenizer

LETTERS = string.ascii_letters + string.digits + string.punctuation
EOS = "</s>"
EOS_ID = len(LETTERS) + 1
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
# two ids more than the tokenizer has, as padded vocabularies are
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


def letter_tokenizer() -> Tokenizer:
    """One token a character of printable ASCII, and an end token."""
    vocabulary = {letter: i for i, letter in enumerate([*LETTERS, "Ġ", EOS])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return Tokenizer(backend, special_tokens={"eos_token": EOS}, chat_template=TEMPLATE)


def write_target(path: Path) -> Path:
    """A Hugging Face directory, written without the package's own name maps."""
    path.mkdir(parents=True)
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
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()},
        path / "model.safetensors",
    )
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
    (path / "config.json").write_text(json.dumps(config))
    letter_tokenizer().save(path)
    return path


def write_head(path: Path) -> Path:
    """The head of :func:`write_target` in the published format."""
    export_draft(path, HEAD, copying_head(HEAD, copying_target(CONFIG, HEAD)))
    return path


def write_eagle_head(path: Path) -> Path:
    """An EAGLE-1 head for :func:`write_target` that copies the newest token's embedding as well."""
    path.mkdir(parents=True)
    rng = np.random.default_rng(4)
    size, inner, dim = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.head_dim
    q_size, kv_size = CONFIG.num_heads * dim, CONFIG.num_kv_heads * dim
    layer = "layers.0."
    shapes = {
        "self_attn.q_proj": (q_size, size),
        "self_attn.k_proj": (kv_size, size),
        "self_attn.v_proj": (kv_size, size),
        "self_attn.o_proj": (size, q_size),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    tensors = {
        f"{layer}{name}.weight": rng.normal(size=shape) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"{layer}{name}.weight"] *= PERTURBATION
    tensors[f"{layer}post_attention_layernorm.weight"] = np.ones(size)
    # embeddings as long as states behind the target's final norm
    tensors["fc.weight"] = np.eye(size, 2 * size) * (size / 10) ** 0.5
    save_file(
        {name: tensor.astype(np.float32) for name, tensor in tensors.items()},
        path / "model.safetensors",
    )
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": dim,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_theta": CONFIG.rope_theta,
        "max_position_embeddings": CONFIG.max_position_embeddings,
        "bias": False,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_draft_model(path: Path, target: Path) -> Path:
    """The target without its last layer."""
    return _write_like(path, target, range(CONFIG.num_layers - 1))


def write_modules(path: Path, target: Path, count: int) -> Path:
    """Modules of multi-token prediction: the target's layers over the newest token's embedding."""
    tensors = load_file(target / "model.safetensors")
    ones = np.ones(CONFIG.hidden_size, np.float32)
    modules: dict[str, np.ndarray] = {}
    for i in range(count):
        name, layer = f"model.mtp_layers.{i}.", f"model.layers.{i % CONFIG.num_layers}."
        modules |= {
            key.replace(layer, name): value for key, value in tensors.items() if layer in key
        }
        modules |= {f"{name}{kind}_layernorm.weight": ones for kind in ("token", "hidden")}
        modules[f"{name}final_layernorm.weight"] = tensors["model.norm.weight"]
        weight = np.eye(CONFIG.hidden_size, 2 * CONFIG.hidden_size, CONFIG.hidden_size)
        modules[f"{name}input_proj.weight"] = weight.astype(np.float32)
    return _write_like(path, target, (), modules, num_nextn_predict_layers=count)


def _write_like(
    path: Path, target: Path, layers: Iterable[int], more: Any = None, **changes: Any
) -> Path:
    """A directory with some layers of another, and what comes beside them."""
    path.mkdir(parents=True)
    kept = tuple(f"model.layers.{i}." for i in layers)
    tensors = {
        name: value
        for name, value in load_file(target / "model.safetensors").items()
        if name.startswith(kept) or ".layers." not in name
    }
    save_file(tensors | (more or {}), path / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config |= {"num_hidden_layers": max(len(kept), 1)} | changes
    (path / "config.json").write_text(json.dumps(config))
    letter_tokenizer().save(path)
    return path

"""A tiny model and its EAGLE-3 head on disk, with a tokenizer of single characters."""

import dataclasses
import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from specjax.checkpoints import export_draft
from specjax.checkpoints.export import published_target
from specjax.testing.models import EAGLE3, TARGET, copying_head, copying_target
from specjax.text.tokenizer import Tokenizer

LETTERS = string.ascii_letters + string.digits + string.punctuation
EOS = "</s>"
EOS_ID = len(LETTERS) + 1
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
# two more ids than the tokenizer has, as in padded vocabularies
CONFIG = dataclasses.replace(
    TARGET, vocab_size=EOS_ID + 3, max_position_embeddings=128, eos_token_ids=(EOS_ID,)
)
HEAD = dataclasses.replace(
    EAGLE3, vocab_size=CONFIG.vocab_size, draft_vocab_size=80, max_position_embeddings=128
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
    tokenizer.backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer.special_tokens))
    if tokenizer.chat_template is not None:
        (path / "chat_template.jinja").write_text(tokenizer.chat_template)


def write_target(path: Path) -> Path:
    """Write the copying target; its tensors are named without the package's name maps."""
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
    config = published_target(CONFIG) | {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "eos_token_id": EOS_ID,
    }
    return write_folder(path, config, tensors, letter_tokenizer())


def write_head(path: Path, **changes: Any) -> Path:
    """Write the head with changed settings; ``mask_token_id`` makes it a P-EAGLE head."""
    head = dataclasses.replace(HEAD, **changes)
    export_draft(path, head, copying_head(head, copying_target(CONFIG, HEAD)))
    return path


def write_folder(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write a Hugging Face directory."""
    path.mkdir(parents=True, exist_ok=True)
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        write_tokenizer(path, tokenizer)
    return path

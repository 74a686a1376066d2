"""A model that writes harmony: a Markov chain over letters, words and marks, as a checkpoint.

Its embeddings are unit vectors, and its layers add nothing, so the output head has the logits of
each token's successors.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from specjax.testing.files import LETTERS, write_folder
from specjax.text.harmony import MARKS

from .tokenizers import harmony_tokenizer

WORDS = ("assistant", "analysis", "commentary", "final", " to=functions.f json", '{"x": 1}')
SIZE, HEADS, DIM, INNER = 128, 2, 16, 16  # the size is also that of the vocabulary
# some turns of the prompt; tools are not shown, because each letter is a token
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>"
    "{{ m.thinking ~ '|' if m.thinking }}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{% if tools %}{% endif %}"
)
# token -> those that follow it, equally likely
CHAIN = {
    "assistant": ["<|channel|>"],
    "<|channel|>": ["analysis", "final", "commentary"],
    "analysis": ["<|message|>"],
    "final": ["<|message|>"],
    "commentary": [" to=functions.f json", "<|message|>"],
    " to=functions.f json": ["<|message|>"],
    "<|message|>": ["h", '{"x": 1}'],
    '{"x": 1}': ["<|call|>", "<|end|>"],
    "h": ["m"],
    "m": ["<|end|>", "<|end|>", "<|end|>", "<|return|>"],
    "<|end|>": ["<|start|>"],
    "<|start|>": ["assistant"],
}
# changes with which reasoning comes first, then one answer, if a schema ends it
CHANNELS = ["analysis", "analysis", *["final"] * 6, "commentary"]
IN_ORDER = {"<|channel|>": CHANNELS, "<|message|>": ["h"], "m": ["<|end|>"]}
LIKELY, QUOTE = 14.0, 5.0


def write_harmony(path: Path, changes: Mapping[str, list[str]] = MappingProxyType({})) -> Path:
    """Write the checkpoint, with ``changes`` of its chain."""
    tokenizer = harmony_tokenizer(*WORDS)
    tokenizer.chat_template = TEMPLATE
    ids = tokenizer.backend.get_vocab()
    logits = np.zeros((SIZE, SIZE), np.float32)
    logits[:, LETTERS.index('"')] = QUOTE  # strings that a schema allows are short
    for token, followers in (CHAIN | {**changes}).items():
        for follower in followers:
            share = followers.count(follower) / len(followers)
            logits[ids[token], ids[follower]] = LIKELY + np.log(share)
    inner = "model.layers.0."
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, SIZE),
        "self_attn.k_proj": (DIM, SIZE),
        "self_attn.v_proj": (DIM, SIZE),
        "self_attn.o_proj": (SIZE, HEADS * DIM),
        "mlp.gate_proj": (INNER, SIZE),
        "mlp.up_proj": (INNER, SIZE),
        "mlp.down_proj": (SIZE, INNER),
    }
    tensors = {f"{inner}{name}.weight": np.zeros(shape) for name, shape in shapes.items()}
    for name in (f"{inner}input_layernorm", f"{inner}post_attention_layernorm", "model.norm"):
        tensors[f"{name}.weight"] = np.ones(SIZE)
    tensors["model.embed_tokens.weight"] = np.eye(SIZE)
    # the norm makes unit vectors longer
    tensors["lm_head.weight"] = logits.T / np.sqrt(SIZE)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": SIZE,
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": ids["</s>"],
        "torch_dtype": "float32",
    }
    arrays = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    return write_folder(path, config, arrays, tokenizer)


def exactly(text: str) -> str:
    """A grammar of this completion only, with its marks."""
    pieces = re.split(f"({'|'.join(map(re.escape, MARKS))})", text)
    return "start: " + " ".join(x if x in MARKS else json.dumps(x) for x in pieces if x)

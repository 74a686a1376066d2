"""Target models in GGUF files: configuration from metadata, tensors in Hugging Face names."""

import re

import numpy as np

from specjax.checkpoints.gguf import GGUFFile
from specjax.checkpoints.gguf_tokenizer import eos_token_ids
from specjax.checkpoints.tensors import TensorSource
from specjax.config import ModelConfig, RopeScaling
from specjax.json_file import Fields
from specjax.models.layers import rope_frequencies

_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}


def _huggingface_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; one that target models do not have keeps its own."""
    match = re.fullmatch(r"(blk\.\d+\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in (_IN_LAYER if match[1] else _TOP_LEVEL):
        return name
    if match[1] is None:
        return f"{_TOP_LEVEL[match[2]]}.{match[3]}"
    return f"{match[1].replace('blk', 'model.layers')}{_IN_LAYER[match[2]]}.{match[3]}"


def _interleaved_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """Rows of a GGUF query or key projection of architecture ``llama``, in Hugging Face order.

    GGUF rotates neighbouring pairs, Hugging Face the two halves of a head, so the converter
    interleaves the halves: row ``2 i + j`` of a head is row ``j * H / 2 + i``. This undoes it.
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def gguf_source(file: GGUFFile, config: ModelConfig) -> TensorSource:
    """A GGUF file as a source of tensors in Hugging Face names and layout."""
    stored = {_huggingface_name(name): name for name in file.tensors}
    stored.pop("rope_freqs.weight", None)
    rows: dict[str, np.ndarray] = {}
    if config.model_type == "llama":
        rows["q_proj"] = _interleaved_rows(config.num_heads, config.head_dim)
        rows["k_proj"] = _interleaved_rows(config.num_kv_heads, config.head_dim)

    def read(name: str) -> np.ndarray:
        array, module = file.read(stored[name]), name.split(".")[-2]
        return array[rows[module]] if module in rows else array

    return TensorSource(file.path, {name: file.info(stored[name]) for name in stored}, read)


def gguf_config(file: GGUFFile, dtype: str) -> ModelConfig:
    """The configuration that the metadata and tensor table of a GGUF file describe."""
    if dtype == "auto":
        kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
        dtype = "float32" if kinds <= {"F32"} else "bfloat16"
    arch = file.metadata.text("general.architecture", None)
    if arch not in _ARCHITECTURES:
        demand = f"is not supported; supported: {_ARCHITECTURES}"
        raise file.metadata.wrong("general.architecture", demand)
    keys = _architecture_keys(file, arch)
    if keys.integer("expert_count", 0):
        raise ValueError(f"{file.path}: mixture-of-experts models are not supported")
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count", at_least=1)
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.wrong(key, f"must be the head dimension {head_dim}")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor 'token_embd.weight'")
    theta = keys.number("rope.freq_base", 10000.0)
    context, window = keys.integer("context_length"), keys.integer("attention.sliding_window", 0)
    values = {
        "model_type": arch,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_layers": keys.integer("block_count"),
        "num_heads": heads,
        "num_kv_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, keys, head_dim, theta),
        "max_position_embeddings": context,
        "dtype": dtype,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "output_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        # a window as wide as the context never applies
        "sliding_window": window if 0 < window < context else None,
        "eos_token_ids": eos_token_ids(file),
        "bos_token_id": file.metadata.integer("tokenizer.ggml.bos_token_id", None),
    }
    return file.metadata.build(ModelConfig, values)


def _architecture_keys(file: GGUFFile, arch: str) -> Fields:
    values = {}
    for key, value in file.metadata.values.items():
        if key.startswith(f"{arch}."):
            is_alike = isinstance(value, list) and value and all(x == value[0] for x in value)
            values[key.removeprefix(f"{arch}.")] = value[0] if is_alike else value
    return Fields(values, f"{file.path}: {arch}")


def _rope_scaling(file: GGUFFile, keys: Fields, head_dim: int, theta: float) -> RopeScaling | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    kind = keys.text("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        demand = "is not supported; supported: 'none', 'linear' and Llama 3.1's rope_freqs.weight"
        raise keys.wrong("rope.scaling.type", demand)
    if kind == "none":
        return None
    factor = keys.number("rope.scaling.factor", 1.0)
    return keys.build(RopeScaling, {"rope_type": "linear", "factor": factor})


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> RopeScaling:
    """The Llama 3.1 scaling whose frequencies the file lists as divisors."""
    divisors = np.asarray(file.read("rope_freqs.weight"), np.float32)
    scaling = RopeScaling(rope_type="llama3", factor=max(1.0, float(divisors.max())))
    if theta > 0 and divisors.shape == (head_dim // 2,):
        plain = rope_frequencies(head_dim, theta, None)
        if np.allclose(divisors, plain / rope_frequencies(head_dim, theta, scaling), rtol=1e-4):
            return scaling
    raise ValueError(
        f"{file.path}: rope_freqs.weight {divisors.shape} is not the Llama 3.1 scaling with factor "
        f"{scaling.factor} over 8192 positions, the only one that is supported"
    )

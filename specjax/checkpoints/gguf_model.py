"""Target models in GGUF files: configuration from metadata, tensors in Hugging Face names."""

import re
from typing import Any

import numpy as np

from specjax.checkpoints.gguf_reader import GGUFFile
from specjax.checkpoints.gguf_tokenizer import extra_eos_token_ids
from specjax.checkpoints.tensors import TensorInfo
from specjax.config import ModelConfig, RopeScaling
from specjax.models.layers import rope_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TOP_LEVEL = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_FROM_GGUF = {value: key for key, value in (_TOP_LEVEL | _IN_LAYER).items()}


def huggingface_name(name: str) -> str | None:
    """Hugging Face name of a GGUF tensor, None for one that target models do not have."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _FROM_GGUF:
        return None
    base = _FROM_GGUF[match[2]]
    if (match[1] is None) != (base in _TOP_LEVEL):
        return None
    prefix = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{prefix}{base}.{match[3]}"


def interleaved_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """Rows of a GGUF query or key projection of architecture ``llama``, in Hugging Face order.

    GGUF rotates neighbouring pairs, Hugging Face the two halves of a head, so the converter
    interleaves the halves: row ``2 i + j`` of a head is row ``j * H / 2 + i``. This undoes it.
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


class GGUFSource:
    """A GGUF file as a source of tensors in Hugging Face names and layout."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.path = file.path
        self._file = file
        # tensors without a counterpart keep their own name, so that errors can show them
        self._stored = {huggingface_name(name) or name: name for name in file.tensors}
        self._rows: dict[str, np.ndarray] = {}
        if file.metadata["general.architecture"] == "llama":
            self._rows = {
                "q_proj": interleaved_rows(config.num_heads, config.head_dim),
                "k_proj": interleaved_rows(config.num_kv_heads, config.head_dim),
            }

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._stored) - {"rope_freqs.weight"}

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor without reading it."""
        return self._file.info(self._stored[name])

    def read(self, name: str) -> np.ndarray:
        """The tensor, dequantised to float32 if it is quantised."""
        array = self._file.read(self._stored[name])
        parts = name.split(".")
        rows = self._rows.get(parts[-2]) if len(parts) > 1 else None
        return array if rows is None else array[rows]


def checkpoint_dtype(file: GGUFFile) -> str:
    """``float32`` for a file that stores its matrices in float32, else ``bfloat16``."""
    kinds = {t.tensor_type.name for t in file.tensors.values() if len(t.shape) > 1}
    return "float32" if kinds <= {"F32"} else "bfloat16"


def gguf_config(file: GGUFFile, dtype: str) -> ModelConfig:
    """The configuration that the metadata and tensor table of a GGUF file describe.

    Raises:
        ValueError: if a key is missing or names something that is not supported.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: general.architecture={arch!r} is not supported; supported: "
            f"{list(ARCHITECTURES)}"
        )
    keys = _Keys(file, arch)
    if keys.get("expert_count", 0):
        raise ValueError(f"{file.path}: mixture-of-experts models are not supported")
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise ValueError(
                f"{file.path}: {arch}.{key}={keys.get(key)} differs from the head dimension "
                f"{head_dim}, which is not supported"
            )
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor 'token_embd.weight'")
    theta = float(keys.get("rope.freq_base", 10000.0))
    eos = file.metadata.get("tokenizer.ggml.eos_token_id")
    context, window = keys.size("context_length"), keys.get("attention.sliding_window")
    values: dict[str, Any] = {
        "model_type": arch,
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_layers": keys.size("block_count"),
        "num_heads": heads,
        "num_kv_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.require("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(keys, head_dim, theta),
        "max_position_embeddings": context,
        "dtype": dtype,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "output_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        # a window as wide as the context never applies
        "sliding_window": window if window and window < context else None,
        "eos_token_ids": tuple(
            dict.fromkeys([*([] if eos is None else [eos]), *extra_eos_token_ids(file)])
        ),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
    }
    try:
        return ModelConfig(**values)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None


class _Keys:
    """Metadata under the architecture's prefix."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file, self.arch = file, arch

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, list):  # one value per layer
            if len(set(value)) != 1:
                raise ValueError(
                    f"{self.file.path}: {self.arch}.{key}={value} differs between layers, which "
                    "is not supported"
                )
            value = value[0]
        return value

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.file.path} has no metadata key {self.arch}.{key}")
        return value

    def size(self, key: str) -> int:
        """A count that must be there."""
        value = self.require(key)
        if not isinstance(value, int) or value < 1:
            name = f"{self.arch}.{key}"
            raise ValueError(f"{self.file.path}: {name}={value!r} must be an integer of at least 1")
        return value


def _rope_scaling(keys: _Keys, head_dim: int, theta: float) -> RopeScaling | None:
    file = keys.file
    kind = keys.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling(rope_type="linear", factor=float(keys.get("rope.scaling.factor", 1.0)))
    raise ValueError(
        f"{file.path}: {keys.arch}.rope.scaling.type={kind!r} is not supported; supported: "
        "'none', 'linear' and the factors of Llama 3.1 (rope_freqs.weight)"
    )


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> RopeScaling:
    """The Llama 3.1 scaling whose frequencies the file lists as divisors."""
    divisors = np.asarray(file.read("rope_freqs.weight"), np.float32)
    scaling = RopeScaling(rope_type="llama3", factor=max(1.0, float(divisors.max())))
    expected = rope_frequencies(head_dim, theta, None) / rope_frequencies(head_dim, theta, scaling)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(
            f"{file.path}: rope_freqs.weight {divisors.shape} is not the Llama 3.1 scaling with "
            f"factor {scaling.factor} over 8192 positions, the only one that is supported"
        )
    return scaling

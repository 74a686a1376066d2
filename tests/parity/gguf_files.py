"""Writes small transformers models as GGUF files, in the layout of llama.cpp's converter."""

import math
from pathlib import Path

import gguf
import numpy as np
import transformers

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    layer, inner = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[inner]}.{kind}"


def interleave_rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row ``i`` and row ``i + H / 2`` of every head become neighbours."""
    out = np.empty_like(weight)
    head_dim = weight.shape[0] // heads
    for head in range(heads):
        for i in range(head_dim // 2):
            base = head * head_dim
            out[base + 2 * i] = weight[base + i]
            out[base + 2 * i + 1] = weight[base + head_dim // 2 + i]
    return out


def llama3_divisors(rope: dict[str, float], head_dim: int) -> np.ndarray:
    """Divisors of the rotary frequencies, the form in which GGUF files keep llama3 scaling."""
    out = []
    for i in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (
            2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        )
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        out.append(1 / (share + (1 - share) / rope["factor"]))
    return np.array(out, np.float32)


def write_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """``model`` as a GGUF file; matrices in ``quantization``, vectors in float32.

    Only the ``llama`` architecture (Llama, Mistral) interleaves its query and key rows.
    """
    config = model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        divisors = llama3_divisors(rope, head_dim)
        writer.add_tensor("rope_freqs.weight", divisors, raw_dtype=gguf.GGMLQuantizationType.F32)
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"token{i}" for i in range(config.vocab_size)])
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.float().numpy()
        if arch == "llama" and "q_proj" in name:
            value = interleave_rotary_rows(value, heads)
        if arch == "llama" and "k_proj" in name:
            value = interleave_rotary_rows(value, kv_heads)
        kind = quantization if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(value), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

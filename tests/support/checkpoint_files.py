"""Write tiny checkpoints without the package's own name maps."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from specjax.testing.files import write_folder

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM = 61, 32, 48, 3, 4, 2, 8

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}
_NOT_OF_HEADS = ("rope_theta", "tie_word_embeddings", "eos_token_id", "bos_token_id", "torch_dtype")
HEAD_CONFIG: dict[str, Any] = {
    **{key: value for key, value in CONFIG.items() if key not in _NOT_OF_HEADS},
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 20,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}
EAGLE_CONFIG = {
    key: value
    for key, value in HEAD_CONFIG.items()
    if key not in ("draft_vocab_size", "eagle_config")
} | {"architectures": ["LlamaForCausalLMEagle"]}
PEAGLE = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "draft_vocab_size": 20,
    "mask_token_id": 60,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "transformer_layer_config": {
        key: value
        for key, value in HEAD_CONFIG.items()
        if key not in ("architectures", "draft_vocab_size", "eagle_config", "num_hidden_layers")
    },
}
MIMO = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 2}
# a dense layer and two mixtures, and the module, which is layer 3
EXPERTS, EXPERT_INNER = 6, 16
GLM: dict[str, Any] = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "use_qk_norm": True,
    "head_dim": DIM,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_INNER,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
QKV = ("q_proj", "k_proj", "v_proj")
Tensors = dict[str, np.ndarray]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def _layer(rng: np.random.Generator, prefix: str, in_size: int, dim: int = DIM) -> Tensors:
    shapes = {
        "self_attn.q_proj": (HEADS * dim, in_size),
        "self_attn.k_proj": (KV_HEADS * dim, in_size),
        "self_attn.v_proj": (KV_HEADS * dim, in_size),
        "self_attn.o_proj": (HIDDEN, HEADS * dim),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "post_attention_layernorm": (HIDDEN,),
    }
    return {f"{prefix}.{name}.weight": normal(rng, *shape) for name, shape in shapes.items()}


def target_tensors(*, tied: bool = False, seed: int = 0, dim: int = DIM) -> Tensors:
    """Random tensors of a Llama model under Hugging Face names."""
    rng = np.random.default_rng(seed)
    noise = partial(normal, rng)
    tensors = {
        "model.embed_tokens.weight": noise(VOCAB, HIDDEN),
        "model.norm.weight": noise(HIDDEN),
    }
    for i in range(LAYERS):
        tensors |= _layer(rng, f"model.layers.{i}", HIDDEN, dim)
        tensors[f"model.layers.{i}.input_layernorm.weight"] = noise(HIDDEN)
    if not tied:
        tensors["lm_head.weight"] = noise(VOCAB, HIDDEN)
    return tensors


def add_biases(tensors: Tensors, names: tuple[str, ...], seed: int = 1) -> Tensors:
    """Add a random bias to each named projection."""
    rng = np.random.default_rng(seed)
    biases = {
        name.removesuffix("weight") + "bias": normal(rng, *value.shape[:1])
        for name, value in tensors.items()
        if name.removesuffix(".weight").split(".")[-1] in names
    }
    return tensors | biases


def write_sharded(path: Path, config: dict[str, Any], tensors: Tensors, count: int = 3) -> Path:
    """Write a Hugging Face directory with an index and several safetensors files."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        shard = dict(list(tensors.items())[i::count])
        save_file(shard, path / file)
        weight_map |= dict.fromkeys(shard, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(index)
    return path


def head_tensors(
    *,
    draft_vocab: int = 20,
    prefix: str = "",
    layer: str = "midlayer",
    embedding: bool = False,
    lm_head: bool = True,
    num_features: int = 3,
    seed: int = 2,
) -> Tensors:
    """Random tensors of an EAGLE-3 head under published names."""
    rng = np.random.default_rng(seed)
    noise = partial(normal, rng)
    tensors = _layer(rng, layer, 2 * HIDDEN)
    tensors |= {f"{layer}.{n}.weight": noise(HIDDEN) for n in ("hidden_norm", "input_layernorm")}
    tensors |= {"fc.weight": noise(HIDDEN, num_features * HIDDEN), "norm.weight": noise(HIDDEN)}
    if lm_head:
        tensors["lm_head.weight"] = noise(draft_vocab, HIDDEN)
    if embedding:
        tensors["embed_tokens.weight"] = noise(VOCAB, HIDDEN)
    tensors = {prefix + name: value for name, value in tensors.items()}
    if draft_vocab != VOCAB:
        ids = np.sort(rng.choice(VOCAB, draft_vocab, replace=False))
        tensors["d2t"] = ids - np.arange(draft_vocab)
        tensors["t2d"] = np.isin(np.arange(VOCAB), ids)
    return tensors


def eagle_tensors(seed: int = 3, *, bias: bool = True) -> Tensors:
    """Random tensors of an EAGLE-1/2 head under published names."""
    rng = np.random.default_rng(seed)
    tensors = _layer(rng, "layers.0", HIDDEN)
    tensors["fc.weight"] = normal(rng, HIDDEN, 2 * HIDDEN)
    tensors["embed_tokens.weight"] = normal(rng, VOCAB, HIDDEN)
    if bias:
        tensors["fc.bias"] = normal(rng, HIDDEN)
    return tensors


def peagle_tensors(count: int) -> Tensors:
    """Tensors of a head with this number of layers, all with query and key norms."""
    tensors = head_tensors(layer="layers.0", embedding=True)
    for i in range(1, count):
        layer = eagle_tensors(bias=False)
        del layer["fc.weight"]
        tensors |= {name.replace("layers.0", f"layers.{i}"): x for name, x in layer.items()}
        tensors[f"layers.{i}.input_layernorm.weight"] = np.full(HIDDEN, i, np.float32)
    for i, letter in np.ndindex(count, 2):
        norm = np.full(DIM, 2 * i + letter, np.float32)
        tensors[f"layers.{i}.self_attn.{'qk'[letter]}_norm.weight"] = norm
    return tensors | {"mask_hidden": np.arange(3 * HIDDEN, dtype=np.float32).reshape(1, 1, -1)}


def module_tensors(count: int = 2) -> Tensors:
    """Random modules: layers like the target's after two norms and a projection."""
    rng = np.random.default_rng(5)
    layers = target_tensors(seed=7)
    tensors: Tensors = {}
    for i in range(count):
        prefix = f"model.mtp_layers.{i}."
        for name, value in layers.items():
            if name.startswith(f"model.layers.{i}."):
                tensors[name.replace(f"model.layers.{i}.", prefix)] = value
        shapes = {"input_proj": (HIDDEN, 2 * HIDDEN)}
        shapes |= {f"{name}_layernorm": (HIDDEN,) for name in ("token", "hidden", "final")}
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = normal(rng, *shape)
    return tensors


def write_mimo(path: Path, count: int = 2, **changes: Any) -> Path:
    tensors = add_biases(target_tensors() | module_tensors(count), QKV)
    return write_folder(path, CONFIG | MIMO | changes, tensors)


def glm_tensors() -> Tensors:
    """Random tensors of a small GLM-4.5 and its module under published names."""
    rng = np.random.default_rng(11)
    tensors = target_tensors()
    layer, module = "model.layers.1.", f"model.layers.{LAYERS}."
    for name in [name for name in tensors if name.startswith(layer)]:
        tensors[name.replace(layer, module)] = normal(rng, *tensors[name].shape)
    shapes = {"eh_proj": (HIDDEN, 2 * HIDDEN)}
    shapes |= dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (HIDDEN,))
    tensors |= {f"{module}{name}.weight": normal(rng, *shape) for name, shape in shapes.items()}
    tensors[f"{module}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{module}shared_head.head.weight"] = tensors["lm_head.weight"]
    for i in range(LAYERS + 1):
        at = f"model.layers.{i}."
        tensors |= {f"{at}self_attn.{x}_norm.weight": normal(rng, DIM) for x in "qk"}
        if i == 0:
            continue
        for name in ("gate_proj", "up_proj", "down_proj"):
            del tensors[f"{at}mlp.{name}.weight"]
            shape = (EXPERT_INNER, HIDDEN) if name != "down_proj" else (HIDDEN, EXPERT_INNER)
            owners = [f"experts.{j}" for j in range(EXPERTS)] + ["shared_experts"]
            tensors |= {f"{at}mlp.{x}.{name}.weight": normal(rng, *shape) for x in owners}
        tensors[f"{at}mlp.gate.weight"] = normal(rng, EXPERTS, HIDDEN)
        tensors[f"{at}mlp.gate.e_score_correction_bias"] = normal(rng, EXPERTS)
    return add_biases(tensors, QKV)


def write_glm(path: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    return write_folder(path, CONFIG | GLM | changes, glm_tensors() if tensors is None else tensors)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.experts.{x}_proj": f"ffn_{x}_exps" for x in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    "self_attn.sinks": "attn_sinks",
}
# Gemma 2 and 3, and OLMo 2 and 3
GGUF_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# names that an architecture has instead
GGUF_NAMES_OF: dict[str, dict[str, str]] = {
    "gemma2": GGUF_POST_NORMS,
    "gemma3": GGUF_POST_NORMS,
    "olmo2": GGUF_POST_NORMS,
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "chatglm": {"mlp.gate_up_proj": "ffn_up"},
    "glm4": {
        "mlp.gate_up_proj": "ffn_up",
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
}
GGUF_INTERLEAVED = ("llama", "mistral3", "granite", "granitemoe", "smollm3")


def to_gguf_rows(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Order query or key rows like llama.cpp's converter for architecture ``llama``."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def sentencepiece() -> dict[str, Any]:
    """The tokenizer keys of a small SentencePiece vocabulary, in which early pieces score best."""
    marked = {
        "<unk>": 2,
        "<s>": 3,
        "</s>": 3,
        "<|user|>": 3,
        "<b>": 4,
        "\n\n": 4,
        "  ": 4,
        "   ": 4,
    }
    single = {f"<0x{byte:02X}>": 6 for byte in range(256)}
    words = "\u2581t \u2581th \u2581the he th the in ing \u2581in er \u2581a an"
    pieces = [*words.split(" "), *"\u2581thenigrad\u00e91"]
    tokens = [*marked, *single, *pieces]
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": tokens,
        "ggml.scores": [0.0] * (len(marked) + 256) + [-float(i) for i in range(len(pieces))],
        "ggml.token_type": [*marked.values(), *single.values(), *([1] * len(pieces))],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }


def write_gguf(
    path: Path,
    tensors: Tensors,
    *,
    arch: str = "llama",
    keys: dict[str, Any] | None = None,
    extra: Tensors | None = None,
    drop: tuple[str, ...] = (),
    kind: gguf.GGMLQuantizationType | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """Write Hugging Face tensors to a GGUF file with llama.cpp's names and layout.

    ``keys`` replaces or adds metadata under the architecture's prefix, and ``drop`` removes
    metadata. ``extra`` adds unchanged tensors. ``kind`` quantises the matrices. ``tokenizer`` has
    metadata under the prefix ``tokenizer.``.
    """
    writer = gguf.GGUFWriter(path, arch)
    metadata: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
    } | (keys or {})
    for key in sorted(metadata.keys() - set(drop)):
        value = metadata[key]
        writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    tokenizer = tokenizer or {"ggml.eos_token_id": 3, "ggml.bos_token_id": 1}
    for key, value in tokenizer.items():
        writer.add_key_value(f"tokenizer.{key}", value, gguf.GGUFValueType.get_type(value))
    for name, value in tensors.items():
        base, suffix = name.rsplit(".", 1)
        block = ""
        if base.startswith("model.layers."):
            _, _, index, base = base.split(".", 3)
            block = f"blk.{index}."
        if arch in GGUF_INTERLEAVED and base.endswith(("q_proj", "k_proj")):
            heads = "head_count" if base.endswith("q_proj") else "head_count_kv"
            value = to_gguf_rows(value, metadata[f"attention.{heads}"] or 1)  # one test passes 0
        if arch.startswith("gemma") and base.endswith("norm"):
            value = value + np.float32(1)
        stored = f"{block}{(GGUF_NAMES | GGUF_NAMES_OF.get(arch, {}))[base]}.{suffix}"
        if value.dtype == np.uint8:  # bytes of MXFP4
            writer.add_tensor(stored, value, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        elif kind is not None and value.ndim > 1:
            writer.add_tensor(stored, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(value))
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

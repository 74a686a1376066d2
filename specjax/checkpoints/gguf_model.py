"""Configurations and tensors of GGUF files, by the names of Hugging Face directories.

The families of ``specjax/models/`` read both kinds of files. Here, keys of a GGUF file get the
names that ``config.json`` has for them. A key that no family reads is refused.
"""

from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, Keys, get_tensor_name_map

from specjax.checkpoints.gguf import GGUFFile
from specjax.checkpoints.gguf_tokenizer import eos_token_ids, token_id, with_default_ids
from specjax.checkpoints.huggingface import layer_sizes
from specjax.checkpoints.keys import ReadFields
from specjax.checkpoints.tensors import TensorSource
from specjax.config import Count, Epsilon, ModelConfig, Rope, RopeScaling
from specjax.json_file import PositiveSize, Size
from specjax.models.decoder import CausalLM
from specjax.models.experts import MixtureConfig
from specjax.models.family import Family
from specjax.models.flat import recipes_of
from specjax.models.registry import FAMILIES, family_of, layer_kinds, load_family, refusal
from specjax.models.rope import rope_frequencies, rotated_rows

_FREQUENCIES = "rope_freqs.weight"  # divisors of the rotary frequencies
_FACTORS = {f"{x}_factor": f"rope_factors_{x}.weight" for x in ("short", "long")}  # of longrope
_PATTERN = "attention.sliding_window_pattern"

# key of config.json -> key of an architecture
_NAMES = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "llama_4_scaling_beta": "attention.temperature_scale",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    **_FACTORS,
}
# the names that the gguf library's writer gives to keys of an architecture
_GROUPS = Keys.LLM, Keys.Attention, Keys.Rope
_WRITTEN = {str(x).removeprefix("{arch}.") for group in _GROUPS for x in vars(group).values()}
# these change no logits
_HARMLESS = set(
    "pooling_type rope.scaling.finetuned rope.scaling.original_context_length "
    "tensor_data_layout vocab_size".split()
)


class _Keys(ReadFields):
    """Values of an architecture by the keys of ``config.json``; errors have the file's keys."""

    def __init__(self, values: dict[str, Any], where: object, names: dict[str, str]) -> None:
        super().__init__(values, where)
        self.values: dict[str, Any] = values
        self.names = names

    def __contains__(self, key: str) -> bool:
        return super().__contains__(self.names.get(key, key))

    def get(self, key: str, kind: Any, default: Any = ...) -> Any:
        return super().get(self.names.get(key, key), kind, default)

    def fields(self, key: str) -> ReadFields:
        return self if key == "rope_scaling" else super().fields(key)

    def wrong(self, key: str, demand: str) -> ValueError:
        return super().wrong(self.names.get(key, key), demand)


def gguf_source(file: GGUFFile, config: ModelConfig) -> TensorSource:
    """Present a GGUF file as a source of tensors with Hugging Face names and layout."""
    stated, offset = family_of(config).gguf, layer_kinds(config)[-1].norm_offset
    assert stated is not None, "gguf_config chooses a family with GGUF files"
    (arch,) = (number for number, name in MODEL_ARCH_NAMES.items() if name == stated.arch)
    map_name = get_tensor_name_map(arch, config.num_layers).get_name
    recipes = recipes_of(CausalLM, config)
    parts = [part for recipe in recipes.values() for part in recipe.parts]
    names = [part.name for part in parts]
    names += [x for recipe in recipes.values() for stack in recipe.stacks for x in stack]
    names += [x for part in parts for made in part.made_of for x in made.shapes]
    ends = ".weight", ".bias"
    full = {name: name if name.endswith(ends) else f"{name}.weight" for name in names}
    named = {map_name(full[name], ends): name for name in reversed(names)}
    stored = {named[name]: name for name in file.tensors if name in named}
    if unknown := sorted(file.tensors.keys() - named.keys() - {_FREQUENCIES, *_FACTORS.values()}):
        name = unknown[0]
        raise ValueError(f"{file.tensors[name].path}: the model does not use the tensor {name!r}")
    rows: dict[str, np.ndarray] = {}
    if stated.interleaved:
        # the converter interleaves the halves of each head
        for name, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            rows[name] = rotated_rows(heads, config.head_dim, config.head_dim, interleaved=True)

    def read(name: str) -> np.ndarray:
        array, module = file.read(stored[name]), name.split(".")[-2]
        if offset and module.endswith("norm"):
            return array - offset  # the converter adds it
        return array[rows[module]] if module in rows else array

    return TensorSource(file.path, {name: file.info(stored[name]) for name in stored}, read)


def gguf_config(file: GGUFFile, dtype: str) -> ModelConfig:
    """Read the configuration from the metadata and tensor table of a GGUF file."""
    if dtype == "auto":
        kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
        dtype = "float32" if kinds <= {"F32"} else "bfloat16"
    name = _find_family(file)
    family = FAMILIES[name]
    keys = _read_keys(file, family)
    if keys.get("expert_count", Size, 0) and not issubclass(family.config, MixtureConfig):
        raise keys.wrong("num_experts", "is not supported by the model's family")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor 'token_embd.weight'")
    keys.get("rms_norm_eps", Epsilon)  # required
    vocab_size, ids = file.tensors["token_embd.weight"].shape[0], with_default_ids(file.metadata)
    values = layer_sizes(keys) | {
        "model_type": name,
        "vocab_size": vocab_size,
        "num_layers": keys.get("num_hidden_layers", Count),
        "max_position_embeddings": keys.get("max_position_embeddings", PositiveSize),
        "dtype": dtype,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_ids": eos_token_ids(ids, vocab_size),
        "bos_token_id": token_id(ids, "bos", vocab_size),
        **family.read(keys),
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "output_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    if _FREQUENCIES in file.tensors:
        rotated = values["rotary_dim"] or values["head_dim"]
        values["rope_scaling"] = _llama3_scaling(file, rotated, values["rope_theta"])
    prefix = f"{file.metadata.values['general.architecture']}."
    stored = {key.removeprefix(prefix) for key in file.metadata.values if key.startswith(prefix)}
    # families also read names of config.json, which files must not have
    names = _WRITTEN.union(keys.names.values())
    if unknown := sorted(stored - (keys.keys & names) - _HARMLESS):
        raise keys.wrong(unknown[0], "is not supported")
    window = keys.get("sliding_window", Size, 0)
    if window and _PATTERN not in keys and not values.get("windows"):
        raise keys.wrong("sliding_window", "is not supported by the model's family")
    if values.get("has_packed_experts"):
        file.packed = _packed_experts(file)
    return file.metadata.build(family.config, values)


def _find_family(file: GGUFFile) -> str:
    """The model type that reads the file's architecture."""
    data = file.metadata
    arch = data.get("general.architecture", str, None)
    load_family(arch)
    stated = {name: family.gguf for name, family in FAMILIES.items() if family.gguf}
    named = [name for name in stated if stated[name].arch == arch]
    if not named:
        unknown = f"must be one of {sorted({how.arch for how in stated.values()})}"
        if arch in FAMILIES:
            demand = f"loads from a Hugging Face directory, not yet from GGUF; it {unknown}"
        else:
            demand = refusal(arch, unknown)
        raise data.wrong("general.architecture", demand)

    def is_complete(name: str) -> bool:
        return all(data.get(f"{arch}.{key}", Any, None) for key in stated[name].needs)

    name = next(filter(is_complete, reversed(named)), named[0])
    for key in stated[name].needs:
        data.get(f"{arch}.{key}", Any)
    return name


def _read_keys(file: GGUFFile, family: Family) -> _Keys:
    """The values that a ``config.json`` of the model would have."""
    assert family.gguf is not None, "chosen by _find_family"
    prefix, stored = f"{family.gguf.arch}.", dict[str, Any]()
    for key, value in file.metadata.values.items():
        if key.startswith(prefix):
            # some converters write one value for each layer
            is_alike = isinstance(value, list) and value and all(x == value[0] for x in value)
            stored[key.removeprefix(prefix)] = value[0] if is_alike else value
    # without a default: sizes, which files state, and windows and rotary bases, whose absence means
    # something else than in config.json
    defaults = {key: value for key, value in family.defaults.items() if key not in _NAMES}
    keys = _Keys({**defaults, **stored}, f"{file.path}: {family.gguf.arch}", dict(_NAMES))
    _state_windows(keys)
    _state_rope(file, keys, is_interleaved=family.gguf.interleaved)
    keys.values |= family.gguf.derive(keys)
    if _packed_experts(file):
        keys.values["quant_method"] = "mxfp4"
    return keys


def _packed_experts(file: GGUFFile) -> set[str]:
    """The matrices of experts, if all are MXFP4; else none."""
    names = {name for name in file.tensors if name.endswith("_exps.weight")}
    kinds = {file.tensors[name].kind for name in names}
    return names if kinds == {GGMLQuantizationType.MXFP4} else set()


def _state_windows(keys: _Keys) -> None:
    """State which layers have a window as ``config.json`` does."""
    count = keys.get("num_hidden_layers", Count)
    window, pattern = (keys.values.get(key) for key in (_NAMES["sliding_window"], _PATTERN))
    keys.values |= {"use_sliding_window": bool(window), "max_window_layers": 0}
    if not window:
        keys.values["layer_types"] = ["full_attention"] * count
    elif isinstance(pattern, bool | list):
        slides = [pattern] * count if isinstance(pattern, bool) else keys.get(_PATTERN, list[bool])
        if len(slides) != count:
            raise keys.wrong(_PATTERN, f"must have one value for each of {count} layers")
        keys.keys.add(_PATTERN)
        names = "full_attention", "sliding_attention"
        keys.values["layer_types"] = [names[slide] for slide in slides]
    elif pattern is not None:
        keys.names["sliding_window_pattern"] = _PATTERN


def _state_rope(file: GGUFFile, keys: _Keys, *, is_interleaved: bool) -> None:
    """State the rotated dimensions and the scalings as ``config.json`` does."""
    heads, hidden = keys.get("num_attention_heads", Count), keys.get("hidden_size", PositiveSize)
    head_dim = keys.get("head_dim", Count, max(1, hidden // heads))
    if keys.get("attention.value_length", Size, head_dim) != head_dim:
        raise keys.wrong("attention.value_length", f"must be the head dimension {head_dim}")
    keys.values.setdefault(_NAMES["attention_multiplier"], head_dim**-0.5)  # as in llama.cpp
    rotated = keys.get("rope.dimension_count", Size, head_dim)
    in_part = () if is_interleaved else range(2, head_dim, 2)
    if rotated != head_dim and rotated not in in_part:
        limit = "" if is_interleaved else "even, at least 2 and at most "
        raise keys.wrong("rope.dimension_count", f"must be {limit}the head dimension {head_dim}")
    # half a dimension more, because the product with head_dim is rounded down
    keys.values["partial_rotary_factor"] = min(1.0, (rotated + 0.5) / head_dim)

    # as in llama.cpp, a factor without a type is linear
    kind = keys.get("rope_type", str, "linear" if "factor" in keys else "none")
    tensors = {_FREQUENCIES, *_FACTORS.values()} & file.tensors.keys()
    absent = {*_FACTORS.values()} - tensors
    if len(absent) == 1:
        raise ValueError(f"{file.path} has no tensor {absent.pop()!r}, which longrope needs too")
    if tensors == {*_FACTORS.values()} and kind in ("none", "longrope"):
        kind = "longrope"
        for name in tensors:
            if (shape := file.tensors[name].shape) != (rotated // 2,):
                raise ValueError(f"{file.path}: {name} {shape} must have {rotated // 2} numbers")
            # shortest decimals, as in the metadata
            keys.values[name] = [float(str(x)) for x in file.read(name).astype(np.float32)]
    elif kind == "none" and tensors <= {_FREQUENCIES}:
        kind = "default"
    elif kind not in ("linear", "yarn") or tensors:
        demand = (
            "is not supported; supported: 'none', 'linear', 'yarn', Llama 3.1's rope_freqs.weight, "
            f"and longrope with {' and '.join(_FACTORS.values())}"
        )
        raise keys.wrong("rope_type", demand)
    else:
        keys.get("factor", float)  # required
    keys.values[_NAMES["rope_type"]] = kind
    if "mscale_all_dim" in keys:
        keys.values["mscale"] = 1.0
    attention = [f"rope.scaling.{x}attn_factor" for x in ("yarn_", "")]
    keys.names["attention_factor"] = next((x for x in attention if x in keys), attention[0])


def _llama3_scaling(file: GGUFFile, rotated: int, theta: float) -> RopeScaling:
    """Find the Llama 3.1 scaling whose frequency divisors the file stores."""
    divisors = np.asarray(file.read(_FREQUENCIES), np.float32)
    scaling = RopeScaling(rope_type="llama3", factor=min(max(1.0, float(divisors.max())), 1e6))
    if theta > 0 and divisors.shape == (rotated // 2,):
        plain, scaled = (rope_frequencies(Rope(rotated, theta, x)) for x in (None, scaling))
        if np.allclose(divisors, plain / scaled, rtol=1e-4):
            return scaling
    raise ValueError(
        f"{file.path}: rope_freqs.weight {divisors.shape} must be the Llama 3.1 scaling (factor "
        f"{scaling.factor} over 8192 positions); other scalings are not supported"
    )

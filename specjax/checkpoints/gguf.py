"""Read GGUF files: metadata, tensors by Hugging Face name, configuration and tokenizer."""

import math
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize
from ml_dtypes import bfloat16
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from specjax.checkpoints.tensors import TensorInfo, TensorSource
from specjax.checks import check_regular
from specjax.config import ModelConfig, Rope, RopeScaling
from specjax.json_file import Fields, PositiveSize, Size
from specjax.models.decoder import CausalLM
from specjax.models.flat import recipes_of
from specjax.models.registry import FAMILIES, HOW_TO_ADD, family_of
from specjax.models.rope import rope_frequencies, rotated_rows
from specjax.text.tokenizer import Tokenizer, set_template, unique_ids

_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate(map(np.dtype, "u1 i1 <u2 <i2 <u4 <i4 <f4 ?".split())))
_SCALARS |= dict(enumerate(map(np.dtype, "<u8 <i8 <f8".split()), 10))
_PLAIN = {
    GGMLQuantizationType.BF16: np.dtype(bfloat16),
    **{GGMLQuantizationType[f"F{8 * n}"]: np.dtype(f"<f{n}") for n in (2, 4, 8)},
    **{GGMLQuantizationType[f"I{8 * n}"]: np.dtype(f"<i{n}") for n in (1, 2, 4, 8)},
}
_MAX_NESTING = 4
_MAX_ENTRIES = 2**16  # keys or tensors of a file
_FREQUENCIES = "rope_freqs.weight"  # divisors of the rotary frequencies


class GGUFTensor(NamedTuple):
    """A stored tensor. ``shape`` has numpy's order: ``[out, in]`` for a matrix."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    path: Path
    data: np.ndarray  # u1 [bytes], mapped


class GGUFFile:
    """An open GGUF file. Open each file once: configuration, weights and tokenizer share it.

    Every length is checked against the rest of the file before reading, so that a damaged file
    never takes more memory than its own size. The tensors must fill the data section in the order
    of their table, aligned and without gaps. The first file of a split model, whose name ends in
    ``-00001-of-0000N.gguf``, opens the others, and has their tensors too.
    """

    def __init__(self, path: str | os.PathLike[str], number: int = 0) -> None:
        """Open the file with this ``number`` of a split model."""
        self.path = Path(path)
        self.tensors: dict[str, GGUFTensor] = {}
        self._at = 0
        try:
            check_regular(self.path)
            self._data: np.ndarray = np.memmap(self.path, np.uint8, "r")
            self._bytes = self._data.data
            values, num_tensors = self._read_metadata()
            self.metadata = Fields(values, self.path)
            self._read_tensor_table(num_tensors, self.metadata.get("general.alignment", Size, 32))
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{self.path} is not a complete GGUF file of version 2 or 3: {error}"
            ) from error
        self._read_split(number)

    def info(self, name: str) -> TensorInfo:
        """Describe a tensor without reading it; quantised types become float32."""
        tensor = self.tensors[name]
        dtype = _PLAIN.get(tensor.kind, np.dtype(np.float32)).name
        return TensorInfo(tensor.shape, tensor.path, dtype)

    def read(self, name: str) -> np.ndarray:
        """Read a tensor in its stored type; quantised types are dequantised to float32."""
        shape, kind, path, data = self.tensors[name]
        if kind in _PLAIN:
            return data.view(_PLAIN[kind]).reshape(shape)
        try:
            return dequantize(data.reshape(*shape[:-1], -1), kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{path}: tensor {name!r} has the type {kind.name}, which the gguf library "
                "does not support; use another GGUF file or a newer gguf"
            ) from error

    def _read_metadata(self) -> tuple[dict[str, Any], int]:
        if self._take(4) != b"GGUF":
            raise ValueError("the file does not start with GGUF")
        version = self._number("<I")
        if version and version & 0xFFFF == 0:
            raise ValueError("the file is big-endian; only little-endian files are supported")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported")
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        values: dict[str, Any] = {}
        for _ in self._entries(num_values, 13):
            key = self._text()
            if key in values:
                raise ValueError(f"the key {key!r} occurs twice")
            values[key] = self._value(self._number("<I"), 0)
        return values, num_tensors

    def _read_tensor_table(self, count: int, alignment: int) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment={alignment} must be a power of two")
        places, end = {}, 0
        for _ in self._entries(count, 24):
            name = self._text()
            if name in places:
                raise ValueError(f"the tensor {name!r} occurs twice")
            dims = [self._number("<Q") for _ in range(self._checked(self._number("<I"), 8))]
            kind, start = GGMLQuantizationType(self._number("<I")), self._number("<Q")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not dims or min(dims) < 1 or dims[0] % block:
                demand = f"a multiple of {block}, the block size of {kind.name}"
                raise ValueError(f"tensor {name!r}: {dims=} must be positive, the first {demand}")
            if start != (expected := _aligned(end, alignment)):
                raise ValueError(f"tensor {name!r} has the offset {start}; it must be {expected}")
            end = start + math.prod(dims) // block * block_bytes
            places[name] = tuple(reversed(dims)), kind, slice(start, end)
        data = self._data[_aligned(self._at, alignment) :]
        if not end <= len(data) <= _aligned(end, alignment):
            raise ValueError(f"tensors have {end} bytes, but the data section has {len(data)}")
        for name, (shape, kind, place) in places.items():
            self.tensors[name] = GGUFTensor(shape, kind, self.path, np.asarray(data[place]))

    def _read_split(self, number: int) -> None:
        """Check the keys of a split model; its first file adds the tensors of the others."""
        data, ending = self.metadata, "-{:05d}-of-{:05d}.gguf"
        count = data.get("split.count", Size, 1)
        if data.get("split.no", Size, 0) != number:
            raise data.wrong("split.no", f"must be {number}; open the first file of a split model")
        if number:
            return
        if count > 1 and not self.path.name.endswith(suffix := ending.format(1, count)):
            raise data.wrong("split.count", f"needs files in one folder named *{suffix} and so on")
        stem = self.path.name.removesuffix(ending.format(1, count))
        for i in range(1, count):
            other = GGUFFile(self.path.with_name(stem + ending.format(i + 1, count)), i)
            if other.metadata.get("split.count", Size, 1) != count:
                raise other.metadata.wrong("split.count", f"must be {count}, as in the first file")
            if repeated := self.tensors.keys() & other.tensors.keys():
                raise ValueError(f"{other.path}: {min(repeated)!r} is in another file too")
            self.tensors |= other.tensors
        if data.get("split.tensors.count", Size, len(self.tensors)) != len(self.tensors):
            raise data.wrong("split.tensors.count", f"must be {len(self.tensors)}")

    def _value(self, kind: int, nesting: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            return self._array(kind, 1)[0]
        if kind != _ARRAY or nesting == _MAX_NESTING:
            raise ValueError(f"type {kind} at byte {self._at}, {nesting} arrays deep, is not valid")
        item, length = self._number("<I"), self._number("<Q")
        if item in _SCALARS:
            return self._array(item, length)
        # minimum bytes of an item: a string begins with its length, an array with type and length
        self._checked(length, 8 if item == _STRING else 12)
        return [self._value(item, nesting + 1) for _ in range(length)]

    def _array(self, kind: int, length: int) -> list[Any]:
        dtype = _SCALARS[kind]
        values = np.frombuffer(self._take(length * dtype.itemsize), dtype)
        if dtype != np.float32:
            return values.tolist()
        # shortest decimal of the same float32: 1e-05 instead of 9.999999747378752e-06
        return [float(str(value)) for value in values]

    def _text(self) -> str:
        return str(self._take(self._number("<Q")), "utf-8")

    def _number(self, layout: str) -> int:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _checked(self, count: int, size: int) -> int:
        """Return ``count`` if the file has ``size`` bytes left for each item."""
        remaining = len(self._bytes) - self._at
        if count * size > remaining:
            raise ValueError(f"{count} * {size} bytes at byte {self._at} exceed the file's size")
        return count

    def _entries(self, count: int, size: int) -> range:
        if count > _MAX_ENTRIES:
            raise ValueError(f"{count} keys or tensors exceed the limit of {_MAX_ENTRIES}")
        return range(self._checked(count, size))

    def _take(self, size: int) -> memoryview:
        start = self._at
        self._at = start + self._checked(size, 1)
        return self._bytes[start : self._at]


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def gguf_source(file: GGUFFile, config: ModelConfig) -> TensorSource:
    """Present a GGUF file as a source of tensors with Hugging Face names and layout."""
    (arch,) = (arch for arch, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    map_name = get_tensor_name_map(arch, config.num_layers).get_name
    recipes = recipes_of(CausalLM, config)
    names = (tensor.name for recipe in recipes.values() for tensor in recipe.parts)
    named = {map_name(name, (".weight", ".bias")): name for name in names}
    stored = {named[name]: name for name in file.tensors if name in named}
    if unknown := sorted(file.tensors.keys() - named.keys() - {_FREQUENCIES}):
        name = unknown[0]
        raise ValueError(f"{file.tensors[name].path}: the model does not use the tensor {name!r}")
    rows: dict[str, np.ndarray] = {}
    if family_of(config).gguf == "interleaved":
        # the converter interleaves the halves of each head
        for name, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            rows[name] = rotated_rows(heads, config.head_dim, config.head_dim, interleaved=True)

    def read(name: str) -> np.ndarray:
        array, module = file.read(stored[name]), name.split(".")[-2]
        return array[rows[module]] if module in rows else array

    return TensorSource(file.path, {name: file.info(stored[name]) for name in stored}, read)


# keys of an architecture that are read; those of the last two lines change no logits
_KEYS = set(
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
    "attention.layer_norm_rms_epsilon attention.sliding_window block_count context_length "
    "embedding_length feed_forward_length expert_count rope.dimension_count rope.freq_base "
    "rope.scaling.type rope.scaling.factor "
    "expert_used_count pooling_type rope.scaling.finetuned rope.scaling.original_context_length "
    "tensor_data_layout vocab_size".split()
)


def gguf_config(file: GGUFFile, dtype: str) -> ModelConfig:
    """Read the configuration from the metadata and tensor table of a GGUF file."""
    if dtype == "auto":
        kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
        dtype = "float32" if kinds <= {"F32"} else "bfloat16"
    arch = file.metadata.get("general.architecture", str, None)
    supported = tuple(name for name, family in FAMILIES.items() if family.gguf)
    if arch not in supported:
        demand = f"is not supported; supported: {supported}; {HOW_TO_ADD}"
        raise file.metadata.wrong("general.architecture", demand)
    keys = _architecture_keys(file, arch)
    if unknown := sorted(keys.values.keys() - _KEYS):
        raise keys.wrong(unknown[0], "is not supported")
    if keys.get("expert_count", Size, 0):
        raise ValueError(f"{file.path}: mixture-of-experts models are not supported")
    hidden = keys.get("embedding_length", Size)
    heads = keys.get("attention.head_count", PositiveSize)
    head_dim = keys.get("attention.key_length", Size, hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, Size, head_dim) != head_dim:
            raise keys.wrong(key, f"must be the head dimension {head_dim}")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor 'token_embd.weight'")
    theta = keys.get("rope.freq_base", float, 10000.0)
    window = keys.get("attention.sliding_window", Size, 0)
    values = {
        "model_type": arch,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.get("feed_forward_length", Size),
        "num_layers": keys.get("block_count", Size),
        "num_heads": heads,
        "num_kv_heads": keys.get("attention.head_count_kv", Size, heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", float),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, keys, head_dim, theta),
        "max_position_embeddings": keys.get("context_length", Size),
        "dtype": dtype,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "output_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "eos_token_ids": eos_token_ids(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id", Size, None),
    }
    config = file.metadata.build(FAMILIES[arch].config, values)
    # the configuration has a limit for the number of layers
    return replace(config, windows=(window,) * config.num_layers) if window else config


def _architecture_keys(file: GGUFFile, arch: str) -> Fields:
    values = {}
    for key, value in file.metadata.values.items():
        if key.startswith(f"{arch}."):
            is_alike = isinstance(value, list) and value and all(x == value[0] for x in value)
            values[key.removeprefix(f"{arch}.")] = value[0] if is_alike else value
    return Fields(values, f"{file.path}: {arch}")


def _rope_scaling(file: GGUFFile, keys: Fields, head_dim: int, theta: float) -> RopeScaling | None:
    # as in llama.cpp, a factor without a type is linear
    default = "linear" if "rope.scaling.factor" in keys else "none"
    kind = keys.get("rope.scaling.type", str, default)
    if _FREQUENCIES in file.tensors and kind == "none":
        return _llama3_scaling(file, head_dim, theta)
    if _FREQUENCIES in file.tensors or kind not in ("none", "linear"):
        demand = "is not supported; supported: 'none', 'linear' and Llama 3.1's rope_freqs.weight"
        raise keys.wrong("rope.scaling.type", demand)
    if kind == "none":
        return None
    factor = keys.get("rope.scaling.factor", float, 1.0)
    return keys.build(RopeScaling, {"rope_type": "linear", "factor": factor})


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> RopeScaling:
    """Find the Llama 3.1 scaling whose frequency divisors the file stores."""
    divisors = np.asarray(file.read("rope_freqs.weight"), np.float32)
    scaling = RopeScaling(rope_type="llama3", factor=min(max(1.0, float(divisors.max())), 1e6))
    if theta > 0 and divisors.shape == (head_dim // 2,):
        plain, scaled = (rope_frequencies(Rope(head_dim, theta, x)) for x in (None, scaling))
        if np.allclose(divisors, plain / scaled, rtol=1e-4):
            return scaling
    raise ValueError(
        f"{file.path}: rope_freqs.weight {divisors.shape} must be the Llama 3.1 scaling (factor "
        f"{scaling.factor} over 8192 positions); other scalings are not supported"
    )


_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# `tokenizer.ggml.pre` -> regular expression that splits text before merging. None is GPT-2's split,
# which is built into `tokenizers`. transformers also uses GPT-2's split for `smollm` files.
_SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("default", "gpt-2", "smollm"), None),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer of a GGUF file.

    It encodes as transformers does with the same file (``gguf_file=``): control tokens are special,
    user-defined tokens are matched whole, and ``tokenizer.ggml.pre`` selects the split.
    """
    data = file.metadata
    for key, default, supported in (("model", None, ["gpt2"]), ("pre", "default", sorted(_SPLITS))):
        if data.get(f"tokenizer.ggml.{key}", str, default) not in supported:
            raise data.wrong(
                f"tokenizer.ggml.{key}",
                f"is not supported; supported: {supported} (byte-level BPE). Use the Hugging Face "
                "directory of the model, or set skip_tokenizer_init=True and pass input_ids",
            )
    tokens: list[str] = data.get("tokenizer.ggml.tokens", list[str])
    kinds: list[int] = data.get("tokenizer.ggml.token_type", list[int], [])
    merges = [tuple(merge.split(" ", 1)) for merge in data.get("tokenizer.ggml.merges", list[str])]
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {
        # some converters store added tokens as plain text, but merges use the byte spelling
        token if set(token) <= letters else spell.pre_tokenize_str(token)[0][0]: i
        for i, token in enumerate(tokens)
    }
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{file.path}: invalid BPE vocabulary: {error}") from error
    backend.decoder = decoders.ByteLevel()
    split = _SPLITS[data.get("tokenizer.ggml.pre", str, "default")]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    splits = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    for added_kind, add in (
        (_CONTROL, backend.add_special_tokens),
        (_USER_DEFINED, backend.add_tokens),  # matched whole
    ):
        # skip entries outside the byte alphabet: the vocabulary has them under their byte spelling
        add(
            [
                AddedToken(token, normalized=False, special=added_kind == _CONTROL)
                for token, kind in zip(tokens, kinds, strict=False)
                if kind == added_kind and set(token) <= letters
            ]
        )
    special = _special_tokens(file, tokens)
    named = dict.fromkeys(special.values())
    backend.add_special_tokens([AddedToken(x, normalized=False, special=True) for x in named])
    set_template(backend, special, data, "tokenizer.ggml.")
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=data.get("tokenizer.chat_template", str, None),
        extra_eos_token_ids=eos_token_ids(file),
    )


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text, a turn or a message."""
    keys = (f"tokenizer.ggml.{x}_token_id" for x in ("eos", "eot", "eom"))
    return unique_ids(file.metadata.get(key, Size, None) for key in keys)


def _special_tokens(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    special = {}
    for name, stored in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        key = f"tokenizer.ggml.{stored}_token_id"
        if key in file.metadata:
            if (token_id := file.metadata.get(key, Size)) >= len(tokens):
                demand = f"is outside the vocabulary of {len(tokens)} tokens"
                raise file.metadata.wrong(key, demand)
            special[f"{name}_token"] = tokens[token_id]
    return special

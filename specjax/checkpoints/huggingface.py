"""Read configurations of targets and draft heads from the JSON files of Hugging Face directories.

Heads come in three formats: that of the original EAGLE repository, that of SGLang and SpecForge
(``eagle_config``), and that of speculators (a nested ``transformer_layer_config``).
"""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from specjax.checkpoints.keys import ReadFields, refuse_unread
from specjax.checkpoints.packed_files import open_weights
from specjax.checkpoints.quantization import (
    PACKED,
    plain_projections,
    read_kv_exponents,
)
from specjax.checkpoints.quantization_config import read_quantization
from specjax.checkpoints.stacks import unstacked
from specjax.checkpoints.tensors import TensorSource
from specjax.checks import short
from specjax.config import DTYPES, Count, DraftConfig, Epsilon, ModelConfig, TransformerConfig
from specjax.json_file import Fields, Flag, PositiveSize, Size
from specjax.models.decoder import CausalLM
from specjax.models.family import sliding_layers
from specjax.models.flat import recipes_of
from specjax.models.layers import ACTIVATIONS
from specjax.models.registry import FAMILIES, WRAPPERS, load_family, refusal
from specjax.models.rope import read_rope
from specjax.text.tokenizer import find_eos_token_id, unique_ids

C = TypeVar("C", bound=TransformerConfig)

logger = logging.getLogger(__name__)

# stored dtype -> dtype of computation
_DTYPES = {name: name for name in DTYPES} | {"float16": "bfloat16", "float64": "float32"}


def huggingface_config(directory: Path, dtype: str, *, of_draft: bool = False) -> ModelConfig:
    """Read ``config.json`` and the other JSON files of a directory.

    ``of_draft`` also refuses unknown keys that may change the network. For targets, they have no
    effect: their network is that of the class in ``architectures``, which does not read them.
    """
    top = Fields.read(directory / "config.json")
    config, model_type = top, top.get("model_type", str, None)
    is_wrapped = model_type in WRAPPERS
    if is_wrapped:
        config = top.fields("text_config")
        model_type = config.get("model_type", str, WRAPPERS[model_type])
    load_family(model_type)
    if model_type not in FAMILIES:
        raise config.wrong("model_type", refusal(model_type))
    family = FAMILIES[model_type]
    named = top.get("architectures", list[str], [])
    if named and not is_wrapped and family.architecture not in named:
        demand = f"is not supported for model_type={model_type!r}; supported: {family.architecture}"
        raise config.wrong("architectures", demand)
    # null means that the model lacks the feature, not that it has the default
    config = ReadFields({**family.defaults, **config.values}, config.where)
    values = layer_sizes(config) | {
        "model_type": model_type,
        "vocab_size": config.get("vocab_size", PositiveSize),
        "num_layers": config.get("num_hidden_layers", Count),
        "max_position_embeddings": config.get("max_position_embeddings", PositiveSize),
        "dtype": _resolve_dtype(top, directory) if dtype == "auto" else dtype,
        "tie_word_embeddings": config.get("tie_word_embeddings", Flag, False),
        "eos_token_ids": _eos_token_ids([top, config], directory),
        "bos_token_id": next(iter(top.ids("bos_token_id") or config.ids("bos_token_id")), None),
    }
    source = cache(partial(open_text, directory))  # of large models, it reads many files
    method = top.fields("quantization_config").get("quant_method", Any, None)
    if "quantization_config" in top and method not in family.quant_methods:
        values["quantization"] = read_quantization(top)
        _report_unmatched(top.fields("quantization_config"), source())
    if values.get("quantization") is not None:
        values["kv_exponents"] = read_kv_exponents(source(), values["num_layers"])
    if is_wrapped:  # their settings for the text model are often absent or wrong
        heads = {"lm_head.weight", f"lm_head.weight{PACKED}"}
        values["tie_word_embeddings"] = heads.isdisjoint(source().infos)
    values |= family.read(config)
    refuse_unread([config], config.keys, values["head_dim"], of_draft=of_draft)
    return with_plain(config.build(family.config, values), source)


def with_plain(config: C, open_source: Callable[[], TensorSource], network: Any = CausalLM) -> C:
    """The configuration with the projections that a quantised checkpoint stores whole.

    If it stores all of them whole, they are not quantised.
    """
    if (format := config.quantization) is None:
        return config
    recipes = recipes_of(network, config)
    plain = plain_projections(unstacked(open_source(), recipes), recipes)
    names = {
        x.name for key, recipe in recipes.items() if key.endswith(".values") for x in recipe.parts
    }
    is_whole = names == {f"{name}.weight" for name in plain}
    return replace(config, quantization=None if is_whole else replace(format, plain=plain))


def has_tensor(source: TensorSource, name: str) -> bool:
    """Whether a file has a tensor, or the packed integers of one that is quantised."""
    return name in source.infos or name + PACKED in source.infos


def _report_unmatched(stated: Fields, source: TensorSource) -> None:
    """Warn of modules that are whole by name, but not in the file; patterns are not compared."""
    stored = "".join(f".{name}." for name in source.infos)
    # tied output heads are not stored, and tensors of images are not opened
    ignored = re.compile(rf"re:|(.*\.)?lm_head\.$|{OF_IMAGES.pattern}")
    for key in ("ignore", "modules_to_not_convert"):
        names = [x for x in stated.get(key, list[str], []) if not ignored.match(f"{x}.")]
        if absent := [name for name in names if f".{text_name(name)}." not in stored]:
            text = "%s: %s names modules that the file lacks: %s"
            logger.warning(text, stated.where, key, short(absent))


def open_text(directory: Path) -> TensorSource:
    """Open the tensors of a directory, of a model with images only those of its text model."""
    source = open_weights(directory)
    names = [name for name in source.infos if not OF_IMAGES.match(name)]
    named = {text_name(name): name for name in names}
    if hidden := sorted(set(names) - set(named.values())):
        raise ValueError(f"{source.infos[hidden[0]].path} has a second {text_name(hidden[0])!r}")
    infos = {name: source.infos[stored] for name, stored in named.items()}
    return TensorSource(source.path, infos, lambda name: source.read(named[name]))


def text_name(name: str) -> str:
    """The name that a tensor of a model with images has in a text model."""
    return name.replace("language_model.", "", 1)


# tensors of the parts that read images or sound
_PARTS = "vision_(tower|model|adapter|projection)|multi_modal_projector|visual|audio_tower"
_PARTS += "|embed_(vision|audio)"
OF_IMAGES = re.compile(rf"(model\.)?({_PARTS})\.")


def layer_sizes(config: Fields) -> dict[str, Any]:
    """Read the layer settings whose keys are the same for targets and draft heads."""
    key = "hidden_activation" if "hidden_activation" in config else "hidden_act"
    activation = config.get(key, str, "silu")
    if activation not in ACTIVATIONS:
        raise config.wrong(key, f"is not supported; supported: {sorted(ACTIVATIONS)}")
    heads = config.get("num_attention_heads", Count)
    hidden = config.get("hidden_size", PositiveSize)
    head_dim = config.get("head_dim", Count, max(1, hidden // heads))
    kv_heads = config.get("num_key_value_heads", Count, heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"must divide num_attention_heads={heads}")
    return {
        "hidden_size": hidden,
        "intermediate_size": config.get("intermediate_size", PositiveSize),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "activation": activation,
        "rms_norm_eps": config.get("rms_norm_eps", Epsilon, 1e-6),
        **read_rope(config, head_dim),
    }


def _resolve_dtype(config: Fields, directory: Path) -> str:
    named = config.get("dtype", str, config.get("torch_dtype", str, "auto")).removeprefix("torch.")
    if named == "auto":
        info = open_text(directory).infos.get("model.norm.weight")
        if info is None:
            raise ValueError(f"{directory} has no tensor 'model.norm.weight'")
        named = info.dtype
    if named not in _DTYPES:
        raise ValueError(
            f"{config.where}: dtype {named!r} is not supported; pass dtype='float32' or 'bfloat16'"
        )
    if named == "float16":
        logger.info("loading float16 weights of %s as bfloat16", directory)
    return _DTYPES[named]


def _eos_token_ids(configs: list[Fields], directory: Path) -> tuple[int, ...]:
    """Return the end tokens from generation_config.json, config.json and the tokenizer."""
    generation = Fields.read_if_there(directory / "generation_config.json")
    ids = [i for fields in (generation, *configs) for i in fields.ids("eos_token_id")]
    return unique_ids([*ids, find_eos_token_id(directory)])


_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# defaults of transformers by ``model_type``; files from speculators omit keys with these values
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
    },
}
# keys that may contain the id of the mask token
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def draft_config(directory: Path, source: TensorSource, target: ModelConfig) -> DraftConfig:
    """Read a head's configuration for a target; tensors have canonical names (``midlayer.*``)."""
    head = _Head(directory, source, target)
    is_eagle3 = head.has("midlayer.hidden_norm.weight")
    layer = "midlayer" if is_eagle3 else "layers.0"
    stated = head.body.get("target_hidden_size", Size, target.hidden_size)
    values = draft_sizes(head.layer, stated, target) | {
        "num_layers": head.layer.get("num_hidden_layers", Count, head.num_layers),
        "qkv_bias": head.has(f"{layer}.self_attn.q_proj.bias"),
        "output_bias": head.has(f"{layer}.self_attn.o_proj.bias"),
        "mlp_bias": head.has(f"{layer}.mlp.up_proj.bias"),
        "qk_norm": head.has(f"{layer}.self_attn.q_norm.weight"),
    }
    for key, has_bias in {"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"}.items():
        if head.layer.get(key, Flag, False) and not values[has_bias]:
            raise head.layer.wrong(key, f"needs biases, but {source.path} has none in {layer!r}")
    windows = draft_windows(head.layer, values["num_layers"])[1]
    values["windows"] = windows if any(windows) else ()
    values |= _eagle3_values(head) if is_eagle3 else _eagle_values(head)
    refuse_unread(head.sections, head.body.keys, values["head_dim"], of_draft=True)
    return head.body.build(DraftConfig, values)


def draft_windows(
    config: ReadFields, num_layers: int, forced: bool = False
) -> tuple[list[bool], tuple[int, ...]]:
    """Read which layers of a draft slide, and the window of each layer, 0 for none.

    Without ``layer_types``, those from ``max_window_layers`` on slide if ``use_sliding_window`` is
    set. ``forced`` gives a window to all layers.
    """
    # files of speculators omit keys with the default of the model type
    is_qwen = config.get("model_type", str, "").startswith("qwen")
    start = config.get("max_window_layers", Size, 28 if is_qwen else 0)
    window = config.get("sliding_window", Size, config.get("swa_window_size", Size, 0))
    is_on = config.get("use_sliding_window", Flag, False if is_qwen or forced else None)
    if window and is_on is None and "layer_types" not in config:
        demand = "needs layer_types, or use_sliding_window; set one to tell which layers have it"
        raise config.wrong("sliding_window", demand)
    values = {**config.values, "num_hidden_layers": num_layers}
    sized = ReadFields(values, config.where, config.keys)
    sized.get("num_hidden_layers", Count)
    slides = sliding_layers(sized, lambda i: bool(is_on and window) and i >= start)
    if (forced or any(slides)) and not window:
        raise ValueError(f"{config.where}: layers with sliding attention need sliding_window")
    return slides, tuple(window if forced or slide else 0 for slide in slides)


ANOTHER_HEAD = "set draft to a head of this target, or speculative_algorithm to 'NGRAM'"


def check_pair(path: object, vocab_size: int, hidden_size: int, target: ModelConfig) -> None:
    """Raise ValueError if the vocabulary or hidden size of a head differs from the target's."""
    for name, size, of_target in (
        ("vocab_size", vocab_size, target.vocab_size),
        ("target_hidden_size", hidden_size, target.hidden_size),
    ):
        if size != of_target:
            raise ValueError(
                f"{path}: the head has {name}={size}, but the target has {of_target}; the head was "
                f"trained for another model; {ANOTHER_HEAD}"
            )


def check_feature_layers(
    path: Path, layers: tuple[int, ...], wording: str, target: ModelConfig, *, start: int = 0
) -> None:
    """Raise ValueError if the target lacks a layer; ``start`` -1 also accepts the embedding."""
    if not all(start <= layer < target.num_layers for layer in layers):
        raise ValueError(
            f"{path}: {wording} must be layers of the target, which has {target.num_layers} layers"
            f"{' (-1 is the embedding)' if start else ''}; {ANOTHER_HEAD}"
        )


def check_fc(source: TensorSource, in_size: int, meaning: str) -> None:
    """Raise ValueError if the projection of a draft's inputs is missing or has another width.

    That of packed integers is checked when they are opened.
    """
    if (info := source.infos.get("fc.weight")) is None:
        if has_tensor(source, "fc.weight"):
            return
        raise ValueError(f"{source.path} has no tensor 'fc.weight'")
    if info.shape[1:] != (in_size,):
        raise ValueError(
            f"tensor 'fc.weight' in {info.path} has shape {info.shape}, but {meaning} make "
            f"{in_size} inputs; the draft was trained for another target or other layers"
        )


class _Head:
    """Access to the configuration and tensors of a head in any of the formats."""

    def __init__(self, directory: Path, source: TensorSource, target: ModelConfig) -> None:
        self.path = directory / "config.json"
        self.source, self.target = source, target
        self.body = ReadFields(Fields.read(self.path).values, self.path)
        self.eagle = self.body.fields("eagle_config")
        self.is_speculators = "transformer_layer_config" in self.body
        nested = self.body.fields("transformer_layer_config")
        self.sections = (self.body, nested, self.eagle)
        defaults = DEFAULTS.get(nested.get("model_type", str, ""), {})
        outer = {**self.body.values, **self.eagle.values}
        stated = {key: value for key, value in outer.items() if value is not None}
        values = {**defaults, **nested.values, **stated}
        self.layer = ReadFields(values, self.path, self.body.keys)
        self.hidden_size = self.layer.get("hidden_size", Size)

    def flag(self, name: str, default: bool = False) -> bool:
        """Read a switch from the top level or from ``eagle_config``."""
        return self.body.get(name, Flag, self.eagle.get(name, Flag, default))

    def has(self, tensor: str) -> bool:
        return has_tensor(self.source, tensor)

    @property
    def num_layers(self) -> int:
        """Number of layers that have tensors; the first one may be called ``midlayer``."""
        matches = (re.match(r"layers\.(\d+)\.", name) for name in self.source.infos)
        return 1 + max((int(match[1]) for match in matches if match), default=0)

    def lacks(self, tensor: str, why: str) -> ValueError:
        return ValueError(f"{self.source.path} has no tensor {tensor!r}{why}")


def draft_sizes(layer: Fields, stated: int, target: ModelConfig) -> dict[str, Any]:
    """Read sizes and rotary settings of a draft whose target has the ``stated`` hidden size."""
    vocab_size = layer.get("vocab_size", Size, target.vocab_size)
    check_pair(layer.where, vocab_size, stated, target)
    # published drafts often state 2048: their training length, not a limit
    context = layer.get("max_position_embeddings", Size, 1)
    return layer_sizes(layer) | {
        "vocab_size": vocab_size,
        "max_position_embeddings": max(context, target.max_position_embeddings),
        "dtype": target.dtype,
        "target_hidden_size": target.hidden_size,
        "quantization": read_quantization(layer),
    }


def _eagle_values(head: _Head) -> dict[str, Any]:
    """Read an EAGLE-1/2 head: it uses the target's embeddings and output head, not its own."""
    target = head.target
    if head.hidden_size != target.hidden_size:
        raise ValueError(
            f"{head.path}: hidden_size={head.hidden_size} differs from the target's "
            f"{target.hidden_size}; an EAGLE-1/2 head uses the target's output head and must match"
        )
    check_fc(head.source, 2 * target.hidden_size, "the embedding and the target's hidden state")
    return {
        "checkpoint_format": "eagle-1",
        "draft_vocab_size": target.vocab_size,
        # the original code uses a bias unless the configuration disables it
        "fc_bias": head.body.get("bias", Flag, True),
        "has_own_embedding": False,
        "has_own_lm_head": False,
    }


def _eagle3_values(head: _Head) -> dict[str, Any]:
    target, layers = head.target, _feature_layers(head)
    if not head.flag("use_aux_hidden_state", True):
        raise ValueError(f"{head.path}: use_aux_hidden_state=false is not supported")
    meaning = f"{len(layers)} features of the target's hidden_size={target.hidden_size}"
    check_fc(head.source, len(layers) * target.hidden_size, meaning)
    infos = head.source.infos
    stored = [infos[name].shape for name in ("d2t", "lm_head.weight") if name in infos]
    vocab_sizes = [*(next(iter(shape), 0) for shape in stored), target.vocab_size]
    vocab_size = head.layer.get("draft_vocab_size", Size, vocab_sizes[0])
    sizes = (
        f"draft_vocab_size={vocab_size} of {target.vocab_size}, hidden_size={head.hidden_size} "
        f"(target {target.hidden_size})"
    )
    same_width = head.hidden_size == target.hidden_size
    own_embedding, own_head = head.has("embed_tokens.weight"), head.has("lm_head.weight")
    if not own_embedding and not same_width:
        raise head.lacks(
            "embed_tokens.weight", f", and the target's embeddings do not fit: {sizes}"
        )
    tied = not own_head and head.layer.get("tie_word_embeddings", Flag, False)
    has_other_head = same_width or (tied and own_embedding)
    if not own_head and not (vocab_size == target.vocab_size and has_other_head):
        raise head.lacks("lm_head.weight", f", and no other output head fits: {sizes}")
    mask_token = _mask_token(head)
    is_residual_normed = head.is_speculators and mask_token is None
    return {
        "checkpoint_format": "eagle-3",
        "draft_vocab_size": vocab_size,
        "feature_layers": layers,
        "fc_bias": head.has("fc.bias"),
        "has_own_embedding": own_embedding,
        # if the file has an output head, it is used even if the configuration says tied
        "has_own_lm_head": own_head,
        "ties_lm_head": tied,
        "norm_before_residual": head.flag("norm_before_residual", is_residual_normed),
        # if the configuration has no switch, the tensors decide
        "norm_before_fc": head.flag("norm_before_fc", head.has("input_norm.weight")),
        "has_fc_norm": head.flag("fc_norm", head.has("fc_norm.0.weight")),
        "norm_output": head.flag("norm_output"),
        "mask_token_id": mask_token,
    }


def _mask_token(head: _Head) -> int | None:
    """Read the mask token of a P-EAGLE head; ``None`` for other EAGLE-3 heads."""
    is_masked = head.body.get("speculators_model_type", str, None) == "peagle"
    is_masked |= "PEagleDraftModel" in head.body.get("architectures", list[str], [])
    if not head.has("mask_hidden"):
        if is_masked:
            raise head.lacks("mask_hidden", ", which a P-EAGLE head needs")
        return None
    for section in (head.body, head.eagle):
        for key in MASK_KEYS:
            if (token := section.get(key, Size, None)) is not None:
                return int(token)
    raise ValueError(
        f"{head.path} has none of {list(MASK_KEYS)}, but a P-EAGLE head needs its mask token; set "
        "mask_token_id in this file"
    )


def _feature_layers(head: _Head) -> tuple[int, ...]:
    """Read the target layers whose outputs are the auxiliary hidden states.

    In ``eagle_config`` the ids are layer indices, unless the largest is the number of layers. Then
    they count hidden states, as at the top level (speculators). Of these, 0 is the embedding, so id
    ``k`` is the output of layer ``k - 1``.
    """
    if ids := head.eagle.get(_LAYER_IDS, list[int], []):
        first = int(max(ids) == head.target.num_layers)
        layers, where = tuple(i - first for i in ids), f"eagle_config.{_LAYER_IDS}={ids}"
    elif ids := head.body.get(_LAYER_IDS, list[int], []):
        layers, where = tuple(i - 1 for i in ids), f"{_LAYER_IDS}={ids}"
    else:
        layers = head.target.default_feature_layers
        where = f"the default for {head.target.num_layers} layers, {layers}"
    check_feature_layers(head.path, layers, f"feature layers {where}", head.target)
    return layers

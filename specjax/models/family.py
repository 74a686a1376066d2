"""Describe a model family: what its configurations say, and how its layers differ from Llama's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specjax.config import BlockConfig, DraftConfig, ModelConfig, Rope
from specjax.json_file import Fields, Flag, Size
from specjax.models.layers import LayerKind


def draft_kinds(
    config: DraftConfig | BlockConfig, implementation: str | None = None, shards: int = 1
) -> tuple[LayerKind, ...]:
    """The kinds of a draft's layers, which differ only in their windows."""
    windows = config.windows or (0,) * config.num_layers
    kind = partial(LayerKind.of, config, implementation=implementation, shards=shards)
    return tuple(kind(window=window or None) for window in windows)


def alike(config: ModelConfig, **differences: Any) -> tuple[LayerKind, ...]:
    """Describe layers that differ only in their windows and rotary embeddings."""
    options = {"scale": config.attention_scale, "softcap": config.attention_softcap}

    def kind(window: int, rope: Rope | None) -> LayerKind:
        varying = {"window": window or None, "rope": rope or config.rope}
        return LayerKind.of(config, **{**options, **varying, **differences})

    windows = config.windows or (0,) * config.num_layers
    ropes = config.layer_ropes or (None,) * config.num_layers
    return tuple(kind(*pair) for pair in zip(windows, ropes, strict=True))


@dataclass(frozen=True, kw_only=True)
class GGUF:
    """How GGUF files of llama.cpp's converter differ from Hugging Face directories of a family.

    Of families with the same ``arch``, the last one whose ``needs`` a file has reads it.
    """

    arch: str  # general.architecture
    interleaved: bool = False  # the converter interleaves the halves of query and key heads
    needs: tuple[str, ...] = ()  # keys that all files of the family have
    # values of config.json that follow from others, and which files leave out
    derive: Callable[[Fields], dict[str, Any]] = field(default=lambda config: {})


MTP_PREFIX = "model.mtp_layers."


@dataclass(frozen=True, kw_only=True)
class Modules:
    """How files store modules for multi-token prediction (MTP). The defaults are MiMo's.

    ``at`` is the prefix of the tensors of a module: ``{index}`` counts modules, and ``{layer}``
    continues the numbers of the target's layers. Without a number, there is one module.
    """

    at: str = MTP_PREFIX + "{index}."
    layer: str = ""  # follows ``at`` in the names of the tensors of its layer
    hidden_norm: str = "hidden_layernorm"
    token_norm: str = "token_layernorm"
    projection: str = "input_proj"  # of both inputs, joined
    norm: str = "final_layernorm"
    is_token_first: bool = False  # inputs are joined as [embedding, state], not [state, embedding]
    # tensors that repeat the target's embeddings and its output head
    copies: tuple[str, str] | None = None

    @property
    def is_numbered(self) -> bool:
        return "{" in self.at

    def prefix(self, first_layer: int, index: int) -> str:
        """The prefix of a module's tensors. ``first_layer`` is the layer number of module 0."""
        return self.at.format(index=index, layer=first_layer + index)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: its configuration reader and the kinds of its layers."""

    architecture: str  # the transformers class whose weights the family reads
    # reads the fields of a configuration that only this family has
    read: Callable[[Fields], dict[str, Any]]
    layers: Callable[[ModelConfig], tuple[LayerKind, ...]] = alike
    config: type[ModelConfig] = ModelConfig
    defaults: Mapping[str, Any] = field(default_factory=dict)  # keys that config.json may omit
    gguf: GGUF | None = None  # None: GGUF files are refused
    quant_methods: tuple[str, ...] = ()  # of quantization_config, which ``read`` reads itself
    modules: Modules = Modules()


def attention_biases(config: Fields) -> dict[str, Any]:
    has_bias = config.get("attention_bias", Flag, False)
    return {"qkv_bias": has_bias, "output_bias": has_bias}


def head_dim_of(config: Fields) -> int:
    """The head dimension, which files may leave out."""
    heads = config.get("num_attention_heads", Size)
    return config.get("head_dim", Size, config.get("hidden_size", Size) // heads)


def unrotated(config: Fields) -> Rope:
    """The rotary embedding of layers without one."""
    return Rope(head_dim_of(config), 1.0, rotary_dim=0)


def sliding_layers(config: Fields, slides: Callable[[int], bool]) -> list[bool]:
    """Read which layers have a window; ``slides(i)`` decides without ``layer_types``."""
    kinds, count = config.get("layer_types", list[str], []), config.get("num_hidden_layers", Size)
    if unknown := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        raise config.wrong("layer_types", f"has kinds {unknown} that are not supported")
    if kinds and len(kinds) != count:
        raise config.wrong("layer_types", f"must name the kinds of {count} layers")
    return [kind == "sliding_attention" for kind in kinds] or [slides(i) for i in range(count)]


def layer_windows(config: Fields, slides: Callable[[int], bool]) -> dict[str, Any]:
    """Read the windows of layers, as for :func:`sliding_layers`."""
    window, are = config.get("sliding_window", Size, 0), sliding_layers(config, slides)
    if not window or not any(are):
        return {}
    return {"windows": tuple(window if is_local else 0 for is_local in are)}

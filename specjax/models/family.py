"""What a model family says of itself, and what families share to say it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specjax.config import ModelConfig
from specjax.json_file import Fields, Flag, Size
from specjax.models.layers import LayerKind
from specjax.models.recipes import Recipe, decoder_layer


def alike(config: ModelConfig, **differences: Any) -> tuple[LayerKind, ...]:
    """Layers of one kind."""
    kind = LayerKind.of(config, window=config.sliding_window, **differences)
    return (kind,) * config.num_layers


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: the reader of its configuration, its layer kinds, its recipe of tensors."""

    architecture: str  # the class of transformers whose weights it reads
    # fields of ``config`` that config.json has for this family, besides sizes and tokens
    read: Callable[[Fields], dict[str, Any]]
    layers: Callable[[ModelConfig], tuple[LayerKind, ...]] = alike
    # recipe(config, kind, flat, prefix): the tensors of a layer, whose flat and stored names begin
    # with ``flat`` and ``prefix``
    recipe: Callable[[ModelConfig, LayerKind, str, str], dict[str, Recipe]] = decoder_layer
    config: type[ModelConfig] = ModelConfig
    hidden_act: tuple[str, ...] = ("silu", "swish")  # names of the activation in config.json
    # order of query and key rows in GGUF files: "halves" or "interleaved"; None: they are not read
    gguf: str | None = None


def attention_biases(config: Fields) -> dict[str, Any]:
    has_bias = config.get("attention_bias", Flag, False)
    return {"qkv_bias": has_bias, "output_bias": has_bias}


def sliding_window(config: Fields) -> int | None:
    """The attention window of all layers, None if none applies within the context."""
    window = config.get("sliding_window", Size, 0)
    if not window:
        return None
    num_layers = config.get("num_hidden_layers", Size)
    if kinds := config.get("layer_types", list[str], []):
        count = kinds.count("sliding_attention")
    else:
        first = config.get("max_window_layers", Size, 0) if "use_sliding_window" in config else 0
        count = max(0, num_layers - first)
    if not count or window >= config.get("max_position_embeddings", Size):
        return None
    if count < num_layers:
        raise ValueError(
            f"{config.where}: a sliding window in {count} of {num_layers} layers is not supported; "
            "all layers or none must have one"
        )
    return int(window)

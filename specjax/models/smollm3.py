"""SmolLM3: a Llama in which every fourth layer has no rotary embedding."""

from dataclasses import dataclass, replace
from typing import Any

from specjax.config import ModelConfig
from specjax.json_file import Fields, Flag, PositiveSize, Size
from specjax.models.family import Family, alike, attention_biases, layer_windows
from specjax.models.layers import LayerKind


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(ModelConfig):
    """Llama's sizes, and the layers that rotate queries and keys."""

    rotates: tuple[bool, ...]


def _smollm3(config: Fields) -> dict[str, Any]:
    count = config.get("num_hidden_layers", Size)
    every = config.get("no_rope_layer_interval", PositiveSize, 4)
    default = [(i + 1) % every != 0 for i in range(count)]
    stated = config.get("no_rope_layers", list[int], [])[:count]
    rotates = tuple(map(bool, stated)) if stated else tuple(default)
    if len(rotates) != count:
        raise config.wrong("no_rope_layers", f"must have a value for each of {count} layers")
    is_on = config.get("use_sliding_window", Flag, False)
    return {
        **attention_biases(config),
        **(layer_windows(config, lambda i: not rotates[i]) if is_on else {}),
        "mlp_bias": config.get("mlp_bias", Flag, False),
        "rotates": rotates,
    }


def _layers(config: Any) -> tuple[LayerKind, ...]:
    kinds = zip(alike(config), config.rotates, strict=True)
    still = config.rope._replace(scaling=None, rotary_dim=0)
    return tuple(kind if rotates else replace(kind, rope=still) for kind, rotates in kinds)


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    read=_smollm3,
    layers=_layers,
    config=SmolLM3Config,
    defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
)

"""Why a model cannot be split over the devices of a mesh."""

from collections.abc import Iterator, Sequence
from typing import Any

from specjax.config import ModelConfig
from specjax.models.layers import MLP, Attention
from specjax.models.registry import layer_kinds


def refusals(config: ModelConfig, drafts: Sequence[Any], count: int) -> Iterator[str]:
    """Why ``count`` devices cannot share the model that ``drafts`` draft for."""
    if count == 1:
        return
    option = f"tp_size={count}"
    sizes = {
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    for name, size in sizes.items():
        if size % count:
            yield f"{option} must divide {name}={size} of the model; choose a divisor"
    if (heads := config.num_kv_heads) % count and count % heads:
        yield (
            f"{option} must divide num_key_value_heads={heads} of the model, or be a multiple of "
            "it; choose such a number"
        )
    for model in (config, *drafts):
        if (format := getattr(model, "quantization", None)) is not None:
            yield f"{option} does not support quantised matrices yet; they are {format}"
    for kind in layer_kinds(config):
        modules = kind.mixer, kind.feed_forward
        if modules != (Attention, MLP):
            names = " and ".join(getattr(x, "__name__", repr(x)) for x in modules)
            yield f"{option} does not support layers of {names} yet; it needs Attention and MLP"

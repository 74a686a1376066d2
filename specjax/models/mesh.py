"""Why a model cannot be split over the devices of a mesh."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from specjax.config import ModelConfig
from specjax.models.layers import MLP, Attention
from specjax.models.registry import layer_kinds

# the first version whose compiled functions take 4-bit integers that are on several devices
INT4_VERSION = (0, 11)


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
    formats = [x for model in (config, *drafts) if (x := getattr(model, "quantization", None))]
    if jax.__version_info__ < INT4_VERSION and any(format.bits == 4 for format in formats):
        needed = ".".join(map(str, INT4_VERSION))
        yield f"{option} needs jax {needed} or later with int4 matrices, not {jax.__version__}"
    if (format := config.quantization) is not None and format.group is not None:
        for name, size in _inputs(config).items():
            if size // count % format.group:
                yield (
                    f"{option} cuts {name}={size} inputs into {size / count:g} per device, which "
                    f"must be a multiple of {format.group}, the group size of the {format.kind} "
                    "matrices; lower tp_size"
                )
    for kind in layer_kinds(config):
        modules = kind.mixer, kind.feed_forward
        if modules != (Attention, MLP):
            names = " and ".join(getattr(x, "__name__", repr(x)) for x in modules)
            yield f"{option} does not support layers of {names} yet; it needs Attention and MLP"


def _inputs(config: ModelConfig) -> dict[str, int]:
    """Numbers of inputs of matrices whose inputs are split."""
    return {
        "num_attention_heads * head_dim": config.num_heads * config.head_dim,
        "intermediate_size": config.intermediate_size,
    }

"""Why a model cannot be split over the devices of a mesh."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from specjax.config import ModelConfig
from specjax.kernels.mxfp4 import BLOCK
from specjax.models.experts import Experts, MixtureConfig
from specjax.models.gated_delta import DeltaConfig, GatedDelta
from specjax.models.gpt_oss import BiasedExperts
from specjax.models.layers import MLP, Attention
from specjax.models.qwen35 import GatedAttention
from specjax.models.registry import layer_kinds

# the first version whose compiled functions take 4-bit integers that are on several devices
INT4_VERSION = (0, 11)
# modules of layers that know how devices share them; a subclass may not
SHARED = {Attention, GatedAttention, GatedDelta, MLP, Experts, BiasedExperts}


def refusals(config: ModelConfig, drafts: Sequence[Any], count: int) -> Iterator[str]:
    """Why ``count`` devices cannot share the model that ``drafts`` draft for."""
    if count == 1:
        return
    option = f"tp_size={count}"
    sizes = _sizes(config)
    for name, (size, _) in sizes.items():
        if size % count:
            yield f"{option} must divide {name}={size} of the model; choose a divisor"
    if (heads := config.num_kv_heads) % count and count % heads:
        yield (
            f"{option} must divide num_key_value_heads={heads} of the model, or be a multiple of "
            "it; choose such a number"
        )
    formats = [x for model in (config, *drafts) if (x := getattr(model, "quantization", None))]
    if jax.__version_info__ < INT4_VERSION and any(format.bits == 4 for format in formats):
        yield f"{option} needs jax 0.11 or later with int4 matrices, not {jax.__version__}"
    if (format := config.quantization) is not None and format.group is not None:
        for name, (size, inputs) in sizes.items():
            if inputs // count % format.group:
                yield (
                    f"{option} cuts the {inputs} inputs of a matrix ({name}={size}) into "
                    f"{inputs // count} per device, which must be a multiple of {format.group}, "
                    f"the group size of the {format.kind} matrices; lower tp_size"
                )
    if isinstance(config, MixtureConfig) and config.has_packed_experts:
        size = config.moe_intermediate_size
        if (blocks := -(-size // BLOCK)) < count:
            yield (
                f"{option} exceeds {blocks}, the number of blocks of {BLOCK} columns in "
                f"moe_intermediate_size={size}, which devices share in MXFP4"
            )
    for kind in layer_kinds(config):
        modules = kind.mixer, kind.feed_forward
        if not SHARED.issuperset(modules):
            names = " and ".join(getattr(x, "__name__", repr(x)) for x in modules)
            known = ", ".join(sorted(x.__name__ for x in SHARED))
            yield f"{option} does not support layers of {names}; it needs those of {known}"


def _sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Numbers that devices share, and of the inputs of a matrix that follow from each."""
    heads, width = config.num_heads, config.intermediate_size
    sizes = {"num_attention_heads": (heads, heads * config.head_dim)}
    sizes |= {"vocab_size": (config.vocab_size, 0)}
    if any(kind.feed_forward is MLP for kind in layer_kinds(config)):
        sizes["intermediate_size"] = width, width
    if isinstance(config, MixtureConfig):
        for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
            sizes[name] = (getattr(config, name),) * 2
    if isinstance(config, DeltaConfig):
        key_heads, _, value_heads, value_dim = config.delta_heads
        sizes["linear_num_key_heads"] = key_heads, 0
        sizes["linear_num_value_heads"] = value_heads, value_heads * value_dim
    return sizes

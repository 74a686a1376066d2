"""Which models can be split over the devices of a mesh, and which drafts are."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from specjax.config import BlockConfig, DraftConfig, ModelConfig
from specjax.kernels.mxfp4 import BLOCK
from specjax.models.experts import Experts, MixtureConfig
from specjax.models.family import draft_kinds
from specjax.models.flat import FlatModel
from specjax.models.gated_delta import DeltaConfig, GatedDelta
from specjax.models.gpt_oss import BiasedExperts
from specjax.models.hunyuan import NormAfterRotation
from specjax.models.layers import MLP, Attention, LayerKind
from specjax.models.muse import MuseAttention
from specjax.models.qwen35 import GatedAttention
from specjax.models.registry import layer_kinds

# the first version whose compiled functions take 4-bit integers that are on several devices
INT4_VERSION = (0, 11)
# modules of layers that know how devices share them; a subclass may not
SHARED = {Attention, GatedAttention, NormAfterRotation, MuseAttention, GatedDelta}
SHARED |= {MLP, Experts, BiasedExperts}
Config = ModelConfig | DraftConfig | BlockConfig
# Bytes of a draft for each sum over two devices in its pass from which a split pays off: an H200
# reads half of them in the 20 us of a sum.
BYTES_PER_SUM = 0.17e9


def draft_shards(draft: FlatModel[Any], config: Any, count: int, wanted: int | None) -> int:
    """Number of devices that share each weight of a draft: all ``count``, or 1.

    ``wanted`` is the option ``draft_tp_size``; ``None`` chooses the faster one. ``config`` is
    ``None`` if the network cannot be split. Raises ValueError if that was asked for.
    """
    if count == 1 or wanted == 1:
        return 1
    reasons = [f"draft_tp_size={count} must be 1: the draft's network cannot be split"]
    if isinstance(config, Config):
        reasons = [*refusals(config, (), count, name="draft_tp_size")]
    if wanted is not None and reasons:
        raise ValueError(reasons[0])
    # two sums per layer, and one for the best columns
    is_faster = not reasons and draft.split_bytes >= BYTES_PER_SUM * (2 * config.num_layers + 1)
    return count if wanted is not None or is_faster else 1


def refusals(
    config: Config, drafts: Sequence[Any], count: int, *, name: str = "tp_size"
) -> Iterator[str]:
    """Why ``count`` devices, the value of option ``name``, cannot share a model.

    ``drafts`` draft for it.
    """
    if count == 1:
        return
    option, whose = f"{name}={count}", "model" if name == "tp_size" else "draft"
    sizes = _sizes(config)
    for field, (size, _) in sizes.items():
        if size % count:
            yield f"{option} must divide {field}={size} of the {whose}; choose a divisor"
    # devices may store the same KV head of a target, but not of a draft
    if (heads := config.num_kv_heads) % count and (count % heads or name != "tp_size"):
        multiple = ", or be a multiple of it" * (name == "tp_size")
        yield (
            f"{option} must divide num_key_value_heads={heads} of the {whose}{multiple}; choose "
            "such a number"
        )
    formats = [x for model in (config, *drafts) if (x := getattr(model, "quantization", None))]
    if jax.__version_info__ < INT4_VERSION and any(format.bits == 4 for format in formats):
        yield f"{option} needs jax 0.11 or later with int4 matrices, not {jax.__version__}"
    if (format := getattr(config, "quantization", None)) is not None and format.group is not None:
        for field, (size, inputs) in sizes.items():
            if inputs // count % format.group:
                yield (
                    f"{option} cuts the {inputs} inputs of a matrix ({field}={size}) into "
                    f"{inputs // count} per device, which must be a multiple of {format.group}, "
                    f"the group size of the {format.kind} matrices; lower {name}"
                )
    if isinstance(config, MixtureConfig) and config.has_packed_experts:
        size = config.moe_intermediate_size
        if (blocks := -(-size // BLOCK)) < count:
            yield (
                f"{option} exceeds {blocks}, the number of blocks of {BLOCK} columns in "
                f"moe_intermediate_size={size}, which devices share in MXFP4"
            )
    for kind in _kinds(config):
        modules = kind.mixer, kind.feed_forward
        if not SHARED.issuperset(modules):
            names = " and ".join(getattr(x, "__name__", repr(x)) for x in modules)
            supported = ", ".join(sorted(x.__name__ for x in SHARED))
            yield f"{option} does not support layers of {names}; it needs those of {supported}"


def _kinds(config: Config) -> Sequence[LayerKind]:
    return layer_kinds(config) if isinstance(config, ModelConfig) else draft_kinds(config)


def _sizes(config: Config) -> dict[str, tuple[int, int]]:
    """Numbers that devices share, and of the inputs of a matrix that follow from each."""
    heads, width = config.num_heads, config.intermediate_size
    sizes = {"num_attention_heads": (heads, heads * config.head_dim)}
    if any(kind.feed_forward is MLP for kind in _kinds(config)):
        sizes["intermediate_size"] = width, width
    if isinstance(config, MixtureConfig):
        for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
            sizes[name] = (getattr(config, name),) * 2
    if isinstance(config, DeltaConfig):
        key_heads, _, value_heads, value_dim = config.delta_heads
        sizes["linear_num_key_heads"] = key_heads, 0
        sizes["linear_num_value_heads"] = value_heads, value_heads * value_dim
    return sizes

"""Granite-SWA: Granite with sinks, windows in three of four layers, and a rope for each layer."""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from msgspec import Meta

from specjax.config import Rope
from specjax.json_file import Fields, Size
from specjax.models.family import alike, head_dim_of, layer_windows, unrotated
from specjax.models.llama import GRANITE
from specjax.models.rope import read_rope

_Base = Annotated[float, Meta(ge=0.0, le=1e30)]  # 0: no rotation


def _granite_swa(config: Fields) -> dict[str, Any]:
    head_dim, windows = head_dim_of(config), layer_windows(config, lambda i: i % 4 > 0)
    bases = config.get("layer_rope_theta", list[_Base], [])
    count = config.get("num_hidden_layers", Size)
    if len(bases) not in (0, count):
        raise config.wrong("layer_rope_theta", f"must have one value for each of {count} layers")
    if any(0.0 < base <= 1.0 for base in bases):
        raise config.wrong("layer_rope_theta", "must be 0, for no rotation, or above 1")
    rope = read_rope(config, head_dim)
    rotating = partial(Rope, head_dim, scaling=rope["rope_scaling"], rotary_dim=rope["rotary_dim"])
    ropes = tuple(rotating(theta=base) if base else unrotated(config) for base in bases)
    return GRANITE.read(config) | windows | {"layer_ropes": ropes}


GRANITE_SWA = replace(
    GRANITE,
    architecture="GraniteSWAForCausalLM",
    read=_granite_swa,
    layers=partial(alike, sinks=True),
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 128, "tie_word_embeddings": True},
    gguf=None,
)

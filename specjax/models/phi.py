"""Phi-3, Phi-3.5 and Phi-4: projections stored together, LongRoPE, heads rotated in part."""

from functools import partial
from typing import Any

from specjax.json_file import Fields
from specjax.models.family import GGUF, Family, alike, layer_windows


def _phi3(config: Fields) -> dict[str, Any]:
    return layer_windows(config, lambda i: True)


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    read=_phi3,
    layers=partial(alike, fused=("qkv_proj", "gate_up_proj")),
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    gguf=GGUF(arch="phi3"),
)

"""OLMo 2 and 3: norms after attention and feed-forward, and norms of all query and key heads."""

from dataclasses import replace
from functools import partial
from typing import Any

from specjax.config import Rope, Theta
from specjax.json_file import Fields
from specjax.models.family import (
    GGUF,
    Family,
    alike,
    attention_biases,
    head_dim_of,
    layer_windows,
    sliding_layers,
)
from specjax.models.rope import local_theta


def _olmo3(config: Fields) -> dict[str, Any]:
    head_dim = head_dim_of(config)
    theta = local_theta(config, config.get("rope_theta", Theta))

    def slides(i: int) -> bool:
        return (i + 1) % 4 > 0

    ropes = (Rope(head_dim, theta) if local else None for local in sliding_layers(config, slides))
    windows = layer_windows(config, slides)
    return attention_biases(config) | windows | {"layer_ropes": tuple(ropes)}


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    read=attention_biases,
    layers=partial(alike, pre_norm=False, post_norm=True, joint_qk_norm=True),
    defaults={"rms_norm_eps": 1e-5},
    gguf=GGUF(arch="olmo2"),
)
OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    read=_olmo3,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    gguf=GGUF(arch="olmo2", needs=("attention.sliding_window",)),
)

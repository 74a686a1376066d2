"""EXAONE 4: OLMo 2's norms after blocks, a norm of each head, and no rotation in global layers."""

from functools import partial
from typing import Any

from specjax.json_file import Fields, PositiveSize, Size
from specjax.models.family import Family, alike, layer_windows, sliding_layers, unrotated


def _exaone4(config: Fields) -> dict[str, Any]:
    if not config.get("sliding_window", Size, 0):  # the small models: all layers rotate
        return {"qk_norm": True}

    def slides(i: int) -> bool:
        return (i + 1) % config.get("sliding_window_pattern", PositiveSize, 4) > 0

    still, slide = unrotated(config), sliding_layers(config, slides)
    ropes = tuple(None if is_local else still for is_local in slide)
    return {"qk_norm": True, "layer_ropes": ropes, **layer_windows(config, slides)}


EXAONE4 = Family(
    architecture="Exaone4ForCausalLM",
    read=_exaone4,
    layers=partial(alike, pre_norm=False, post_norm=True),
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    gguf=None,
)

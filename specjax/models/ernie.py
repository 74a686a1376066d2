"""ERNIE 4.5 (dense): a Llama whose heads rotate neighbouring elements."""

from functools import partial
from typing import Any

from specjax.json_file import Fields, Flag
from specjax.models.family import Family, alike


def _ernie(config: Fields) -> dict[str, Any]:
    has_bias = config.get("use_bias", Flag, False)
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), has_bias)


ERNIE = Family(
    architecture="Ernie4_5ForCausalLM",
    read=_ernie,
    layers=partial(alike, interleaved=True),
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    gguf=None,
)

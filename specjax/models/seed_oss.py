"""Seed-OSS: a Llama whose queries, keys and values have biases, and its output projection none."""

from typing import Any

from specjax.json_file import Fields, Flag
from specjax.models.family import Family


def _seed_oss(config: Fields) -> dict[str, Any]:
    return {
        "qkv_bias": config.get("attention_bias", Flag, True),
        "output_bias": config.get("attention_out_bias", Flag, False),
        "mlp_bias": config.get("mlp_bias", Flag, False),
    }


SEED_OSS = Family(
    architecture="SeedOssForCausalLM", read=_seed_oss, defaults={"head_dim": 128}, gguf=None
)

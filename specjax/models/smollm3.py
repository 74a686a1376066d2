"""SmolLM3: a Llama in which every fourth layer has no rotary embedding."""

from typing import Any

from specjax.json_file import Fields, Flag, PositiveSize, Size
from specjax.models.family import GGUF, Family, attention_biases, layer_windows, unrotated


def _smollm3(config: Fields) -> dict[str, Any]:
    count, still = config.get("num_hidden_layers", Size), unrotated(config)
    every = config.get("no_rope_layer_interval", PositiveSize, 4)
    rotates = config.get("no_rope_layers", list[int], [])[:count]  # 0 for a layer without it
    if rotates and len(rotates) < count:
        raise config.wrong("no_rope_layers", f"must have one value for each of {count} layers")
    rotates = rotates or [(i + 1) % every for i in range(count)]
    is_on = config.get("use_sliding_window", Flag, False)
    return {
        **attention_biases(config),
        **(layer_windows(config, lambda i: not rotates[i]) if is_on else {}),
        "mlp_bias": config.get("mlp_bias", Flag, False),
        "layer_ropes": tuple(None if is_rotated else still for is_rotated in rotates),
    }


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    read=_smollm3,
    defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
    gguf=GGUF(arch="smollm3", interleaved=True),
)

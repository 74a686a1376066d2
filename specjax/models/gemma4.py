"""Gemma 4 (text, dense): layers that see all tokens have other heads, and keys may be values."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.config import Count, ModelConfig, Rope, Scale
from specjax.json_file import Fields, Flag, Size
from specjax.kernels.add_norm import rms_norm, whole
from specjax.models.declare import Part
from specjax.models.family import Family, alike, attention_biases, layer_windows, sliding_layers
from specjax.models.layers import Attend, Attention, LayerKind
from specjax.models.rope import RopeTables, local_theta, read_rope
from specjax.types import TokenInputs


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """A language model with other heads in the layers that see all tokens, ``full_layers``."""

    global_head_dim: Count
    num_global_key_value_heads: Count
    attention_k_eq_v: bool  # in these layers, values are made of the projection of keys
    full_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        full_sizes(self)


_OF_ALL = (
    *("model_type", "num_layers", "num_heads", "hidden_size", "intermediate_size", "vocab_size"),
    *("rms_norm_eps", "dtype", "kv_cache_dtype", "quantization"),
)


def full_sizes(config: Gemma4Config) -> ModelConfig:
    """The sizes of a layer that sees all tokens. Raises ValueError if they do not fit."""
    values: dict[str, Any] = {name: getattr(config, name) for name in _OF_ALL}
    values |= {"head_dim": config.global_head_dim}
    return ModelConfig(num_kv_heads=config.num_global_key_value_heads, **values)


class Gemma4Attention(Attention):
    """Attention whose values have a norm without a stored scale."""

    values_of = "v_proj"

    def __init__(self, config: ModelConfig, kind: LayerKind, at: str) -> None:
        # the norm removes any factor of values, so they are stored without one
        super().__init__(config, replace(kind, exponents=(kind.exponents[0], 0)), at)
        self.eps = config.rms_norm_eps

    def values(self, size: int, factor: float) -> Part:
        return Part(self.values_of, (size,))

    def __call__(
        self,
        x: Array,
        rope: RopeTables,
        kv: Any,
        layer: int,
        attend: Attend,
        row: Array | None = None,
        by_token: TokenInputs | None = None,
    ) -> tuple[Array, Any]:
        """As for :class:`Attention`."""

        def normed(
            kv: Any, layer: int, q: Array, k: Array, v: Array, rope: RopeTables, **options: Any
        ) -> tuple[Any, Array]:
            q, k, v = (whole(y, x.ndim + 1, x.dtype) for y in (q, k, v))
            v = rms_norm(v, jnp.ones(v.shape[-1], x.dtype), self.eps, self.kind.implementation)
            return attend(kv, layer, q, k, v, rope, **options)

        return super().__call__(x, rope, kv, layer, normed, row, by_token)


class GlobalAttention(Gemma4Attention):
    """Attention of a layer that sees all tokens."""

    def __init__(self, config: Gemma4Config, kind: LayerKind, at: str) -> None:
        self.values_of = "k_proj" if config.attention_k_eq_v else "v_proj"
        super().__init__(full_sizes(config), kind, at)


def _layers(
    base: Callable[..., tuple[LayerKind, ...]], config: Gemma4Config
) -> tuple[LayerKind, ...]:
    kinds = base(config, post_norm=True, qk_norm=True, has_scalar=True, mixer=Gemma4Attention)
    return tuple(
        replace(kind, mixer=GlobalAttention) if i in config.full_layers else kind
        for i, kind in enumerate(kinds)
    )


_REFUSED = {
    "enable_moe_block": "mixtures of experts next to a feed-forward",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "num_kv_shared_layers": "layers that share the KV of others",
}


def _gemma4(config: Fields) -> dict[str, Any]:
    for key, what in _REFUSED.items():
        if config.values.get(key):
            demand = f"is not supported: {what}; only the dense models (12B, 31B) are"
            raise config.wrong(key, demand)
    if config.get("use_bidirectional_attention", str, "vision") != "vision":
        raise config.wrong("use_bidirectional_attention", "is not supported; only 'vision' is")
    count = config.get("num_hidden_layers", Size)
    # the last layer always sees all tokens
    slides = [*sliding_layers(config, lambda i: (i + 1) % 6 > 0)[:-1], False]
    head_dim, kv_heads = config.get("head_dim", Size), config.get("num_key_value_heads", Size)
    is_shared = config.get("attention_k_eq_v", Flag, False)
    full = tuple(i for i in range(count) if not slides[i])
    # transformers 5 writes the sizes of these layers by layer
    stated = config.fields("per_layer_config").fields(str(full[0]))
    sizes = stated if stated.values else config
    names = (
        ("head_dim", "num_key_value_heads")
        if stated.values
        else ("global_head_dim", "num_global_key_value_heads")
    )
    wide = sizes.get(names[0], Count, head_dim if stated.values else 512)
    of_full = sizes.get(names[1], Count, kv_heads)
    rope = read_rope(config, wide)
    full_rope = Rope(wide, rope["rope_theta"], rope["rope_scaling"], rope["rotary_dim"])
    local = Rope(head_dim, local_theta(config, 1e4))
    windows = layer_windows(config, lambda i: slides[i]).get("windows", ())
    return {
        **attention_biases(config),
        "windows": (*windows[:-1], 0) if windows else (),
        "layer_ropes": tuple(local if is_local else full_rope for is_local in slides),
        "attention_scale": 1.0,
        "logit_softcap": config.get("final_logit_softcapping", Scale, None),
        "embedding_scale": config.get("hidden_size", Size) ** 0.5,
        "global_head_dim": wide,
        "num_global_key_value_heads": of_full if is_shared or stated.values else kv_heads,
        "attention_k_eq_v": is_shared,
        "full_layers": full,
    }


_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": _ROPES,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 262144,
}
GEMMA4 = Family(
    architecture="Gemma4ForCausalLM",
    read=_gemma4,
    layers=partial(_layers, alike),
    config=Gemma4Config,
    defaults=_DEFAULTS,
)
GEMMA4_UNIFIED = replace(GEMMA4, architecture="Gemma4UnifiedForCausalLM")

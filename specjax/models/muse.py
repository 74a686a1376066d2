"""Muse-Glimmer (text): attention with an output gate, and norms around every block."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.config import Epsilon, ModelConfig, Scale
from specjax.json_file import Fields, Size
from specjax.models.declare import Part
from specjax.models.family import (
    Family,
    alike,
    attention_biases,
    head_dim_of,
    layer_windows,
    unrotated,
)
from specjax.models.layers import Attend, Attention, LayerKind
from specjax.models.rope import RopeTables, read_rope
from specjax.types import TokenInputs


@dataclass(frozen=True, kw_only=True)
class MuseConfig(ModelConfig):
    """A language model whose embeddings, queries and keys have norms without a stored scale."""

    qk_scale_factor: Scale  # multiplies queries after their norm
    post_norm_eps: Epsilon  # of norms of the outputs of attention and feed-forward
    normalises_embeddings: ClassVar[bool] = True


class MuseAttention(Attention):
    """Attention whose output is multiplied by gates, and whose head norms have no weights."""

    def __init__(self, config: MuseConfig, kind: LayerKind, at: str) -> None:
        # the norm removes a factor of keys, so the one of stored keys follows it
        key, value = kind.exponents
        super().__init__(config, replace(kind, exponents=(0, value)), at)
        self.scales = config.qk_scale_factor * 2.0**key, 2.0**-key
        self.eps, width = config.rms_norm_eps, config.num_heads * config.head_dim
        how: dict[str, Any] = {"bias": False, "split": "out"}
        gate = Part("gate_proj", (width,))
        self.gate = kind.linear(config.hidden_size, f"{at}self_attn.", gate, **how)

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
        """As for :class:`Attention`. The gates are computed from the same rows as the queries."""
        q_scale, k_scale = (jnp.full(self.shape[2], y, x.dtype) for y in self.scales)
        gates = jax.nn.sigmoid(self.gate(x).astype(jnp.float32))

        def gated(kv: Any, layer: int, *inputs: Any, **options: Any) -> tuple[Any, Array]:
            kv, out = attend(kv, layer, *inputs, **options)
            return kv, (out.astype(jnp.float32) * gates.reshape(out.shape)).astype(out.dtype)

        rope = rope._replace(norms=(q_scale, k_scale, self.eps))
        return super().__call__(x, rope, kv, layer, gated, row, by_token)


def _muse(config: Fields) -> dict[str, Any]:
    count = config.get("num_hidden_layers", Size)
    theta = read_rope(config, head_dim_of(config))["rope_theta"]
    slides = [(count - 1 - i) % 4 > 0 for i in range(count)]
    bases = config.get("layer_rope_theta", list[float], [theta * slide for slide in slides])
    if len(bases) != count or not {*bases} <= {0.0, theta}:
        demand = f"must be 0 or rope_theta={theta:g} for each of {count} layers"
        raise config.wrong("layer_rope_theta", demand)
    return {
        **attention_biases(config),
        **layer_windows(config, lambda i: slides[i]),
        "layer_ropes": tuple(None if base else unrotated(config) for base in bases),
        "logit_scale": config.get("output_multiplier", Scale, 0.19611613513818404),
        "logit_softcap": config.get("final_logit_softcapping", Scale, None),
        "qk_scale_factor": config.get("qk_scale_factor", Scale, 3.87),
        "post_norm_eps": config.get("post_norm_eps", Epsilon, 1e-8),
    }


MUSE = Family(
    architecture="MuseGlimmerForConditionalGeneration",
    read=_muse,
    layers=partial(
        alike, norm_offset=1.0, output_norm_offset=0.0, post_norm=True, mixer=MuseAttention
    ),
    config=MuseConfig,
    defaults={
        "final_logit_softcapping": 20.0,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
    },
    gguf=None,
)

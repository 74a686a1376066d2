"""Hunyuan (dense): each head is normalised after its rotation."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.config import Scale, Theta
from specjax.json_file import Fields, Flag
from specjax.kernels.add_norm import whole
from specjax.kernels.rope_store import normed, rotate
from specjax.models.family import Family, alike, attention_biases, head_dim_of
from specjax.models.layers import Attend, Attention
from specjax.models.rope import RopeTables
from specjax.types import TokenInputs


class NormAfterRotation(Attention):
    """Attention that normalises queries and keys after their rotation."""

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
        """As for :class:`Attention`; ``attend`` gets queries and keys that need nothing more."""

        def normed_last(
            kv: Any, layer: int, q: Array, k: Array, v: Array, rope: RopeTables, **options: Any
        ) -> tuple[Any, Array]:
            q, k, v = (whole(y, x.ndim + 1, x.dtype) for y in (q, k, v))
            q, k = (rotate(y, rope.cos, rope.sin) for y in (q, k))
            q, k = normed(q, k, rope.norms)
            still = RopeTables(jnp.ones_like(rope.cos), jnp.zeros_like(rope.sin))
            return attend(kv, layer, q, k, v, still, **options)

        return super().__call__(x, rope, kv, layer, normed_last, row, by_token)


def _hunyuan(config: Fields) -> dict[str, Any]:
    for key, only in (("use_qk_norm", True), ("use_cla", False)):
        if config.get(key, Flag, only) is not only:
            raise config.wrong(key, f"is not supported; only {str(only).lower()} is")
    values = attention_biases(config) | {"qk_norm": True}
    place = config.fields("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    kind = place.get("rope_type", str, place.get("type", str, "default"))
    if kind == "dynamic" and "alpha" in place:  # one base for texts of any length
        head_dim = head_dim_of(config)
        base = place.get("rope_theta", Theta, config.get("rope_theta", Theta, 10000.0))
        growth = place.get("alpha", Scale) ** (head_dim / (head_dim - 2))
        values |= {"rope_theta": base * growth, "rope_scaling": None}
    return values


_NORMS = ("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")
HUNYUAN = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    read=_hunyuan,
    layers=partial(alike, mixer=NormAfterRotation, renamed=_NORMS),
    defaults={"rms_norm_eps": 1e-5},
    gguf=None,
)

"""Qwen3.5, 3.6 and 3.8 (text): three recurrent layers for each layer of gated attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.config import Count
from specjax.json_file import Fields, Flag, PositiveSize, Size
from specjax.kernels.add_norm import whole
from specjax.models.declare import Part
from specjax.models.experts import MixtureConfig, mixture_layers, read_experts
from specjax.models.family import Family, Modules, alike, attention_biases
from specjax.models.gated_delta import DeltaConfig, GatedDelta
from specjax.models.layers import Attend, Attention, LayerKind
from specjax.models.rope import RopeTables, rotated_rows
from specjax.types import TokenInputs


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(DeltaConfig):
    """A language model with recurrent layers and gated attention."""

    linear_layers: tuple[int, ...]  # numbers of the recurrent layers


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(Qwen35Config, MixtureConfig):
    """The same with a mixture of experts in every layer."""


@lru_cache(maxsize=4)  # as rotated_rows
def _with_gates(heads: int, dim: int, rotary_dim: int | None) -> np.ndarray:
    """The order of stored rows ``[2 * heads * H]``: all queries, as they are rotated, then gates.

    A file has the queries and gates of a head together.
    """
    queries = (np.arange(heads)[:, None] * 2 * dim + np.arange(dim)).reshape(-1)
    rotated = queries
    if rotary_dim is not None:
        rotated = queries[rotated_rows(heads, dim, rotary_dim, interleaved=False)]
    rows = np.concatenate([rotated, queries + dim])
    rows.flags.writeable = False
    return rows


class GatedAttention(Attention):
    """Attention whose output is multiplied by gates, which files store with the queries."""

    def queries(self, config: Any, kind: LayerKind) -> Part:
        """The queries of all heads, then their gates; a file has those of a head together."""
        rows = _with_gates(config.num_heads, config.head_dim, config.rotary_dim)
        return replace(super().queries(config, kind), shape=rows.shape, rows=rows)

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

        def gated(
            kv: Any, layer: int, q: Array, k: Array, v: Array, rope: RopeTables, **options: Any
        ) -> tuple[Any, Array]:
            q, gate = jnp.split(q, 2, axis=-2)
            kv, out = attend(kv, layer, q, k, v, rope, **options)
            gate = jax.nn.sigmoid(whole(gate, out.ndim, out.dtype).astype(jnp.float32))
            return kv, (out.astype(jnp.float32) * gate).astype(out.dtype)

        return super().__call__(x, rope, kv, layer, gated, row, by_token)


def _layers(
    base: Callable[..., tuple[LayerKind, ...]], config: Qwen35Config, **differences: Any
) -> tuple[LayerKind, ...]:
    kinds = base(config, norm_offset=1.0, qk_norm=True, mixer=GatedAttention, **differences)
    return tuple(
        replace(kind, mixer=GatedDelta) if i in config.linear_layers else kind
        for i, kind in enumerate(kinds, config.first_layer)
    )


# switches, and what each may be; the first value is the default
_SWITCHES: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),
    "hidden_act": ("silu", "swish"),
    "mamba_ssm_dtype": ("float32",),
    "mtp_use_dedicated_embeddings": (False,),
    "output_gate_type": ("silu", "swish"),
}
_LINEAR, _FULL = "linear_attention", "full_attention"


def _qwen35(config: Fields) -> dict[str, Any]:
    for key, choices in _SWITCHES.items():
        kind = Flag if isinstance(choices[0], bool) else str
        if config.get(key, kind, choices[0]) not in choices:
            raise config.wrong(key, f"is not supported; it may be {' or '.join(map(str, choices))}")
    count = config.get("num_hidden_layers", Size)
    every = config.get("full_attention_interval", PositiveSize, 4)
    by_interval = [_LINEAR if (i + 1) % every else _FULL for i in range(count)]
    kinds = config.get("layer_types", list[str], by_interval)
    if len(kinds) != count or not {*kinds} <= {_LINEAR, _FULL}:
        raise config.wrong(
            "layer_types", f"must be {_LINEAR} or {_FULL} for each of {count} layers"
        )
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    sizes = {f"linear_{name}": config.get(f"linear_{name}", Count) for name in names}
    layers = tuple(i for i, kind in enumerate(kinds) if kind == _LINEAR)
    return attention_biases(config) | sizes | {"linear_layers": layers}


def _qwen35_moe(config: Fields) -> dict[str, Any]:
    width = config.get("shared_expert_intermediate_size", Size)
    shared = {"shared_expert_intermediate_size": width, "has_shared_expert_gate": width > 0}
    # weights are normalised whatever a file says
    return _qwen35(config) | read_experts(config, **shared) | {"norm_topk_prob": True}


_DEFAULTS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
}
_MODULES = Modules(
    at="mtp.",
    layer="layers.0.",
    hidden_norm="pre_fc_norm_hidden",
    token_norm="pre_fc_norm_embedding",
    projection="fc",
    norm="norm",
    is_token_first=True,
)
QWEN35 = Family(
    architecture="Qwen3_5ForCausalLM",
    read=_qwen35,
    layers=partial(_layers, alike),
    config=Qwen35Config,
    defaults=_DEFAULTS,
    modules=_MODULES,
)
QWEN35_MOE = replace(
    QWEN35,
    architecture="Qwen3_5MoeForCausalLM",
    read=_qwen35_moe,
    layers=partial(_layers, mixture_layers),
    config=Qwen35MoeConfig,
    # the plain feed-forward, which no layer has
    defaults={**_DEFAULTS, "intermediate_size": 512, "shared_expert_intermediate_size": 512},
)

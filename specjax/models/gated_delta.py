"""A recurrent mixer, the gated delta rule: Qwen3.5's layers without attention.

Axes: B batch, T tokens per row, D hidden, Hk query and key heads of size K, Hv value heads of size
V, C channels of the convolution (2 Hk K + Hv V), J its taps. A layer keeps a state ``[Hv, V, K]``
of each request, and the last J - 1 rows of its channels, whatever the length of the text.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.config import Count, ModelConfig
from specjax.kernels.add_norm import rms_norm
from specjax.kernels.delta_inputs import DeltaGates
from specjax.models.declare import Cache, Part, weight
from specjax.models.layers import LayerKind, RMSNorm, pick_row
from specjax.models.rope import RopeTables
from specjax.types import TokenInputs

# recur(cache, layer, mixed [B,T,C], gates of B * T rows, weights [C,J]) -> (cache, output f32
# [B,T,Hv,V]). It convolves the channels, computes the rows of each request after its state, and
# keeps what the next rows need.
Recur = Callable[[Any, int, Array, DeltaGates, Array], tuple[Any, Array]]


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(ModelConfig):
    """A language model with recurrent layers; names are those of files."""

    linear_num_key_heads: Count
    linear_num_value_heads: Count
    linear_key_head_dim: Count
    linear_value_head_dim: Count
    linear_conv_kernel_dim: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise ValueError(
                f"linear_num_value_heads={values} must be a multiple of linear_num_key_heads={keys}"
            )
        if (taps := self.linear_conv_kernel_dim) < 2:
            raise ValueError(f"linear_conv_kernel_dim={taps} must be at least 2")

    @property
    def delta_heads(self) -> tuple[int, int, int, int]:
        """Hk, K, Hv and V."""
        key_heads, value_heads = self.linear_num_key_heads, self.linear_num_value_heads
        return key_heads, self.linear_key_head_dim, value_heads, self.linear_value_head_dim


class GatedDelta(nnx.Module):
    """Short convolution, gated delta rule and gated norm; ``recur`` manages states and windows."""

    def __init__(self, config: DeltaConfig, kind: LayerKind, at: str) -> None:
        self.kind, size, at = kind, config.hidden_size, f"{at}linear_attn."
        key_heads, key_dim, value_heads, value_dim = config.delta_heads
        self.heads = key_heads // kind.shards, key_dim, value_heads // kind.shards, value_dim
        keys, values = key_heads * key_dim, value_heads * value_dim
        channels, self.num_taps = (keys, keys, values), config.linear_conv_kernel_dim
        self.num_channels = sum(channels) // kind.shards
        linear = partial(kind.linear, bias=False)
        projections = Part("in_proj_qkv", (sum(channels),)), Part("in_proj_z", (values,))
        joint: dict[str, Any] = {"split": "out", "widths": (*channels, values)}
        self.mixed_and_gate = linear(size, at, *projections, **joint)
        # never quantised: small, and rates of decay are sensitive
        products = (Part(name, (value_heads,)) for name in ("in_proj_b", "in_proj_a"))
        plain = replace(kind, dtypes=kind.dtypes._replace(quantization=None))
        self.products = plain.linear(size, at, *products, bias=False, split="out")
        tensor, dtype = kind.tensor, kind.dtypes.activations
        conv = partial(weight, tensor(f"{at}conv1d.weight"), (sum(channels), 1, self.num_taps))
        self.conv = conv(dtype, stddev=self.num_taps**-0.5, split="out", widths=channels)
        vector = partial(weight, shape=(value_heads,), dtype=jnp.float32, split="out")
        self.log_rates = vector(tensor(f"{at}A_log"), stddev=1.0)
        self.biases = vector(tensor(f"{at}dt_bias"), mean=1.0)
        # the scale of this norm is the stored one in families that add 1 to others
        how: dict[str, Any] = {"implementation": kind.implementation}
        self.norm = RMSNorm(config, value_dim, tensor(f"{at}norm"), **how)
        self.output = linear(values, at, Part("out_proj", (size,)), split="in")

    @property
    def cache(self) -> Cache:
        """A state and a window, whose heads and channels devices share."""
        shards, (_, key_dim, value_heads, value_dim) = self.kind.shards, self.heads
        state = jax.ShapeDtypeStruct((shards * value_heads, value_dim, key_dim), jnp.float32)
        window = self.num_taps - 1, shards * self.num_channels
        dtype = self.kind.dtypes.activations
        return Cache(None, per_request=(state, jax.ShapeDtypeStruct(window, dtype)))

    def __call__(
        self,
        x: Array,
        rope: RopeTables,
        cache: Any,
        layer: int,
        recur: Recur,
        row: Array | None = None,
        by_token: TokenInputs | None = None,
    ) -> tuple[Array, Any]:
        """Map ``[B, T, D]`` to ``[B, T, D]`` or partial sums of it; also return the updated cache.

        With ``row`` i32 ``[B]``, only this row is output: ``[B, 1, D]``. States have no positions,
        so ``rope`` is not read; nor is ``by_token``.
        """
        mixed, gate = jnp.split(self.mixed_and_gate(x), (self.num_channels,), axis=-1)
        products = self.products(x, jnp.float32).reshape(-1, 2 * self.heads[2])
        gates = DeltaGates(products, self.log_rates[...], self.biases[...])
        cache, out = recur(cache, layer, mixed, gates, self.conv[:, 0])
        # everything between the state and the last product is float32
        scale, gate = self.norm.factor.astype(jnp.float32), gate.astype(jnp.float32)
        normed = rms_norm(out, scale, self.norm.eps, self.kind.implementation)
        normed = normed.reshape(gate.shape) * jax.nn.silu(gate)
        return self.output.partial_sums(pick_row(normed.astype(x.dtype), row)), cache

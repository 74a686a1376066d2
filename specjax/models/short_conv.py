"""A mixer of neighbouring tokens: a short convolution of each channel, with gates before and after.

A layer needs the rows of the last J - 1 tokens, for J taps. It stores the row of a token as others
store its key and value: in the KV pool, at the same KV index. So drafts, trees, cached prefixes and
everything else that holds for KV in a window of J tokens holds for these rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.config import Count, ModelConfig
from specjax.models.declare import Cache, Part, weight
from specjax.models.layers import LayerKind, pick_row
from specjax.models.rope import RopeTables
from specjax.types import TokenInputs


@dataclass(frozen=True, kw_only=True)
class ConvConfig(ModelConfig):
    """A language model with short convolutions; names are those of files."""

    conv_layers: tuple[int, ...]  # numbers of the layers with a convolution
    conv_L_cache: Count = 3
    conv_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv_L_cache < 2:
            raise ValueError(f"conv_L_cache={self.conv_L_cache} must be at least 2")
        if self.kv_cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} is not supported for model_type="
                f"{self.model_type!r}, whose convolutions keep rows in the KV pool; use 'auto'"
            )


class ShortConv(nnx.Module):
    """``out(after * conv(before * inner))``; the three factors are projections of a token."""

    def __init__(self, config: ConvConfig, kind: LayerKind, at: str) -> None:
        self.kind, size, at = kind, config.hidden_size, f"{at}conv."
        self.num_taps, has_bias = config.conv_L_cache, config.conv_bias
        self.token = 2, config.num_kv_heads, config.head_dim
        linear, dtype = partial(kind.linear, size, at, bias=has_bias), kind.dtypes.activations
        self.inputs = linear(Part("in_proj", (3 * size,)))
        shape, taps = (size, 1, self.num_taps), kind.tensor(f"{at}conv.weight")
        self.conv = weight(taps, shape, dtype, stddev=self.num_taps**-0.5)
        self.bias = weight(kind.tensor(f"{at}conv.bias"), (size,), dtype) if has_bias else None
        self.output = linear(Part("out_proj", (size,)))

    @property
    def cache(self) -> Cache:
        """A row of all channels, in the form of keys and values of one or more layers."""
        token = jax.ShapeDtypeStruct(self.token, self.kind.dtypes.activations)
        num_places = -(-self.conv.shape[0] // math.prod(self.token))
        return Cache(token, self.num_taps, num_places=num_places)

    def __call__(
        self,
        x: Array,
        rope: RopeTables,
        kv: Any,
        layer: int,
        attend: Any,
        row: Array | None = None,
        by_token: TokenInputs | None = None,
    ) -> tuple[Array, Any]:
        """Map ``[B, T, D]`` to ``[B, T, D]`` or partial sums of it; also return the updated kv.

        ``attend.recall`` stores rows and reads those before them. With ``row`` i32 ``[B]``, only
        this row is output: ``[B, 1, D]``. ``rope`` and ``by_token`` are not read.
        """
        before, after, inner = jnp.split(self.inputs(x), 3, axis=-1)
        rows = before * inner
        kv, earlier = attend.recall(kv, layer, rows, self.num_taps - 1)
        taps = jnp.concatenate([earlier, rows[:, :, None]], axis=2).astype(jnp.float32)
        mixed = jnp.sum(taps * self.conv[:, 0].T.astype(jnp.float32), axis=2)
        mixed = mixed if self.bias is None else mixed + self.bias[...]
        return self.output.partial_sums(pick_row(after * mixed.astype(x.dtype), row)), kv


@dataclass(frozen=True)
class DenseAttend:
    """An ``attend`` without KV storage over whole texts, which begin at the first row."""

    attend: Callable[..., Any]
    recall: Callable[..., Any] = field(default=lambda *inputs: recall_dense(*inputs))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.attend(*inputs, **options)


def recall_dense(kv: Any, layer: int, rows: Array, count: int) -> tuple[Any, Array]:
    """Read, for each of the rows ``[B, T, C]``, the ``count`` before it, ``[B, T, count, C]``.

    The oldest is first. Before a text, rows are zeros.
    """
    padded = jnp.pad(rows, ((0, 0), (count, 0), (0, 0)))
    return kv, jnp.stack([padded[:, i : i + rows.shape[1]] for i in range(count)], axis=2)

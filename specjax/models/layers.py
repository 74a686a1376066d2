"""Layers shared by target models and draft heads (flax nnx).

Axes: B batch, T tokens per row, D hidden, N query heads, KV key/value heads, H head dim, V vocab.
Query, key and value projections share one matrix, and so do gate and up. The weights of a new
module are zeros, and its variables record how to draw random ones. Float32 products use HIGHEST
precision, because the default on a GPU is TF32.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.config import Dtypes, Rope, TransformerConfig
from specjax.kernels.add_norm import add_norm, rms_norm, whole
from specjax.kernels.backend import INVARIANT, resolve
from specjax.kernels.rope_store import normed, rotate
from specjax.models.rope import RopeTables
from specjax.models.weights import dot, dot_transposed, partial_dot, take_outputs, zero_kernel

# attend(kv, layer, q [B,T,N,H], k [B,T,KV,H], v [B,T,KV,H], rope, **options) -> (kv, output in the
# shape of q). It normalises and rotates q and k, stores k and v in `kv` of any type, and returns
# the attention output. Its parameters name the options that it supports: `window`, the number of
# keys that a query sees, up to and including its own; `softcap`, c in c * tanh(scores / c);
# `sinks` [N], one score per head without a value.
Attend = Callable[..., tuple[Any, Array]]
# store(kv, layer, k, v, rope) -> kv, without attention
Store = Callable[[Any, int, Array, Array, RopeTables], Any]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Settings that may differ between decoder layers whose weights have the same shapes.

    ``pre_norm`` normalises the inputs of attention and feed-forward. ``post_norm`` normalises their
    outputs before they are added to the residual stream.
    """

    rope: Rope
    dtypes: Dtypes
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # of each query and key head
    joint_qk_norm: bool = False  # of all query heads together, and all key heads
    pre_norm: bool = True
    post_norm: bool = False
    norm_offset: float = 0.0  # added to the stored scale of a norm
    residual_scale: float = 1.0  # multiplies the outputs of attention and feed-forward
    scale: float | None = None  # multiplies attention scores; None is H ** -0.5
    window: int | None = None  # number of keys that a query sees, up to and including its own
    softcap: float | None = None  # soft limit of attention scores
    sinks: bool = False  # one score per head that takes attention weight but has no value

    @classmethod
    def of(cls, config: TransformerConfig, **differences: Any) -> "LayerKind":
        """Take fields from ``differences``, or else from the configuration if it has them."""
        names = {field.name for field in fields(cls)}
        found = {name: getattr(config, name) for name in names if hasattr(config, name)}
        return cls(**{**found, **differences})

    @property
    def attention_options(self) -> dict[str, Any]:
        """The options that ``attend`` must support, by name."""
        values = {"window": self.window, "softcap": self.softcap, "sinks": self.sinks}
        return {name: value for name, value in values.items() if value}


def pick_row(x: Array, row: Array | None) -> Array:
    """Pick rows i32 ``[B]`` or ``[B, R]`` of ``x [B, T, D]``; ``None`` picks all."""
    if row is None:
        return x
    return jnp.take_along_axis(x, row.reshape(x.shape[0], -1, 1), axis=1, mode="clip")


class Linear(nnx.Module):
    """Affine map: a ``kernel``, plain ``[in, out]`` or quantised, and an optional ``bias``."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        dtypes: Dtypes,
        implementation: str | None = None,
    ) -> None:
        self.implementation = implementation
        kernel = zero_kernel(in_size, out_size, dtypes)
        self.kernel = nnx.Param(kernel, stddev=in_size**-0.5)
        self.bias = nnx.Param(jnp.zeros((out_size,), dtypes.activations)) if bias else None

    def __call__(
        self, x: Array, out_dtype: jnp.dtype | None = None, outputs: slice = slice(None)
    ) -> Array:
        """Map ``[..., in]`` to selected outputs ``[..., out]``, by default in the dtype of x."""
        kernel = take_outputs(self.kernel[...], outputs)
        out = dot(x, kernel, out_dtype, self.implementation)
        return out if self.bias is None else out + self.bias[outputs]

    def partial_sums(self, x: Array) -> Array:
        """Map ``[..., in]`` to partial sums f32 ``[P, ..., out]`` if a split pays off."""
        if self.bias is not None or resolve(self.implementation) == "xla":
            return self(x)
        return partial_dot(x, self.kernel[...], self.implementation)


class RMSNorm(nnx.Module):
    """Normalisation over the last axis, times ``scale + offset``."""

    def __init__(
        self,
        config: TransformerConfig,
        size: int,
        *,
        offset: float = 0.0,
        implementation: str | None = None,
    ) -> None:
        mean, dtype = 1.0 - offset, config.dtypes.activations
        self.scale = nnx.Param(jnp.full((size,), mean, dtype), mean=mean)
        self.eps, self.offset, self.implementation = config.rms_norm_eps, offset, implementation

    @property
    def factor(self) -> Array:
        """Multiplier ``[size]`` of the normalised values, in float32 if there is an offset."""
        # bfloat16 would round 1 + w to 8 bits, and so lose most of w
        scale = self.scale[...]
        return scale.astype(jnp.float32) + self.offset if self.offset else scale

    def __call__(self, x: Array) -> Array:
        if self.implementation in INVARIANT:
            return self.add(x, jnp.zeros_like(x))[1]
        return rms_norm(x, self.factor, self.eps)

    def add(self, x: Array, delta: Array | None) -> tuple[Array, Array]:
        """Return ``x + delta`` and the norm of this sum. If ``delta`` is None, the sum is ``x``."""
        if delta is None:
            return x, self(x)
        return add_norm(x, delta, self.factor, eps=self.eps, implementation=self.implementation)


class Embedding(nnx.Module):
    """Token table ``[V, D]``; with tied embeddings, it is also the output projection."""

    def __init__(
        self, vocab_size: int, size: int, *, dtype: jnp.dtype, implementation: str | None = None
    ) -> None:
        self.implementation = implementation
        self.table = nnx.Param(jnp.zeros((vocab_size, size), dtype), stddev=size**-0.5)

    def __call__(self, tokens: Array) -> Array:
        """Rows ``[..., D]`` of token ids ``[...]``."""
        return self.table[...].at[tokens].get(mode="clip")

    def attend(self, x: Array) -> Array:
        """Float32 logits ``[..., V]`` of hidden states ``[..., D]``."""
        return dot_transposed(x, self.table[...], self.implementation)


def rotated(attend: Attend) -> Attend:
    """Make an ``attend`` from a function that takes rotated queries and keys, not partial sums."""

    def rotate_first(
        kv: Any, layer: int, q: Array, k: Array, v: Array, rope: RopeTables, **options: Any
    ) -> tuple[Any, Array]:
        if q.ndim == 5:  # partial sums, which only bfloat16 products return
            q, k, v = (x.sum(axis=0).astype(jnp.bfloat16) for x in (q, k, v))
        q, k = (rotate(x, rope.cos, rope.sin) for x in normed(q, k, rope.norms))
        return attend(kv, layer, q, k, v, **options)

    return rotate_first


def dense_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    **options: Any,
) -> Array:
    """JAX's attention of ``[B, T, N, H]`` over ``[B, L, KV, H]``, in full precision for float32.

    ``mask`` is bool and broadcasts to ``[B, N, T, L]``. JAX has no ``softcap`` and no ``sinks``,
    with which scores take memory.
    """
    precision = "highest" if q.dtype == jnp.float32 else "default"
    if mask is not None and not (softcap is None and sinks is None):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        float32 = {"precision": precision, "preferred_element_type": jnp.float32}
        scores = jnp.einsum("btnh,blnh->bntl", q, k, **float32) * q.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(mask, scores, -jnp.inf)
        if sinks is not None:  # a sink is one more key, of value 0
            more = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
            scores = jnp.concatenate([scores, more.astype(scores.dtype)], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)
        return jnp.einsum("bntl,blnh->btnh", weights, v, **float32).astype(q.dtype)
    # JAX mixes bfloat16 and float32 here, which a caller's strict promotion would reject
    with jax.default_matmul_precision(precision), jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, **options)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; ``attend`` manages keys and values."""

    def __init__(
        self,
        config: TransformerConfig,
        kind: LayerKind,
        *,
        in_size: int,
        implementation: str | None = None,
    ) -> None:
        self.kind = kind
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.shape = (heads, kv_heads, dim)
        linear, dtypes = partial(Linear, implementation=implementation), kind.dtypes.without
        width, size = (heads + 2 * kv_heads) * dim, config.hidden_size
        self.qkv = linear(in_size, width, bias=kind.qkv_bias, dtypes=dtypes("qkv"))
        self.output = linear(heads * dim, size, bias=kind.output_bias, dtypes=dtypes("output"))
        norm = partial(RMSNorm, config, offset=kind.norm_offset, implementation=implementation)
        has_norms, of_head = kind.qk_norm or kind.joint_qk_norm, kind.qk_norm
        self.q_norm = norm(dim if of_head else heads * dim) if has_norms else None
        self.k_norm = norm(dim if of_head else kv_heads * dim) if has_norms else None
        sinks = jnp.zeros((heads,), kind.dtypes.activations)
        self.sinks = nnx.Param(sinks) if kind.sinks else None

    def __call__(
        self,
        x: Array,
        rope: RopeTables,
        kv: Any,
        layer: int,
        attend: Attend,
        row: Array | None = None,
    ) -> tuple[Array, Any]:
        """Map ``[B, T, in_size]`` to ``[B, T, D]`` or partial sums of it; also return updated kv.

        With ``row`` i32 ``[B]``, all rows are stored, but only this row is output: ``[B, 1, D]``.
        """
        heads, kv_heads, dim = self.shape
        joined = self.qkv.partial_sums(x)
        joined = joined.reshape(*joined.shape[:-1], heads + 2 * kv_heads, dim)
        q, k, v = jnp.split(joined, (heads, heads + kv_heads), axis=-2)
        factor = 1.0 if self.kind.scale is None else self.kind.scale * dim**0.5
        if self.q_norm is not None and self.k_norm is not None and self.kind.joint_qk_norm:
            q, k, v = (whole(y, x.ndim + 1, x.dtype) for y in (q, k, v))
            q = self.q_norm(q.reshape(*x.shape[:-1], -1)).reshape(q.shape)
            k = self.k_norm(k.reshape(*x.shape[:-1], -1)).reshape(k.shape)
        elif self.q_norm is not None and self.k_norm is not None:
            q_scale = self.q_norm.factor if factor == 1.0 else _times(self.q_norm.factor, factor)
            rope = rope._replace(norms=(q_scale, self.k_norm.factor, self.k_norm.eps))
            factor = 1.0
        if factor != 1.0:
            q = _times(q, factor)
        if rope.query_scale is not None:
            q = _times(q, rope.query_scale)
        options = self.kind.attention_options
        if self.sinks is not None:
            options["sinks"] = self.sinks[...]
        kv, out = attend(kv, layer, q, k, v, rope, **options)
        out = pick_row(out.reshape(*x.shape[:-1], heads * dim), row)
        return self.output.partial_sums(out), kv

    def store(self, x: Array, rope: RopeTables, kv: Any, layer: int, store: Store) -> Any:
        """Store the keys and values of ``x [B, T, in_size]``; return the updated kv."""
        heads, kv_heads, dim = self.shape
        # a third of the columns with 32 query and 8 KV heads
        joined = self.qkv(x, outputs=slice(heads * dim, None))
        k, v = jnp.split(joined.reshape(*x.shape[:-1], 2 * kv_heads, dim), 2, axis=-2)
        return store(kv, layer, k, v, self.key_rope(rope))

    def key_rope(self, rope: RopeTables) -> RopeTables:
        """Return ``rope`` with the norm of the keys, if there is one."""
        if (norm := self.k_norm) is None:
            return rope
        return rope._replace(norms=(norm.factor, norm.factor, norm.eps))


class MLP(nnx.Module):
    """Gated feed-forward ``down(activation(gate(x)) * up(x))``; gate and up share one matrix."""

    def __init__(
        self, config: TransformerConfig, kind: LayerKind, implementation: str | None = None
    ) -> None:
        self.kind, size, inner = kind, config.hidden_size, config.intermediate_size
        linear = partial(Linear, bias=kind.mlp_bias, implementation=implementation)
        self.gate_up = linear(size, 2 * inner, dtypes=kind.dtypes.without("gate_up"))
        self.down = linear(inner, size, dtypes=kind.dtypes.without("down"))

    def __call__(self, x: Array) -> Array:
        """Map ``[..., D]`` to ``[..., D]`` or partial sums of it."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        activation = ACTIVATIONS[self.kind.activation]
        return self.down.partial_sums(activation(gate) * up)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward with residual connections, and norms before or after each."""

    def __init__(
        self,
        config: TransformerConfig,
        kind: LayerKind,
        implementation: str | None = None,
        *,
        has_input_norm: bool = True,
    ) -> None:
        size = config.hidden_size
        norm = partial(
            RMSNorm, config, size, offset=kind.norm_offset, implementation=implementation
        )
        self.kind = kind
        self.input_norm = norm() if kind.pre_norm and has_input_norm else None
        self.attention = Attention(config, kind, in_size=size, implementation=implementation)
        self.attention_output_norm = norm() if kind.post_norm else None
        self.post_attention_norm = norm() if kind.pre_norm else None
        self.mlp = MLP(config, kind, implementation)
        self.mlp_output_norm = norm() if kind.post_norm else None

    def __call__(
        self,
        x: Array,
        delta: Array | None,
        rope: RopeTables,
        kv: Any,
        layer: int,
        attend: Attend,
        row: Array | None = None,
    ) -> tuple[Array, Array, Array, Any]:
        """Return ``x + delta``, the layer's output as two summands, and the updated kv.

        The next norm adds the summands, so that addition and norm run as one kernel. With ``row``
        i32 ``[B]``, the output has only this row: ``[B, 1, D]``.
        """
        x, normed = _add_norm(self.input_norm, x, delta)
        mixed, kv = self.attention(normed, rope, kv, layer, attend, row)
        mixed = self._output(self.attention_output_norm, x, mixed)
        middle, normed = _add_norm(self.post_attention_norm, pick_row(x, row), mixed)
        return x, middle, self._output(self.mlp_output_norm, x, self.mlp(normed)), kv

    def _output(self, norm: RMSNorm | None, x: Array, delta: Array) -> Array:
        """The value that a block adds to ``x``."""
        delta = delta if norm is None else norm(whole(delta, x.ndim, x.dtype))
        factor = self.kind.residual_scale
        return delta if factor == 1.0 else _times(delta, factor)


def _times(x: Array, factor: float | Array) -> Array:
    """``x * factor``; bfloat16 does not round the factor."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def _add_norm(norm: RMSNorm | None, x: Array, delta: Array | None) -> tuple[Array, Array]:
    """Return ``x + delta``, and as input of the next block its norm, or without one the sum."""
    if norm is not None:
        return norm.add(x, delta)
    x = x if delta is None else x + whole(delta, x.ndim, x.dtype)
    return x, x

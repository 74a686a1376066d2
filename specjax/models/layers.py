"""Layers shared by target models and draft heads (flax nnx).

Axes: B batch, T tokens per row, D hidden, N query heads, KV key/value heads, H head dim, V vocab.
Query, key and value projections share one matrix, and so do gate and up. The weights of a new
module are abstract. Each declares which tensors fill it; names begin with ``at``, the prefix of the
layer's tensors. Float32 products use HIGHEST precision, because the default on a GPU is TF32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from specjax.config import Dtypes, Rope, TransformerConfig
from specjax.kernels.add_norm import add_norm, rms_norm, whole, with_offset
from specjax.kernels.backend import resolve
from specjax.kernels.dot import plain_dot
from specjax.kernels.rope_store import normed, rotate
from specjax.models.declare import Cache, Part, Recipe, joined, token_kv, weight
from specjax.models.joint_norm import joint_norms
from specjax.models.rope import RopeTables, rotated_rows
from specjax.models.shards import all_sum, rows_of
from specjax.models.weights import abstract_kernel, dot, partial_dot, take_outputs
from specjax.types import TokenInputs

# attend(kv, layer, q [B,T,N,H], k [B,T,KV,H], v [B,T,KV,H], rope, **options) -> (kv, output in the
# shape of q). It normalises and rotates q and k, stores k and v in `kv` of any type, and returns
# the attention output. Its parameters name the options that it supports: `window`, the number of
# keys that a query sees, up to and including its own; `sink_tokens`, the number of first tokens
# that it also sees; `softcap`, c in c * tanh(scores / c); `sinks` [N], one score per head without a
# value.
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
    """Settings that may differ between decoder layers.

    ``pre_norm`` normalises the inputs of attention and feed-forward. ``post_norm`` normalises their
    outputs before they are added to the residual stream. The last fields say how files store the
    layer's tensors.
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
    post_norm_eps: float | None = None  # of the norms of outputs; None: that of all norms
    norm_offset: float = 0.0  # added to the stored scale of a norm
    output_norm_offset: float | None = None  # of the norm after all layers; None: norm_offset
    residual_scale: float = 1.0  # multiplies the outputs of attention and feed-forward
    scale: float | None = None  # multiplies attention scores; None is H ** -0.5
    window: int | None = None  # number of keys that a query sees, up to and including its own
    sink_tokens: int = 0  # number of first tokens that a query sees in addition to its window
    softcap: float | None = None  # soft limit of attention scores
    sinks: bool = False  # one score per head that takes attention weight but has no value
    has_scalar: bool = False  # a stored factor of the layer's output, with the residual stream
    implementation: str | None = None  # of kernels, see specjax/kernels/backend.py
    shards: int = 1  # devices that share heads and inner columns, see models/shards.py
    # the modules of a layer, each made with (config, kind, at)
    mixer: Callable[..., Any] = field(default_factory=lambda: Attention)
    feed_forward: Callable[..., Any] = field(default_factory=lambda: MLP)
    renamed: tuple[tuple[str, str], ...] = ()  # Llama's word in a dotted name -> the file's
    fused: tuple[str, ...] = ()  # projections stored as one: "qkv_proj", "gate_up_proj"
    interleaved: bool = False  # heads rotate neighbouring elements, not halves
    # binary exponents that divide stored keys and values
    exponents: tuple[int, int] = field(default=(0, 0), compare=False)

    @classmethod
    def of(cls, config: TransformerConfig, **differences: Any) -> "LayerKind":
        """Take fields from ``differences``, or else from the configuration if it has them."""
        names = {entry.name for entry in fields(cls)}
        values = {name: getattr(config, name) for name in names if hasattr(config, name)}
        values |= differences
        if (limit := config.draft_window) and limit.size < (values.get("window") or math.inf):
            values |= {"window": limit.size, "sink_tokens": limit.sink_tokens}
        return cls(**values)

    def tensor(self, name: str) -> str:
        """The name that files of the family have for a tensor of Llama's layers."""
        words = dict(self.renamed)
        return ".".join(words.get(word, word) for word in name.split("."))

    def linear(self, in_size: int, at: str, *tensors: Part, fused: str = "", **options: Any) -> Any:
        """A :class:`Linear` of projections, or of the one named ``fused`` if files join them."""
        if options.get("split") == "out":
            options = {"widths": tuple(tensor.shape[0] for tensor in tensors), **options}
        if fused in self.fused:
            tensors = (joined(fused, tensors),)
        stored = (replace(tensor, name=self.tensor(at + tensor.name)) for tensor in tensors)
        how: dict[str, Any] = {"dtypes": self.dtypes, "implementation": self.implementation}
        return Linear(in_size, *stored, shards=self.shards, **how, **options)

    def norm(self, config: TransformerConfig, size: int, name: str, **options: Any) -> "RMSNorm":
        how: dict[str, Any] = {"offset": self.norm_offset, "implementation": self.implementation}
        return RMSNorm(config, size, self.tensor(name), **how, **options)

    @property
    def attention_options(self) -> dict[str, Any]:
        """The options that ``attend`` must support, by name."""
        names = "window", "sink_tokens", "softcap", "sinks"
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value}


def pick_row(x: Array, row: Array | None) -> Array:
    """Pick rows i32 ``[B]`` or ``[B, R]`` of ``x [B, T, D]``; ``None`` picks all."""
    if row is None:
        return x
    return jnp.take_along_axis(x, row.reshape(x.shape[0], -1, 1), axis=1, mode="clip")


class Linear(nnx.Module):
    """Affine map: a ``kernel``, plain ``[in, out]`` or quantised, and an optional ``bias``.

    Its outputs are those of stored projections. Each part has the number of outputs as its shape,
    and a name without ``.weight``. The kernel is quantised as ``dtypes`` say, unless they leave it
    plain. A mesh of ``shards`` devices cuts the axis ``split``, as ``joint`` options of the recipe
    say, and ``in_factor`` multiplies the stored kernel.
    """

    def __init__(
        self,
        in_size: int,
        *tensors: Part,
        bias: bool,
        dtypes: Dtypes,
        split: str | None = None,
        shards: int = 1,
        in_factor: float = 1.0,
        implementation: str | None = None,
        **joint: Any,
    ) -> None:
        self.implementation = implementation
        # products that are split along their inputs are added up before the bias
        self.num_sums = shards if split == "in" else 1
        out_size = sum(tensor.shape[0] for tensor in tensors)
        kernel = abstract_kernel(in_size, out_size, dtypes.without(*(x.name for x in tensors)))
        stored = (x.of("weight", in_size, factor=x.factor * in_factor) for x in tensors)
        recipe, stddev = Recipe(tuple(stored), transpose=True, **joint), in_size**-0.5
        self.kernel = nnx.Param(kernel, recipe=recipe, split=split, stddev=stddev)
        of_bias: Any = tuple(x.of("bias") for x in tensors), (out_size,), dtypes.activations
        split = None if split == "in" else split
        self.bias = weight(*of_bias, split=split, **joint) if bias else None

    def __call__(
        self, x: Array, out_dtype: jnp.dtype | None = None, outputs: slice = slice(None)
    ) -> Array:
        """Map ``[..., in]`` to selected outputs ``[..., out]``, by default in the dtype of x."""
        kernel = take_outputs(self.kernel[...], outputs)
        out = all_sum(dot(x, kernel, out_dtype, self.implementation), self.num_sums)
        return out if self.bias is None else out + self.bias[outputs]

    def partial_sums(self, x: Array) -> Array:
        """Map ``[..., in]`` to partial sums f32 ``[P, ..., out]`` if a split pays off."""
        if self.bias is not None or resolve(self.implementation) == "xla":
            return self(x)
        sums = partial_dot(x, self.kernel[...], self.implementation)
        if self.num_sums == 1:
            return sums
        return all_sum(whole(sums, x.ndim, x.dtype), self.num_sums)


class RMSNorm(nnx.Module):
    """Normalisation over the last axis, times ``scale + offset``."""

    def __init__(
        self,
        config: TransformerConfig,
        size: int,
        name: str,
        *,
        offset: float = 0.0,
        factor: float = 1.0,
        rows: np.ndarray | None = None,
        split: str | None = None,
        unit: int = 1,
        eps: float | None = None,
        implementation: str | None = None,
    ) -> None:
        """``name`` is that of the stored scale without ``.weight``; ``factor`` multiplies it.

        ``rows`` is its order in the file, if that differs. ``eps`` is the model's by default.
        """
        tensor, dtype = Part(f"{name}.weight", (size,), rows, factor), config.dtypes.activations
        scale = partial(weight, (tensor,), (size,), dtype, mean=1.0 - offset)
        self.scale = scale(split=split, unit=unit)
        self.eps = config.rms_norm_eps if eps is None else eps
        self.offset, self.implementation = offset, implementation

    @property
    def factor(self) -> Array:
        """Multiplier ``[size]`` of the normalised values, in float32 if there is an offset."""
        return with_offset(self.scale[...], self.offset)

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.factor, self.eps, self.implementation)

    def add(self, x: Array, delta: Array | None) -> tuple[Array, Array]:
        """Return ``x + delta`` and the norm of this sum. If ``delta`` is None, the sum is ``x``."""
        if delta is None:
            return x, self(x)
        options: dict[str, Any] = {"offset": self.offset, "implementation": self.implementation}
        return add_norm(x, delta, self.scale[...], eps=self.eps, **options)


class Embedding(nnx.Module):
    """Token table ``[V, D]``; with tied embeddings, it is also the output projection."""

    def __init__(
        self,
        vocab_size: int,
        size: int,
        name: str,
        *,
        dtype: jnp.dtype,
        split: str | None = None,
        shards: int = 1,
        implementation: str | None = None,
    ) -> None:
        """``name`` is that of the stored table without ``.weight``.

        ``shards`` devices share the tokens if it is ``split``.
        """
        self.implementation, self.shards = implementation, 1 if split is None else shards
        table = partial(weight, f"{name}.weight", (vocab_size, size), dtype)
        self.table = table(split=split, stddev=size**-0.5)

    def __call__(self, tokens: Array) -> Array:
        """Rows ``[..., D]`` of token ids ``[...]``."""
        return rows_of(self.table[...], tokens, self.shards)

    def attend(self, x: Array) -> Array:
        """Float32 logits ``[..., V]`` of hidden states ``[..., D]``, of the device's own tokens."""
        how: dict[str, Any] = {"is_transposed": True, "implementation": self.implementation}
        return plain_dot(x, self.table[...], jnp.float32, **how)


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
            of_sinks = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
            scores = jnp.concatenate([scores, of_sinks.astype(scores.dtype)], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)
        return jnp.einsum("bntl,blnh->btnh", weights, v, **float32).astype(q.dtype)
    # JAX mixes bfloat16 and float32 here, which a caller's strict promotion would reject
    with jax.default_matmul_precision(precision), jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, **options)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; ``attend`` manages keys and values."""

    def __init__(
        self, config: TransformerConfig, kind: LayerKind, at: str, *, in_size: int | None = None
    ) -> None:
        """``in_size`` is the hidden width by default."""
        self.kind = kind
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.shape = (heads // kind.shards, max(1, kv_heads // kind.shards), dim)
        queries = self.queries(config, kind)
        # or more, if a subclass also has gates
        self.num_queries = queries.shape[0] // dim // kind.shards
        q_size, kv_size, size = heads * dim, kv_heads * dim, config.hidden_size
        has_norms, of_head, at = kind.qk_norm or kind.joint_qk_norm, kind.qk_norm, f"{at}self_attn."
        # Keys and values are stored divided by these. Queries and outputs are multiplied instead,
        # so that the layer computes the same.
        key, value = (2.0**exponent for exponent in kind.exponents)
        if "qkv_proj" in kind.fused:
            key = value = 1.0
        elif has_norms and kind.norm_offset:
            key = 1.0
        of_rows, of_norm = (1.0, key) if has_norms else (key, 1.0)
        tensors = (
            replace(queries, factor=of_rows),
            Part("k_proj", (kv_size,), _row_order(config, kind, kv_heads), 1 / of_rows),
            self.values(kv_size, 1 / value),
        )
        options: dict[str, Any] = {"fused": "qkv_proj", "bias": kind.qkv_bias, "split": "out"}
        # gates are a projection of their own
        widths = (q_size,) * (queries.shape[0] // q_size) + (kv_size, kv_size)
        self.qkv = kind.linear(in_size or size, at, *tensors, widths=widths, unit=dim, **options)
        options = {"bias": kind.output_bias, "split": "in", "in_factor": value}
        self.output = kind.linear(q_size, at, Part("o_proj", (size,)), **options)
        sizes, split = ((dim, dim), None) if of_head else ((q_size, kv_size), "out")
        norm = partial(kind.norm, config, split=split, unit=dim)
        order = partial(_row_order, config, kind)
        q_rows, k_rows = (order(1), order(1)) if of_head else (order(heads), order(kv_heads))
        q_norm = partial(norm, sizes[0], f"{at}q_norm", factor=of_norm, rows=q_rows)
        k_norm = partial(norm, sizes[1], f"{at}k_norm", factor=1 / of_norm, rows=k_rows)
        self.q_norm = q_norm() if has_norms else None
        self.k_norm = k_norm() if has_norms else None
        sinks = partial(weight, kind.tensor(f"{at}sinks"), (heads,), kind.dtypes.activations)
        self.sinks = sinks(split="out") if kind.sinks else None

    def queries(self, config: TransformerConfig, kind: LayerKind) -> Part:
        """The projection whose rows are those of queries."""
        heads = config.num_heads
        return Part("q_proj", (heads * config.head_dim,), _row_order(config, kind, heads))

    def values(self, size: int, factor: float) -> Part:
        """The projection whose ``size`` rows are those of values, which are stored by a factor."""
        return Part("v_proj", (size,), factor=factor)

    @property
    def cache(self) -> Cache:
        """Keys and values."""
        _, kv_heads, dim = self.shape
        token = token_kv(self.kind.dtypes.kv, kv_heads * self.kind.shards, dim)
        return Cache(token, self.kind.window)

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
        """Map ``[B, T, in_size]`` to ``[B, T, D]`` or partial sums of it; also return updated kv.

        With ``row`` i32 ``[B]``, all rows are stored, but only this row is output: ``[B, 1, D]``.
        ``by_token`` is ignored.
        """
        heads, kv_heads, dim = self.shape
        joined = self.qkv.partial_sums(x)
        joined = joined.reshape(*joined.shape[:-1], self.num_queries + 2 * kv_heads, dim)
        q, k, v = jnp.split(joined, (self.num_queries, self.num_queries + kv_heads), axis=-2)
        factor = 1.0 if self.kind.scale is None else self.kind.scale * dim**0.5
        if self.q_norm is not None and self.k_norm is not None and self.kind.joint_qk_norm:
            q, k, v = (whole(y, x.ndim + 1, x.dtype) for y in (q, k, v))
            q, k = joint_norms((q, k), (self.q_norm, self.k_norm), self.kind.shards)
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
        _, kv_heads, dim = self.shape
        # a third of the columns with 32 query and 8 KV heads
        joined = self.qkv(x, outputs=slice(self.num_queries * dim, None))
        k, v = jnp.split(joined.reshape(*x.shape[:-1], 2 * kv_heads, dim), 2, axis=-2)
        return store(kv, layer, k, v, self.key_rope(rope))

    def key_rope(self, rope: RopeTables) -> RopeTables:
        """Return ``rope`` with the norm of the keys, if there is one."""
        if (norm := self.k_norm) is None:
            return rope
        return rope._replace(norms=(norm.factor, norm.factor, norm.eps))


def _row_order(config: TransformerConfig, kind: LayerKind, heads: int) -> np.ndarray | None:
    """The order in which kernels rotate the stored rows of heads, if it differs."""
    dim, size = config.head_dim, config.rotary_dim
    if size is None and not kind.interleaved:
        return None
    return rotated_rows(heads, dim, dim if size is None else size, interleaved=kind.interleaved)


class MLP(nnx.Module):
    """Gated feed-forward ``down(activation(gate(x)) * up(x))``; gate and up share one matrix."""

    def __init__(
        self,
        config: TransformerConfig,
        kind: LayerKind,
        at: str,
        *,
        inner: int | None = None,
        module: str = "mlp",
    ) -> None:
        """``inner`` is the configuration's ``intermediate_size`` by default."""
        self.kind, size, at = kind, config.hidden_size, f"{at}{module}."
        inner = config.intermediate_size if inner is None else inner
        linear = partial(kind.linear, bias=kind.mlp_bias)
        tensors = (Part(name, (inner,)) for name in ("gate_proj", "up_proj"))
        self.gate_up = linear(size, at, *tensors, fused="gate_up_proj", split="out")
        self.down = linear(inner, at, Part("down_proj", (size,)), split="in")

    def __call__(self, x: Array, by_token: TokenInputs | None = None) -> Array:
        """Map ``[..., D]`` to ``[..., D]`` or partial sums of it; ignores ``by_token``."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        activation = ACTIVATIONS[self.kind.activation]
        return self.down.partial_sums(activation(gate) * up)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward with residual connections, and norms before or after each."""

    def __init__(
        self, config: TransformerConfig, kind: LayerKind, at: str, *, has_input_norm: bool = True
    ) -> None:
        def norm(name: str, is_there: bool, eps: float | None = None) -> RMSNorm | None:
            stored = f"{at}{name}_layernorm"
            return kind.norm(config, config.hidden_size, stored, eps=eps) if is_there else None

        pre, post = kind.pre_norm, kind.post_norm
        self.kind = kind
        self.input_norm = norm("input", pre and has_input_norm)
        self.attention = kind.mixer(config, kind, at)
        self.attention_output_norm = norm("post_attention", post, kind.post_norm_eps)
        self.post_attention_norm = norm("pre_feedforward" if post else "post_attention", pre)
        self.mlp = kind.feed_forward(config, kind, at)
        self.mlp_output_norm = norm("post_feedforward", post, kind.post_norm_eps)
        scalar = partial(weight, f"{at}layer_scalar", (1,), kind.dtypes.activations, mean=1.0)
        self.scalar = scalar() if kind.has_scalar else None

    def __call__(
        self,
        x: Array,
        delta: Array | None,
        rope: RopeTables,
        kv: Any,
        layer: int,
        attend: Attend,
        row: Array | None = None,
        by_token: TokenInputs | None = None,
    ) -> tuple[Array, Array, Array, Any]:
        """Return ``x + delta``, the layer's output as two summands, and the updated kv.

        The next norm adds the summands, so that addition and norm run as one kernel. With ``row``
        i32 ``[B]``, the output has only this row: ``[B, 1, D]``. ``by_token`` is what mixer and
        feed-forward may read of the tokens ``[B, T]``; with ``row``, it is None.
        """
        x, normed = _add_norm(self.input_norm, x, delta)
        mixed, kv = self.attention(normed, rope, kv, layer, attend, row, by_token)
        mixed = self._output(self.attention_output_norm, x, mixed)
        middle, normed = _add_norm(self.post_attention_norm, pick_row(x, row), mixed)
        out = self._output(self.mlp_output_norm, x, self.mlp(normed, by_token))
        if self.scalar is not None:
            middle, out = (_times(y, self.scalar[...]) for y in (middle, out))
        return x, middle, out, kv

    def store(self, x: Array, rope: RopeTables, kv: Any, layer: int, store: Store) -> Any:
        """Store the keys and values of ``x [B, T, D]``; return the updated kv."""
        return self.attention.store(_add_norm(self.input_norm, x, None)[1], rope, kv, layer, store)

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

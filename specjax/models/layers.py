"""Layers shared by target models and draft heads (flax nnx).

Axes: B batch, T tokens per row, D hidden, N query heads, KV key/value heads, H head dim, V vocab.
Weights are stored ``[in, out]``; query, key and value projections are one matrix, and so are gate
and up. A new module is zeros; its variables say how random weights would be spread. In float32
every product asks for HIGHEST precision, since the default on a GPU is TF32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.config import RopeScaling, TransformerConfig
from specjax.kernels.add_norm import add_norm, rms_norm
from specjax.kernels.rope_store import rotate

# cosine and sine, float32 [B,T,1,H/2] each
RopeTables = tuple[jax.Array, jax.Array]
# attend(kv, layer, q [B,T,N,H], k [B,T,KV,H], v [B,T,KV,H], rope) -> (kv, out [B,T,N,H]).
# It rotates q and k, stores k and v, and returns the attention output; what `kv` is, is the
# caller's business.
Attend = Callable[[Any, int, jax.Array, jax.Array, jax.Array, RopeTables], tuple[Any, jax.Array]]
AttendRotated = Callable[[Any, int, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]


def precision_for(dtype: jnp.dtype) -> jax.lax.Precision:
    """Matrix-product precision of a dtype: IEEE float32 for float32, the default otherwise."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def dot(x: jax.Array, kernel: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """``x [..., in] @ kernel [in, out]``, accumulated in float32."""
    precision, out = precision_for(x.dtype), out_dtype or x.dtype
    return jnp.matmul(x, kernel, precision=precision, preferred_element_type=out)


def pick_row(x: jax.Array, row: jax.Array | None) -> jax.Array:
    """``[B, T, D]`` at rows i32 ``[B]`` or ``[B, R]``: ``[B, R, D]``; everything for ``None``."""
    if row is None:
        return x
    return jnp.take_along_axis(x, row.reshape(x.shape[0], -1, 1), axis=1, mode="clip")


# most rows whose small products pay a split along the inner axis, and the widest split output
MAX_SPLIT_ROWS = 63
MAX_SPLIT_COLUMNS = 36864


def num_partial_sums(rows: int, in_size: int, out_size: int) -> int:
    """Into how many partial sums a product of few rows is split, a power of two up to 8.

    A matrix of few columns keeps too few multiprocessors busy in one piece. XLA splits such
    products itself (4 or 8 ways at the Llama-3.1-8B shape), with a launch for the reduction, which
    costs more than the split gains from 64 rows on. A single row is left to XLA.
    """
    parts = 8
    while parts > 1 and (
        rows == 1
        or rows > MAX_SPLIT_ROWS
        or parts * out_size > MAX_SPLIT_COLUMNS
        or in_size % parts
        or in_size // parts < 64
    ):
        parts //= 2
    return parts


class Linear(nnx.Module):
    """Affine map with a ``kernel [in, out]`` and an optional ``bias [out]``."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype: jnp.dtype) -> None:
        self.kernel = nnx.Param(jnp.zeros((in_size, out_size), dtype), stddev=in_size**-0.5)
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., in]`` to ``[..., out]``."""
        out = dot(x, self.kernel[...])
        return out if self.bias is None else out + self.bias[...]

    def partial_sums(self, x: jax.Array, kernels: str) -> jax.Array:
        """f32 ``[P, ..., out]`` whose sum is the product, or that itself where no split pays."""
        kernel = self.kernel[...]
        size, out_size = kernel.shape
        parts = num_partial_sums(x.size // size, size, out_size)
        if kernels != "pallas" or x.dtype == jnp.float32 or self.bias is not None or parts == 1:
            return self(x)
        sums = jnp.einsum(
            "rpi,pio->pro",
            x.reshape(-1, parts, size // parts),
            kernel.reshape(parts, size // parts, out_size),
            preferred_element_type=jnp.float32,
        )
        return sums.reshape(parts, *x.shape[:-1], out_size)


class RMSNorm(nnx.Module):
    """Normalisation over the last axis; ``kernels`` names the implementation of the fused form."""

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype, kernels: str = "xla") -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype), mean=1.0)
        self.eps = eps
        self.kernels = kernels

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise ``[..., size]``; the dtype stays."""
        return rms_norm(x, self.scale[...], self.eps)

    def add(self, x: jax.Array, delta: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """``x + delta`` and its norm; ``x`` and its norm where there is nothing to add."""
        if delta is None:
            return x, self(x)
        return add_norm(x, delta, self.scale[...], eps=self.eps, implementation=self.kernels)


class Embedding(nnx.Module):
    """Token table ``[V, D]``; also the output projection of a model with tied embeddings."""

    def __init__(self, vocab_size: int, size: int, *, dtype: jnp.dtype) -> None:
        self.table = nnx.Param(jnp.zeros((vocab_size, size), dtype), stddev=size**-0.5)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Rows ``[..., D]`` of token ids ``[...]``."""
        return self.table[...].at[tokens].get(mode="clip")

    def attend(self, x: jax.Array) -> jax.Array:
        """Float32 logits ``[..., V]`` of hidden states ``[..., D]``."""
        return jax.lax.dot_general(
            x,
            self.table[...],
            (((x.ndim - 1,), (1,)), ((), ())),
            precision=precision_for(x.dtype),
            preferred_element_type=jnp.float32,
        )


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Inverse rotary frequencies, float32 ``[H / 2]``.

    ``llama3`` scaling leaves short wavelengths alone, divides long ones by ``factor`` and blends in
    between, as in the Llama 3.1 release.
    """
    inverse = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None or scaling.rope_type == "linear":
        return (inverse / (1.0 if scaling is None else scaling.factor)).astype(np.float32)
    original = scaling.original_max_position_embeddings
    wavelength = 2 * np.pi / inverse
    smooth = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = np.clip(smooth, 0.0, 1.0)
    return ((1 - blend) * inverse / scaling.factor + blend * inverse).astype(np.float32)


def rope_tables(config: TransformerConfig, positions: jax.Array) -> RopeTables:
    """Cosine and sine, float32 ``[B, T, 1, H / 2]``, of integer positions ``[B, T]``."""
    inverse = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angles = positions.astype(jnp.float32)[..., None, None] * inverse
    return jnp.cos(angles), jnp.sin(angles)


def rotated(attend: AttendRotated) -> Attend:
    """The ``attend`` of a function that takes queries and keys whole and already rotated."""

    def rotate_first(
        kv: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, rope: RopeTables
    ) -> tuple[Any, jax.Array]:
        if q.ndim == 5:  # partial sums, which only bfloat16 products come as
            q, k, v = (x.sum(axis=0).astype(jnp.bfloat16) for x in (q, k, v))
        return attend(kv, layer, rotate(q, *rope), rotate(k, *rope), v)

    return rotate_first


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; ``attend`` owns the keys and values."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        in_size: int,
        qkv_bias: bool,
        output_bias: bool = False,
        qk_norm: bool = False,
        kernels: str = "xla",
    ) -> None:
        dtype, eps = config.jnp_dtype, config.rms_norm_eps
        self.kernels = kernels
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.shape = (heads, kv_heads, dim)
        self.qkv = Linear(in_size, (heads + 2 * kv_heads) * dim, bias=qkv_bias, dtype=dtype)
        self.output = Linear(heads * dim, config.hidden_size, bias=output_bias, dtype=dtype)
        self.q_norm = RMSNorm(dim, eps=eps, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(dim, eps=eps, dtype=dtype) if qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        rope: RopeTables,
        kv: Any,
        layer: int,
        attend: Attend,
        row: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """``[B, T, in_size]`` to ``[B, T, D]`` or its partial sums, and kv as attend left it.

        With ``row`` i32 ``[B]`` all is stored, and the output ``[B, 1, D]`` is that of these rows.
        """
        heads, kv_heads, dim = self.shape
        # query and key norms read whole products
        qkv = self.qkv(x) if self.q_norm else self.qkv.partial_sums(x, self.kernels)
        qkv = qkv.reshape(*qkv.shape[:-1], heads + 2 * kv_heads, dim)
        q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        kv, out = attend(kv, layer, q, k, v, rope)
        out = pick_row(out.reshape(*x.shape[:-1], heads * dim), row)
        return self.output.partial_sums(out, self.kernels), kv


class MLP(nnx.Module):
    """SwiGLU feed-forward: ``down(silu(gate(x)) * up(x))`` with gate and up in one matrix."""

    def __init__(
        self, config: TransformerConfig, *, bias: bool = False, kernels: str = "xla"
    ) -> None:
        self.kernels = kernels
        inner, dtype = config.intermediate_size, config.jnp_dtype
        self.gate_up = Linear(config.hidden_size, 2 * inner, bias=bias, dtype=dtype)
        self.down = Linear(inner, config.hidden_size, bias=bias, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., D]`` or its partial sums."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down.partial_sums(jax.nn.silu(gate) * up, self.kernels)

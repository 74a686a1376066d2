"""How a pool stores keys and values, and how kernels read them.

A pool is ``[L, slots, 2, KV, H]`` in the dtype of activations or, for 8-bit floats (e4m3), words
``[L, slots, 2, KV, H / 2]``: word i has the values of the dims i (low byte) and i + H / 2 of a
head, which rotary embeddings rotate with each other.

Tensor cores need values with the tokens along their inner axis, and only elements of 16 bits can be
transposed on the way there. So 32 requests with 8 tokens after 8,192 take 197 us per layer of 8 KV
heads of 128, and 237 with bytes (H200). Also, kernels cannot address arrays of bytes that take 2 to
4 GiB.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from specjax.kernels.backend import WORD, inline_ptx, spans, takes_head_dim

from specjax.config import TransformerConfig

# minimum compute capability of GPUs that convert 8-bit floats
LEAST_CAPABILITY = 8.9

# both convert two words, one per half of a register, to float16; e4m3 has a converter for pairs
FROM_WORDS = (
    "{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 x, a;"
    " cvt.rn.f16x2.e4m3x2 y, b; prmt.b32 $0, x, y, %s; }"
)


def refusals(model: TransformerConfig, device: jax.Device, *, deterministic: bool) -> Iterator[str]:
    """Why a device cannot store the KV of a model as its ``kv_cache_dtype`` says."""
    if model.kv_cache_dtype == "auto":
        return
    option = f"kv_cache_dtype={model.kv_cache_dtype!r}"
    capability = getattr(device, "compute_capability", LEAST_CAPABILITY)
    if float(capability) < LEAST_CAPABILITY:
        yield (
            f"{option} needs compute capability {LEAST_CAPABILITY} or later; {device.device_kind} "
            f"has {capability}"
        )
    if deterministic and not takes_head_dim(model.head_dim, WORD):
        yield (
            "enable_deterministic_inference=True needs a head dim of at least 32 with "
            f"{option}, not {model.head_dim}"
        )


def warnings(model: TransformerConfig, device: jax.Device) -> Iterator[str]:
    """What is slow if a device stores the KV of a model as its ``kv_cache_dtype`` says."""
    is_narrow = model.kv_cache_dtype != "auto" and device.platform != "cpu"
    if is_narrow and not takes_head_dim(model.head_dim, WORD):
        yield (
            f"with kv_cache_dtype={model.kv_cache_dtype!r} and head_dim={model.head_dim}, every "
            "round reads the KV of the whole context length; kernels take heads of 32 to 256 dims, "
            "in steps of 32"
        )


def from_words(words: jax.Array, implementation: str) -> tuple[jax.Array, jax.Array]:
    """Values of the low and of the high bytes; in a GPU kernel as float16, otherwise as e4m3."""
    if implementation == "pallas":
        shape = jax.ShapeDtypeStruct(words.shape, jnp.float16)
        low, high = (
            inline_ptx(
                FROM_WORDS % selector,
                args=[words],
                constraints="=r,r",
                pack=2,
                result_shape_dtypes=[shape],
            )[0]
            for selector in ("0x5410", "0x7632")
        )
        return low, high
    halves = words.astype(jnp.uint8), (words >> 8).astype(jnp.uint8)
    low, high = (jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn) for x in halves)
    return low, high


def saturated(x: Array, dtype: jnp.dtype | type) -> Array:
    """Cast ``x`` to a smaller dtype; values beyond its range become its largest, and NaN stays."""
    if x.dtype == dtype:
        return x
    most, wide = float(jnp.finfo(dtype).max), x.astype(jnp.float32)
    # in a GPU kernel, minimum and maximum drop NaN
    return jnp.where(wide == wide, jnp.clip(wide, -most, most), wide).astype(dtype)


def to_words(low: Array, high: Array) -> Array:
    """Words of the values of the first and of the second half of the dims of a head."""
    narrow = (saturated(x, jnp.float8_e4m3fn) for x in (low, high))
    low_bytes, high_bytes = (
        jax.lax.bitcast_convert_type(x, jnp.uint8).astype(WORD) for x in narrow
    )
    return low_bytes | high_bytes << 8


def to_pool(values: Array, dtype: jnp.dtype) -> Array:
    """Keys or values ``[..., H]`` as a pool of a dtype stores them."""
    if dtype == WORD:
        return to_words(*jnp.split(values, 2, axis=-1))
    return saturated(values, dtype)


def from_pool(stored: Array, dtype: jnp.dtype) -> Array:
    """Undo :func:`to_pool`; ``[..., H]`` of a dtype."""
    if stored.dtype == WORD:
        stored = jnp.concatenate(from_words(stored, "xla"), axis=-1)
    return stored.astype(dtype)


def head_dim_of(pool: Any) -> int:
    """Number of values in a head of a pool."""
    return pool.shape[-1] * (2 if pool.dtype == WORD else 1)


def for_products(q: Array, pool_ref: Any) -> Array:
    """Queries in the dtype of products with keys from a pool.

    A GPU converts e4m3 to float16, which holds all of its values, in a quarter of the instructions
    that bfloat16 takes: these limit attention over long contexts.
    """
    if q.dtype != jnp.bfloat16 or pool_ref.dtype == q.dtype:
        return q
    return saturated(q, jnp.float16)


def head_spans(pool_ref: Any) -> tuple[Any, ...]:
    """The slices of a head's dims in which :func:`load_kv` returns keys and values."""
    if pool_ref.dtype != WORD:
        return spans(pool_ref.shape[4])
    half = pool_ref.shape[4]
    return *spans(half), *spans(half, half)


def slots_of(table_ref: Any, request: Array, key: Array, size: int) -> Array:
    """Slots of the positions ``key [C]`` of a request; ``size`` is the page's."""
    pages = table_ref.shape[1]
    page = table_ref[request, jnp.minimum(key // size, pages - 1)]
    return jnp.where(key // size < pages, page, 0) * size + key % size


def load_kv(
    pool_ref: Any, layer: Array, slot: Array, head: Array, dtype: jnp.dtype, implementation: str
) -> tuple[list[Array], list[Array]]:
    """Keys and values ``[C, size]`` of a head at slots ``[C]``, for each span of its dims."""

    def load(which: int) -> list[Array]:
        values = [pool_ref[layer, slot, which, head, span] for span in spans(pool_ref.shape[4])]
        if pool_ref.dtype == WORD:
            low, high = zip(*(from_words(x, implementation) for x in values), strict=True)
            values = [*low, *high]
        return [x.astype(dtype) for x in values]

    return load(0), load(1)

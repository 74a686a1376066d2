"""The bonus token of each request: the last valid entry of its accepted tokens.

The stride of a request is the accept width A = num_steps + 1, not ``num_draft_tokens``: in a tree
the two differ, and the wider stride reads another request's row (SGLang change #26866).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from specjax.kernels.backend import check_implementation, load, power_of_two, store, triton_call

# one thread a request: batches up to this size are one program of one warp
MAX_ROWS = 128


def _reference(accept_tokens: jax.Array, num_accepted_tokens: jax.Array) -> jax.Array:
    last = jnp.maximum(num_accepted_tokens - 1, 0)
    tokens = jnp.take_along_axis(accept_tokens, last[:, None], axis=1)[:, 0]
    return jnp.where(num_accepted_tokens > 0, tokens, 0)


def _rows(batch: int) -> int:
    return min(power_of_two(batch), MAX_ROWS)


def specjax_fill_bonus(accept_ref: Any, count_ref: Any, out_ref: Any) -> None:
    """Kernel body: one program a block of requests, one lane a request."""
    batch = out_ref.shape[0]
    block = _rows(batch)
    start = pl.program_id(0) * block
    rows = start + jnp.arange(block, dtype=jnp.int32)
    inside = rows < batch
    counts = load(count_ref.at[pl.ds(start, block)], mask=inside, other=0)
    last = jnp.maximum(counts - 1, 0)
    tokens = load(accept_ref.at[rows, last], mask=inside & (counts > 0), other=0)
    store(out_ref.at[pl.ds(start, block)], tokens, mask=inside)


def fill_bonus_tokens(
    accept_tokens: jax.Array,
    num_accepted_tokens: jax.Array,
    *,
    implementation: str = "xla",
    interpret: bool | None = None,
) -> jax.Array:
    """Pick each request's bonus token.

    Args:
        accept_tokens: i32 ``[B, A]``, the target's tokens along the accepted path.
        num_accepted_tokens: i32 ``[B]`` in ``0 .. A``, valid entries of each row, bonus included; 0
            for padding.

    Returns:
        i32 ``[B]``: ``accept_tokens[b, num_accepted_tokens[b] - 1]``, 0 for padding rows.
    """
    check_implementation(implementation)
    if accept_tokens.ndim != 2 or num_accepted_tokens.shape != accept_tokens.shape[:1]:
        raise ValueError(
            f"accept_tokens {accept_tokens.shape} must be [B, A] and num_accepted_tokens "
            f"{num_accepted_tokens.shape} [B]"
        )
    if implementation == "xla" or accept_tokens.size == 0:
        return _reference(accept_tokens, num_accepted_tokens)
    batch = accept_tokens.shape[0]
    return triton_call(
        specjax_fill_bonus,
        grid=(pl.cdiv(batch, _rows(batch)),),
        out_shape=jax.ShapeDtypeStruct((batch,), accept_tokens.dtype),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
    )(accept_tokens, num_accepted_tokens)

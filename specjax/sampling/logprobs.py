"""Log-probabilities of chosen and most likely tokens.

They are those of the target's raw logits: before penalties, bias, temperature and filters, so that
they equal what a prefill of the same text reports, whatever the sampling parameters.
"""

import jax
import jax.numpy as jnp

from specjax.types import Logprobs


def zero_logprobs(shape: tuple[int, ...], num_top: int) -> Logprobs:
    """Of tokens of ``shape`` where none are asked for."""
    return Logprobs(
        chosen=jnp.zeros(shape, jnp.float32),
        top_ids=jnp.zeros((*shape, num_top), jnp.int32),
        top_values=jnp.zeros((*shape, num_top), jnp.float32),
    )


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, top_logprobs: jax.Array, num_top: int
) -> Logprobs:
    """Of tokens i32 ``[B, T]`` and the best ones; those are zeros if ``top_logprobs [B]`` are 0."""
    total = jax.nn.logsumexp(logits, axis=-1)

    def best() -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(logits, num_top)
        return ids.astype(jnp.int32), values - total[:, :, None]

    nothing = zero_logprobs(tokens.shape, num_top)
    top_ids, top_values = jax.lax.cond(
        jnp.any(top_logprobs > 0), best, lambda: (nothing.top_ids, nothing.top_values)
    )
    chosen = jnp.take_along_axis(logits, tokens[:, :, None], axis=-1)[:, :, 0] - total
    return Logprobs(chosen=chosen, top_ids=top_ids, top_values=top_values)

"""The bonus token of each request: the last valid entry of its accepted tokens.

The stride of a request is the accept width A = num_steps + 1, not ``num_draft_tokens``: in a tree
the two differ, and the wider stride reads another request's row (SGLang change #26866).
"""

import jax
import jax.numpy as jnp


def fill_bonus_tokens_reference(
    accept_tokens: jax.Array, num_accepted_tokens: jax.Array
) -> jax.Array:
    """Plain ``jax.numpy`` form of :func:`fill_bonus_tokens`."""
    last = jnp.maximum(num_accepted_tokens - 1, 0)
    tokens = jnp.take_along_axis(accept_tokens, last[:, None], axis=1)[:, 0]
    return jnp.where(num_accepted_tokens > 0, tokens, 0)


def fill_bonus_tokens(accept_tokens: jax.Array, num_accepted_tokens: jax.Array) -> jax.Array:
    """Pick each request's bonus token.

    Args:
        accept_tokens: i32 ``[B, A]``, the target's tokens along the accepted path.
        num_accepted_tokens: i32 ``[B]``, valid entries of each row, bonus included; 0 for padding.

    Returns:
        i32 ``[B]``: ``accept_tokens[b, num_accepted_tokens[b] - 1]``, 0 for padding rows.

    Raises:
        ValueError: if the shapes do not belong together.
    """
    if accept_tokens.ndim != 2 or num_accepted_tokens.shape != accept_tokens.shape[:1]:
        raise ValueError(
            f"accept_tokens {accept_tokens.shape} must be [B, A] and num_accepted_tokens "
            f"{num_accepted_tokens.shape} [B]"
        )
    return fill_bonus_tokens_reference(accept_tokens, num_accepted_tokens)

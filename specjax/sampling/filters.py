"""Top-k, top-p and min-p without sorting the vocabulary.

Every filter keeps the tokens from some logit on upwards, so it is enough to find that logit. It is
found bit by bit: floats are ordered as their bits are, once the sign is folded in, and 32 counts or
sums over the vocabulary decide the 32 bits. Ties need no care, since equal logits share their bits.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# where -inf lies among all 32-bit floats in ascending order
LOWEST_KEY = 0x007FFFFF
SMALLEST_NORMAL = 0x00800000


def _value(keys: jax.Array) -> jax.Array:
    """The float of each place u32 in the ascending order of floats; NaN outside the infinities.

    Subnormal floats are zero: a CPU compares them so, but would hand them on.
    """
    top = jnp.uint32(1 << 31)
    bits = jnp.where(keys >= top, keys ^ top, ~keys)
    bits = jnp.where((bits & (top - 1)) < SMALLEST_NORMAL, 0, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest(reaches: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest float f32 ``[rows]`` for which ``reaches`` is true, -inf where there is none.

    ``reaches`` maps f32 ``[rows]`` to bool ``[rows]``; it is false for NaN, and true below any
    value for which it is true.
    """

    def decide(i: jax.Array, keys: jax.Array) -> jax.Array:
        higher = keys + (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(reaches(_value(higher)), higher, keys)

    lowest = jnp.full(rows, LOWEST_KEY, jnp.uint32)
    return _value(jax.lax.fori_loop(0, 32, decide, lowest))


def top_k_threshold(logits: jax.Array, top_ks: jax.Array) -> jax.Array:
    """The k-th largest f32 ``[N]`` of logits ``[N, V]``, k i32 ``[N]``; -inf where k exceeds V."""

    def reaches(values: jax.Array) -> jax.Array:
        return jnp.sum(logits >= values[:, None], axis=-1, dtype=jnp.int32) >= top_ks

    return _largest(reaches, logits.shape[0])


def _top_p_threshold(logits: jax.Array, weights: jax.Array, top_ps: jax.Array) -> jax.Array:
    """The smallest logit of the smallest set that holds a share of the weight, f32 ``[N]``.

    Weights ``[N, V]`` ascend with the logits, to 1; from a share of 1 on the threshold is -inf.
    """
    goals = top_ps * jnp.sum(weights, axis=-1)
    # a product that underflows would be reached by no tokens at all
    goals = jnp.maximum(goals, jnp.finfo(jnp.float32).tiny)

    def reaches(values: jax.Array) -> jax.Array:
        inside = jnp.where(logits >= values[:, None], weights, 0.0)
        return (jnp.sum(inside, axis=-1) >= goals) & (top_ps < 1.0)

    return _largest(reaches, logits.shape[0])


def filter_logits(
    logits: jax.Array, top_ks: jax.Array, top_ps: jax.Array, min_ps: jax.Array
) -> jax.Array:
    """Set the logits f32 ``[N, V]`` outside top-k, top-p and min-p to -inf, in this order.

    They are divided by the temperature already, and may be -inf. One token of a row stays at least.
    Top-k keeps ties with the k-th logit. Top-p keeps the smallest set of tokens whose probability,
    on what top-k left (as in SGLang's verification, vLLM and Hugging Face transformers), reaches
    ``top_ps``, and ties with its last. Min-p keeps tokens at least ``min_ps`` times as likely as
    the best.
    """
    rows, vocab_size = logits.shape
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    everything = jnp.full(rows, -jnp.inf, jnp.float32)
    kth = jax.lax.cond(
        jnp.any(top_ks < vocab_size),
        lambda: top_k_threshold(logits, jnp.maximum(top_ks, 1)),
        lambda: everything,
    )
    weights = jnp.where(logits >= kth[:, None], weights, 0.0)
    last = jax.lax.cond(
        jnp.any(top_ps < 1.0), lambda: _top_p_threshold(logits, weights, top_ps), lambda: everything
    )
    kept = (logits >= jnp.maximum(kth, last)[:, None]) & (weights >= min_ps[:, None])
    return jnp.where(kept, logits, -jnp.inf)

"""The target's own next token, greedy or sampled, with noise that does not depend on batching.

Exactness rests on this rule: at every verified row the target draws its token with noise keyed by
(request seed, absolute position of the drawn token). Plain decoding draws the same token at the
same position, so accepting a draft only if it equals the draw keeps the output the same token for
token, and accepts each draft with the target's own probability.

Filters apply in the order temperature, top-k, top-p; top-p works on the distribution that top-k
left, as in SGLang's verification, vLLM and Hugging Face transformers.
"""

import jax
import jax.numpy as jnp

from specjax.types import SamplingTable


def filter_logits(logits: jax.Array, top_ks: jax.Array, top_ps: jax.Array) -> jax.Array:
    """Set the logits outside top-k and top-p to -inf.

    Args:
        logits: f32 ``[N, V]``, already divided by the temperature.
        top_ks: i32 ``[N]``; V or more keeps all.
        top_ps: f32 ``[N]``; 1 keeps all.

    Returns:
        f32 ``[N, V]``. Ties with the last kept logit are kept for top-k; the smallest set of
        tokens whose probability reaches top-p is kept for top-p, and never less than one token.
    """
    descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    last = jnp.clip(top_ks, 1, logits.shape[-1])[:, None] - 1
    kth = jnp.take_along_axis(descending, last, axis=-1)
    kept = jnp.where(descending >= kth, descending, -jnp.inf)
    probs = jax.nn.softmax(kept, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    inside = (before < top_ps[:, None]) | (top_ps[:, None] >= 1.0)
    inside = inside.at[:, 0].set(True) & (kept > -jnp.inf)
    threshold = jnp.min(jnp.where(inside, kept, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def position_noise(seeds: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise f32 ``[N, V]`` keyed by request seed u32 ``[N, 2]`` and position i32 ``[N]``."""

    def draw(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)

    return jax.vmap(draw)(seeds, positions)


def sample(logits: jax.Array, positions: jax.Array, sampling: SamplingTable) -> jax.Array:
    """Draw one token at every row.

    Args:
        logits: f32 ``[B, T, V]``.
        positions: i32 ``[B, T]``, the absolute position that the drawn token takes.
        sampling: parameters of the B rows (already gathered by slot).

    Returns:
        i32 ``[B, T]``. Rows with temperature 0 take the argmax (the lowest id among equals).
    """
    batch, rows, vocab_size = logits.shape
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def per_row(values: jax.Array) -> jax.Array:
        return jnp.repeat(values, rows, axis=0)

    def draw() -> jax.Array:
        temperatures = per_row(sampling.temperatures)[:, None]
        scaled = logits.reshape(-1, vocab_size) / jnp.where(temperatures > 0, temperatures, 1.0)
        filtering = jnp.any((sampling.top_ks < vocab_size) | (sampling.top_ps < 1.0))
        kept = jax.lax.cond(
            filtering,
            lambda x: filter_logits(x, per_row(sampling.top_ks), per_row(sampling.top_ps)),
            lambda x: x,
            scaled,
        )
        noise = position_noise(per_row(sampling.seeds), positions.reshape(-1), vocab_size)
        drawn = jnp.argmax(kept + noise, axis=-1).astype(jnp.int32).reshape(batch, rows)
        return jnp.where(sampling.temperatures[:, None] > 0, drawn, greedy)

    # noise and filters cost several passes over the logits: a greedy batch skips them
    return jax.lax.cond(jnp.any(sampling.temperatures > 0), draw, lambda: greedy)

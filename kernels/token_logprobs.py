"""Log-probabilities of chosen tokens and of the most likely ones, without sorting the vocabulary.

Axes: N rows, V vocabulary, M maximum number of best tokens.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import load, power_of_two, resolve, triton_call
from specjax.kernels.filter_logits import kept_logits

BLOCK, NUM_WARPS = 8192, 16


def _reference(*inputs: Array, limit: int) -> tuple[Array, Array, Array]:
    logits, tokens, temperatures, thresholds, num_best = inputs
    rows = logits.shape[0]
    nothing = (
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((rows, limit), jnp.int32),
        jnp.zeros((rows, limit), jnp.float32),
    )

    def best(filtered: Array, total: Array) -> tuple[Array, Array]:
        values, ids = jax.lax.top_k(filtered, limit)
        is_asked = jnp.arange(limit, dtype=jnp.int32) < num_best[:, None]
        return (
            jnp.where(is_asked, ids.astype(jnp.int32), 0),
            jnp.where(is_asked, values - total[:, None], 0.0),
        )

    def all_of() -> tuple[Array, Array, Array]:
        filtered = kept_logits(logits, temperatures[:, None], thresholds[:, None])
        total = jax.nn.logsumexp(filtered, axis=-1)
        chosen = jnp.take_along_axis(filtered, tokens[:, None], axis=1)[:, 0] - total
        ids, values = jax.lax.cond(
            jnp.any(num_best > 0), lambda: best(filtered, total), lambda: nothing[1:]
        )
        return jnp.where(num_best >= 0, chosen, 0.0), ids, values

    return jax.lax.cond(jnp.any(num_best >= 0), all_of, lambda: nothing)


def specjax_token_logprobs(
    logits_ref: Any,
    tokens_ref: Any,
    temperatures_ref: Any,
    thresholds_ref: Any,
    num_best_ref: Any,
    chosen_ref: Any,
    ids_ref: Any,
    values_ref: Any,
    *,
    block: int,
    limit: int,
) -> None:
    """Kernel body: one program per row, which reads the row again for each of the best tokens."""
    row, vocab_size = pl.program_id(0), logits_ref.shape[1]
    num_best = num_best_ref[row]
    num_blocks = (num_best >= 0).astype(jnp.int32) * pl.cdiv(vocab_size, block)
    lanes = jnp.arange(block, dtype=jnp.int32)
    temperature, threshold = temperatures_ref[row], thresholds_ref[row]

    def kept(i: Array) -> tuple[Array, Array]:
        index = i * block + lanes
        logits = load(logits_ref.at[row, jnp.minimum(index, vocab_size - 1)])
        values = kept_logits(logits, temperature, threshold)
        return jnp.where(index < vocab_size, values, -jnp.inf), index

    def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        highest, total = carry
        values, _ = kept(i)
        higher = jnp.maximum(highest, values)
        # higher is -inf in lanes that have seen only -inf
        shift = jnp.where(higher == -jnp.inf, 0.0, higher)
        return higher, total * jnp.exp(highest - shift) + jnp.exp(values - shift)

    lowest = jnp.full(block, -jnp.inf, jnp.float32)
    highest, total = jax.lax.fori_loop(0, num_blocks, add, (lowest, jnp.zeros_like(lowest)))
    best = jnp.max(highest)
    shift = jnp.where(best == -jnp.inf, 0.0, best)
    log_total = jnp.log(jnp.sum(total * jnp.exp(highest - shift))) + shift
    chosen = kept_logits(logits_ref[row, tokens_ref[row]], temperature, threshold) - log_total
    chosen_ref[row] = jnp.where(num_best >= 0, chosen, 0.0)

    def find(j: Array, previous: tuple[Array, Array]) -> tuple[Array, Array]:
        """Store the next best token after the previous one; equal tokens are in order of id."""
        last, last_id = previous

        def look(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            best_values, found_id = carry
            values, index = kept(i)
            is_next = (values < last) | ((values == last) & (index > last_id))
            is_next &= (index < vocab_size) & ((values > best_values) | (found_id == vocab_size))
            return jnp.where(is_next, values, best_values), jnp.where(is_next, index, found_id)

        nobody = jnp.full(block, vocab_size, jnp.int32)
        best_values, found_id = jax.lax.fori_loop(0, num_blocks, look, (lowest, nobody))
        value = jnp.max(jnp.where(found_id < vocab_size, best_values, -jnp.inf))
        token = jnp.min(jnp.where(best_values == value, found_id, vocab_size))
        ids_ref[row, j] = jnp.minimum(token, vocab_size - 1)
        values_ref[row, j] = value - log_total
        return value, token

    def clear(j: Array, nothing: Array) -> Array:
        ids_ref[row, j], values_ref[row, j] = jnp.int32(0), jnp.float32(0)
        return nothing

    count = jnp.maximum(num_best, 0)
    jax.lax.fori_loop(0, count, find, (jnp.float32(jnp.inf), jnp.int32(-1)))
    jax.lax.fori_loop(count, limit, clear, jnp.int32(0))


def token_logprobs(
    logits: Array,
    tokens: Array,
    temperatures: Array,
    thresholds: Array,
    num_best: Array,
    *,
    limit: int,
    implementation: str | None = None,
) -> tuple[Array, Array, Array]:
    """Log-probabilities f32 ``[N]`` of tokens; ids and log-probabilities of the best ``[N, M]``.

    If ``num_best`` of a row is -1, all its outputs are 0. Otherwise, entries after ``num_best`` are
    0. The best tokens are in descending order; among equals, the lower id comes first.

    Args:
        logits: f32 ``[N, V]``, not yet divided by the temperature.
        tokens: i32 ``[N]``.
        temperatures: f32 ``[N]``; 0 counts as 1.
        thresholds: f32 ``[N]``, the lowest logit that is not filtered out.
        num_best: i32 ``[N]``, best tokens to report in addition to the chosen one, or -1.
        limit: M; with 0 the reference runs.
    """
    implementation = resolve(implementation)
    arguments = (logits, tokens, temperatures, thresholds, num_best)
    if implementation == "xla" or limit == 0:
        return _reference(*arguments, limit=limit)
    rows, vocab_size = logits.shape
    block = min(BLOCK, power_of_two(vocab_size))
    chosen, ids, values = triton_call(
        partial(specjax_token_logprobs, block=block, limit=limit),
        grid=(rows,),
        out_shape=(
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            jax.ShapeDtypeStruct((rows, limit), jnp.int32),
            jax.ShapeDtypeStruct((rows, limit), jnp.float32),
        ),
        num_warps=max(1, min(NUM_WARPS, block // 512)),
        implementation=implementation,
    )(*arguments)
    return chosen, ids, values

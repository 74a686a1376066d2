"""Top-k, top-p and min-p as one threshold per row, found without sorting the vocabulary.

Every filter keeps all logits at or above some value, so it is enough to find that value. The bits
of a float, with the sign folded in, are an integer key, and keys sort as the floats do. Counts and
sums over the vocabulary narrow an interval of keys. Ties need no extra handling, because equal
logits have equal keys. Axes: N rows, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import load, power_of_two, resolve, triton_call

# sort keys of -inf and inf
LOWEST_KEY, HIGHEST_KEY = 0x007FFFFF, 0xFF800000
SMALLEST_NORMAL = 0x00800000
TOP_BIT = 1 << 31
FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_TINY = 1.1754943508222875e-38
# logits per load: each thread loads 32 at once, so that it waits for few loads
BLOCK, NUM_WARPS = 8192, 8
# A search first probes OFFSETS temperatures below the best logit, where most thresholds are. The
# next passes probe GROWTH times lower. It then bisects by value, and at last by key, because close
# to zero, bisection by value would take a pass for every two exponents.
OFFSETS, GROWTH, PASSES_DOWN, PASSES_BY_VALUE = (8.0, 4.0, 2.0), 8.0, 3, 8


def kept_logits(logits: Array, temperatures: Array, thresholds: Array) -> Array:
    """Divide logits by temperatures above 0, and set logits below the thresholds to -inf.

    Kept logits are clipped to finite values, because the difference of two infinite ones is NaN. A
    NaN becomes -inf, so its token is forbidden.
    """
    scaled = logits / jnp.where(temperatures > 0, temperatures, 1.0)
    scaled = jnp.maximum(jnp.minimum(scaled, FLOAT32_MAX), -FLOAT32_MAX)
    return jnp.where((logits >= thresholds) & (logits > -jnp.inf), scaled, -jnp.inf)


def _weights(logits: Array, best: Array, temperatures: Array) -> Array:
    """Probability of each token relative to the best one, which has 1 even if it is infinite."""
    rate = jnp.maximum(jnp.minimum(1.0 / temperatures, FLOAT32_MAX), FLOAT32_TINY)
    best = jnp.maximum(jnp.minimum(best, FLOAT32_MAX), -FLOAT32_MAX)
    return jnp.exp((jnp.minimum(logits, FLOAT32_MAX) - best) * rate)


def _share(best: Array, temperatures: Array, min_ps: Array) -> Array:
    """Logit of a token that is ``min_ps`` times as likely as the best; -inf if ``min_ps`` is 0."""
    return jnp.where(min_ps > 0, best + temperatures * jnp.log(min_ps), -jnp.inf)


def _value(keys: Array) -> Array:
    """Convert u32 sort keys back to floats; keys beyond those of -inf and inf become NaN.

    Subnormal floats become zero: a CPU compares them as zero, but would return them unchanged.
    """
    top = jnp.uint32(TOP_BIT)
    bits = jnp.where(keys >= top, keys ^ top, ~keys)
    bits = jnp.where((bits & (top - 1)) < SMALLEST_NORMAL, jnp.uint32(0), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _key(values: Array) -> Array:
    """Convert floats to u32 sort keys."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >= jnp.uint32(TOP_BIT), ~bits, bits | jnp.uint32(TOP_BIT))


def _largest(reaches: Callable[[Array], Array], rows: int) -> Array:
    """The largest float f32 ``[rows]`` for which ``reaches`` is true, or -inf if there is none.

    ``reaches`` maps f32 ``[rows]`` to bool ``[rows]``. It must be monotone (if true for a value,
    true for every smaller one) and false for NaN.
    """

    def decide(i: Array, keys: Array) -> Array:
        higher = keys + (jnp.uint32(TOP_BIT) >> i.astype(jnp.uint32))
        return jnp.where(reaches(_value(higher)), higher, keys)

    lowest = jnp.full(rows, LOWEST_KEY, jnp.uint32)
    return _value(jax.lax.fori_loop(0, 32, decide, lowest))


def _reference(
    logits: Array, temperatures: Array, top_ks: Array, top_ps: Array, min_ps: Array
) -> Array:
    rows, vocab_size = logits.shape
    everything = jnp.full(rows, -jnp.inf, jnp.float32)

    def search() -> Array:
        best = jnp.max(jnp.where(logits == logits, logits, -jnp.inf), axis=-1)

        def top_k_reached(values: Array) -> Array:
            return jnp.sum(logits >= values[:, None], axis=-1, dtype=jnp.int32) >= top_ks

        kth = jax.lax.cond(
            jnp.any(top_ks < vocab_size), lambda: _largest(top_k_reached, rows), lambda: everything
        )

        def last() -> Array:
            weights = _weights(logits, best[:, None], temperatures[:, None])
            weights = jnp.where(logits >= kth[:, None], weights, 0.0)
            # without the minimum, an empty set would reach a product that underflows to 0
            goals = jnp.maximum(top_ps * jnp.sum(weights, axis=-1), FLOAT32_TINY)

            def reached(values: Array) -> Array:
                inside = jnp.where(logits >= values[:, None], weights, 0.0)
                return (jnp.sum(inside, axis=-1) >= goals) & (top_ps < 1.0)

            return _largest(reached, rows)

        nucleus = jax.lax.cond(jnp.any(top_ps < 1.0), last, lambda: everything)
        share = _share(best, temperatures, min_ps)
        return jnp.maximum(jnp.maximum(kth, nucleus), share)

    filters = _is_filtering(temperatures, top_ks, top_ps, min_ps, vocab_size)
    return jnp.where(filters, jax.lax.cond(jnp.any(filters), search, lambda: everything), -jnp.inf)


def _is_filtering(temperatures: Any, top_ks: Any, top_ps: Any, min_ps: Any, vocab_size: int) -> Any:
    return (temperatures > 0) & ((top_ks < vocab_size) | (top_ps < 1.0) | (min_ps > 0.0))


def specjax_logit_thresholds(
    logits_ref: Any,
    temperatures_ref: Any,
    top_ks_ref: Any,
    top_ps_ref: Any,
    min_ps_ref: Any,
    out_ref: Any,
    *,
    block: int,
) -> None:
    """Kernel body: one program per row, which reads the whole row in each pass of its searches.

    A pass compares the logits with three values, so the interval shrinks to about a quarter. A
    search ends as soon as the interval holds one logit.
    """
    row, vocab_size = pl.program_id(0), logits_ref.shape[1]
    temperature, top_k = temperatures_ref[row], top_ks_ref[row]
    top_p, min_p = top_ps_ref[row], min_ps_ref[row]
    lanes, num_blocks = jnp.arange(block, dtype=jnp.int32), pl.cdiv(vocab_size, block)
    filters = _is_filtering(temperature, top_k, top_p, min_p, vocab_size)
    # rows that filter get 0, which is overwritten below; the literal -inf alone does not lower
    out_ref[row] = jnp.where(filters, jnp.minimum(temperature, 0.0), -jnp.inf)

    @pl.when(filters)
    def _() -> None:
        def over_row(add: Callable[[Array, Any], Any], start: Any, num_blocks: Array | int) -> Any:
            def step(i: Array, state: Any) -> Any:
                index = i * block + lanes
                inside = index < vocab_size
                return add(load(logits_ref.at[row, index], mask=inside, other=-jnp.inf), state)

            return jax.lax.fori_loop(0, num_blocks, step, start)

        def look(logits: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            highest, count = state
            is_allowed = logits > -jnp.inf
            highest = jnp.maximum(highest, jnp.where(is_allowed, logits, -jnp.inf))
            return highest, count + is_allowed.astype(jnp.float32)

        zeros = jnp.zeros(block, jnp.float32)
        highest, count = over_row(look, (jnp.full_like(zeros, -jnp.inf), zeros), num_blocks)
        best, num_allowed = jnp.max(highest), jnp.sum(count)
        end = jnp.minimum(_key(best), jnp.uint32(HIGHEST_KEY)) + jnp.uint32(1)

        def measure(
            values: list[Array], *, weighted: bool, num_blocks: Array | int = num_blocks
        ) -> tuple[list[Array], list[Array]]:
            """Count f32 (exact below 2**24) and weight f32 of the tokens at or above each value."""

            def add(logits: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
                reached = [logits >= value for value in values]
                terms = [is_reached.astype(jnp.float32) for is_reached in reached]
                if weighted:
                    weights = _weights(logits, best, temperature)
                    terms += [jnp.where(is_reached, weights, 0.0) for is_reached in reached]
                return tuple(a + b for a, b in zip(sums, terms, strict=True))

            start = (zeros,) * (len(values) * (2 if weighted else 1))
            totals = [jnp.sum(sums) for sums in over_row(add, start, num_blocks)]
            return totals[: len(values)], totals[len(values) :]

        def search(
            lowest: Array, num_lowest: Array, goal: Array, weighted: bool
        ) -> tuple[Array, Array]:
            """The highest key whose tokens, at or above it, reach the goal; and their number.

            The search starts at key ``lowest``, which has ``num_lowest`` tokens at or above it.
            """

            def is_open(state: tuple[Array, ...]) -> Array:
                _, low, high, num_low, num_high = state
                return (high - low > jnp.uint32(1)) & (num_low - num_high > 1.5)

            def narrow(state: tuple[Array, ...]) -> tuple[Array, ...]:
                number, low, high, num_low, num_high = state
                below, span = _value(low), _value(high) - _value(low)
                is_down = (low == LOWEST_KEY) & (number < PASSES_DOWN)
                by_value = is_down | ((number < PASSES_BY_VALUE) & (span < jnp.inf))
                reach = jnp.where(number == 0, temperature, GROWTH * temperature)
                reach = jnp.where(number > 1, GROWTH * reach, reach)
                step = (high - low + jnp.uint32(3)) >> 2
                keys = []
                for j, offset in enumerate(OFFSETS, 1):
                    value = jnp.where(is_down, best - offset * reach, below + 0.25 * j * span)
                    key = jnp.where(by_value, _key(value), low + jnp.uint32(j) * step)
                    # strictly inside the interval, so that every comparison moves one end
                    keys.append(jnp.clip(key, low + jnp.uint32(1), high - jnp.uint32(1)))
                counts, weights = measure([_value(key) for key in keys], weighted=weighted)
                probes = list(zip(keys, counts, weights if weighted else counts, strict=True))
                for key, num, reached in probes:
                    low = jnp.where(reached >= goal, key, low)
                    num_low = jnp.where(reached >= goal, num, num_low)
                for key, num, reached in reversed(probes):
                    high = jnp.where(reached >= goal, high, key)
                    num_high = jnp.where(reached >= goal, num_high, num)
                return number + 1, low, high, num_low, num_high

            ends = lowest, jnp.maximum(end, lowest)
            start: tuple[Array, ...] = (jnp.int32(0), *ends, num_lowest, jnp.float32(0))
            _, low, _, num_low, _ = jax.lax.while_loop(is_open, narrow, start)
            return low, num_low

        has_top_k, has_top_p = num_allowed > top_k.astype(jnp.float32), top_p < 1.0
        lowest, goal = jnp.uint32(LOWEST_KEY), top_k.astype(jnp.float32)
        kth, num_kept = search(lowest, jnp.where(has_top_k, num_allowed, 0.0), goal, False)
        num_kept = jnp.where(has_top_k, num_kept, num_allowed)
        read_blocks = num_blocks * has_top_p.astype(jnp.int32)
        _, (total,) = measure([_value(kth)], weighted=True, num_blocks=read_blocks)
        goal = jnp.maximum(top_p * total, FLOAT32_TINY)
        nucleus, _ = search(kth, jnp.where(has_top_p, num_kept, 0.0), goal, True)
        out_ref[row] = jnp.maximum(_value(nucleus), _share(best, temperature, min_p))


def logit_thresholds(
    logits: Array,
    temperatures: Array,
    top_ks: Array,
    top_ps: Array,
    min_ps: Array,
    *,
    implementation: str | None = None,
) -> Array:
    """The lowest logit f32 ``[N]`` that top-k, top-p and min-p keep, applied in this order.

    Compare it with logits before their division by the temperature, so that rounding does not
    decide what is kept. Every row keeps at least one token. Top-k keeps ties with the k-th logit.
    Top-p keeps the fewest best tokens whose probabilities reach ``top_ps``, and ties with the last
    of them. These are probabilities among the tokens that top-k kept, as in SGLang's verification,
    vLLM and Hugging Face transformers. Min-p keeps tokens that are at least ``min_ps`` times as
    likely as the best. Implementations may return different values between the same two logits.

    Args:
        logits: f32 ``[N, V]``, not yet divided by the temperature; may be -inf.
        temperatures: f32 ``[N]``; rows with 0 are not filtered.
        top_ks: i32 ``[N]``; V turns top-k off.
        top_ps: f32 ``[N]``; 1 turns top-p off.
        min_ps: f32 ``[N]``; 0 turns min-p off.
    """
    implementation = resolve(implementation)
    top_ks = jnp.maximum(top_ks, 1)
    if implementation == "xla":
        return _reference(logits, temperatures, top_ks, top_ps, min_ps)
    rows, vocab_size = logits.shape
    block = min(BLOCK, power_of_two(vocab_size))
    return triton_call(
        partial(specjax_logit_thresholds, block=block),
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.float32),
        num_warps=max(1, min(NUM_WARPS, block // 1024)),
        implementation=implementation,
    )(logits, temperatures, top_ks, top_ps, min_ps)

"""Top-k, top-p and min-p as one threshold a row, found without sorting the vocabulary.

Every filter keeps the tokens from some logit on upwards, so it is enough to find that logit. Floats
are ordered as their bits are, once the sign is folded in: counts and sums over the vocabulary
narrow an interval of these places down. Ties need no care, since equal logits share their bits.
Axes: N rows, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from specjax.kernels.backend import check_implementation, load, power_of_two, triton_call

# where -inf and inf lie among all 32-bit floats in ascending order
LOWEST_KEY, HIGHEST_KEY = 0x007FFFFF, 0xFF800000
SMALLEST_NORMAL = 0x00800000
TOP_BIT = 1 << 31
FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_TINY = 1.1754943508222875e-38
# logits of one load: 16 a thread, so that few loads are waited for
BLOCK, NUM_WARPS = 8192, 16


def scale_logits(logits: jax.Array, temperatures: jax.Array) -> jax.Array:
    """Logits over temperatures; as they are where that is 0.

    An infinite difference of two logits would be NaN in the filters; -inf stays, for tokens that
    are forbidden, and NaN counts as that.
    """
    scaled = logits / jnp.where(temperatures > 0, temperatures, 1.0)
    scaled = jnp.maximum(jnp.minimum(scaled, FLOAT32_MAX), -FLOAT32_MAX)
    return jnp.where((logits == -jnp.inf) | (logits != logits), -jnp.inf, scaled)


def _value(keys: jax.Array) -> jax.Array:
    """The float of each place u32 in the ascending order of floats; NaN outside the infinities.

    Subnormal floats are zero: a CPU compares them so, but would hand them on.
    """
    top = jnp.uint32(TOP_BIT)
    bits = jnp.where(keys >= top, keys ^ top, ~keys)
    bits = jnp.where((bits & (top - 1)) < SMALLEST_NORMAL, jnp.uint32(0), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _key(values: jax.Array) -> jax.Array:
    """The place u32 of each float."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >= jnp.uint32(TOP_BIT), ~bits, bits | jnp.uint32(TOP_BIT))


def _largest(reaches: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest float f32 ``[rows]`` for which ``reaches`` is true, -inf where there is none.

    ``reaches`` maps f32 ``[rows]`` to bool ``[rows]``; it is false for NaN, and true below any
    value for which it is true.
    """

    def decide(i: jax.Array, keys: jax.Array) -> jax.Array:
        higher = keys + (jnp.uint32(TOP_BIT) >> i.astype(jnp.uint32))
        return jnp.where(reaches(_value(higher)), higher, keys)

    lowest = jnp.full(rows, LOWEST_KEY, jnp.uint32)
    return _value(jax.lax.fori_loop(0, 32, decide, lowest))


def _reference(
    logits: jax.Array,
    temperatures: jax.Array,
    top_ks: jax.Array,
    top_ps: jax.Array,
    min_ps: jax.Array,
) -> jax.Array:
    rows, vocab_size = logits.shape
    everything = jnp.full(rows, -jnp.inf, jnp.float32)

    def search() -> jax.Array:
        scaled = scale_logits(logits, temperatures[:, None])
        best = jnp.max(scaled, axis=-1)

        def top_k_reached(values: jax.Array) -> jax.Array:
            return jnp.sum(scaled >= values[:, None], axis=-1, dtype=jnp.int32) >= top_ks

        kth = jax.lax.cond(
            jnp.any(top_ks < vocab_size), lambda: _largest(top_k_reached, rows), lambda: everything
        )

        def last() -> jax.Array:
            weights = jnp.exp(scaled - best[:, None])
            weights = jnp.where(scaled >= kth[:, None], weights, 0.0)
            # a product that underflows would be reached by no tokens at all
            goals = jnp.maximum(top_ps * jnp.sum(weights, axis=-1), FLOAT32_TINY)

            def reached(values: jax.Array) -> jax.Array:
                inside = jnp.where(scaled >= values[:, None], weights, 0.0)
                return (jnp.sum(inside, axis=-1) >= goals) & (top_ps < 1.0)

            return _largest(reached, rows)

        nucleus = jax.lax.cond(jnp.any(top_ps < 1.0), last, lambda: everything)
        return jnp.maximum(jnp.maximum(kth, nucleus), best + jnp.log(min_ps))

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
    """Kernel body: one program a row, which reads the row again for each narrowing.

    An interval of places shrinks to a quarter with each pass. It is left as soon as it holds one
    logit: that is the threshold, so that its lower end keeps the same tokens.
    """
    row, vocab_size = pl.program_id(0), logits_ref.shape[1]
    temperature, top_k = temperatures_ref[row], top_ks_ref[row]
    top_p, min_p = top_ps_ref[row], min_ps_ref[row]
    filters = _is_filtering(temperature, top_k, top_p, min_p, vocab_size)
    num_blocks = filters.astype(jnp.int32) * pl.cdiv(vocab_size, block)
    lanes = jnp.arange(block, dtype=jnp.int32)

    def scaled(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = i * block + lanes
        inside = index < vocab_size
        logits = load(logits_ref.at[row, jnp.minimum(index, vocab_size - 1)])
        return scale_logits(logits, temperature), inside

    def max_of(i: jax.Array, best: jax.Array) -> jax.Array:
        values, inside = scaled(i)
        return jnp.maximum(best, jnp.where(inside, values, -jnp.inf))

    best = jnp.max(jax.lax.fori_loop(0, num_blocks, max_of, jnp.full(block, -jnp.inf, jnp.float32)))
    end = jnp.minimum(_key(best), jnp.uint32(HIGHEST_KEY)) + jnp.uint32(1)
    zeros = jnp.zeros(block, jnp.float32)

    def measure(
        *values: jax.Array, floor: jax.Array, weighted: bool
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Tokens from each value on, and their weights, as f32; exact below 2**24 tokens."""

        def add(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            logits, inside = scaled(i)
            inside &= logits >= floor
            reached = [(inside & (logits >= value)).astype(jnp.float32) for value in values]
            if weighted:
                weights = jnp.exp(logits - best)
                reached += [one * weights for one in reached]
            return tuple(a + b for a, b in zip(sums, reached, strict=True))

        count = len(values) * (2 if weighted else 1)
        sums = jax.lax.fori_loop(0, num_blocks, add, (zeros,) * count)
        totals = [jnp.sum(one) for one in sums]
        return totals[: len(values)], totals[len(values) :]

    def search(
        lowest: jax.Array, num_lowest: jax.Array, goal: jax.Array, floor: jax.Array, weighted: bool
    ) -> tuple[jax.Array, jax.Array]:
        """The place where the goal is reached, and tokens from there on; none is past ``end``."""

        def is_open(state: tuple[jax.Array, ...]) -> jax.Array:
            low, high, num_low, num_high = state
            return (high - low > jnp.uint32(1)) & (num_low - num_high > 1.5)

        def narrow(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            low, high, num_low, num_high = state
            step = (high - low + jnp.uint32(3)) >> 2
            keys = [jnp.minimum(low + jnp.uint32(j) * step, high) for j in (1, 2, 3)]
            values = [_value(key) for key in keys]
            counts, weights = measure(*values, floor=floor, weighted=weighted)
            probes = list(zip(keys, counts, weights if weighted else counts, strict=True))
            for key, num, reached in probes:
                is_reached = (reached >= goal) & (key < high)
                low = jnp.where(is_reached, key, low)
                num_low = jnp.where(is_reached, num, num_low)
            for key, num, reached in reversed(probes):
                # whatever is compared, an end moves
                is_past = ~(reached >= goal) & (key < high)
                high = jnp.where(is_past, key, high)
                num_high = jnp.where(is_past, num, num_high)
            return low, high, num_low, num_high

        high = jnp.where(filters, jnp.maximum(end, lowest), lowest)
        start: tuple[jax.Array, ...] = (lowest, high, num_lowest, jnp.zeros((), jnp.float32))
        low, _, num_low, _ = jax.lax.while_loop(is_open, narrow, start)
        return low, num_low

    lowest, everything = jnp.uint32(LOWEST_KEY), jnp.float32(vocab_size)
    no_floor = jnp.float32(-jnp.inf)
    has_top_k = top_k < vocab_size
    wanted = jnp.where(has_top_k, top_k, vocab_size).astype(jnp.float32)
    start = jnp.where(has_top_k, everything, jnp.float32(0))
    kth, num_kept = search(lowest, start, wanted, no_floor, False)
    num_kept = jnp.where(has_top_k, num_kept, everything)
    floor = _value(kth)
    has_top_p = top_p < 1.0
    _, (total,) = measure(no_floor, floor=floor, weighted=True)
    goal = jnp.maximum(top_p * total, FLOAT32_TINY)
    nucleus, _ = search(kth, jnp.where(has_top_p, num_kept, jnp.float32(0)), goal, floor, True)
    threshold = jnp.maximum(_value(nucleus), best + jnp.log(min_p))
    out_ref[row] = jnp.where(filters, threshold, -jnp.inf)


def logit_thresholds(
    logits: jax.Array,
    temperatures: jax.Array,
    top_ks: jax.Array,
    top_ps: jax.Array,
    min_ps: jax.Array,
    *,
    implementation: str = "xla",
    interpret: bool | None = None,
) -> jax.Array:
    """The scaled logit f32 ``[N]`` from which on top-k, top-p and min-p keep tokens.

    They apply in this order. One token of a row stays at least. Top-k keeps ties with the k-th
    logit. Top-p keeps the smallest set of tokens whose probability, on what top-k left (as in
    SGLang's verification, vLLM and Hugging Face transformers), reaches ``top_ps``, and ties with
    its last. Min-p keeps tokens at least ``min_ps`` times as likely as the best. The two
    implementations may give different values between the same two logits.

    Args:
        logits: f32 ``[N, V]``, before the temperature; may be -inf.
        temperatures: f32 ``[N]``; rows with 0 are not filtered.
        top_ks: i32 ``[N]``; V turns it off.
        top_ps: f32 ``[N]``; 1 turns it off.
        min_ps: f32 ``[N]``; 0 turns it off.
    """
    check_implementation(implementation)
    top_ks = jnp.maximum(top_ks, 1)
    if implementation == "xla":
        return _reference(logits, temperatures, top_ks, top_ps, min_ps)
    rows, vocab_size = logits.shape
    block = min(BLOCK, power_of_two(vocab_size))
    return triton_call(
        partial(specjax_logit_thresholds, block=block),
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.float32),
        num_warps=max(1, min(NUM_WARPS, block // 512)),
        num_stages=1,
        interpret=interpret,
    )(logits, temperatures, top_ks, top_ps, min_ps)

"""Choose the best token of each row, or sample one with noise generated inside the kernel.

A token's Gumbel noise is that of ``jax.random`` for the request's seed, the position and the token.
The batch and the launch shape do not change it. Axes: N rows, V vocabulary.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import load, power_of_two, resolve, triton_call
from specjax.kernels.filter_logits import FLOAT32_TINY, kept_logits

BLOCK = 4096  # tokens per program
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


def position_noise(seeds: Array, positions: Array, vocab_size: int) -> Array:
    """Gumbel noise f32 ``[N, V]`` for request seeds u32 ``[N, 2]`` and positions i32 ``[N]``."""

    def draw(seed: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)

    return jax.vmap(draw)(seeds, positions)


def _threefry(key: tuple[Array, Array], high: Array, low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 of 20 rounds (Salmon et al. 2011), as in :mod:`jax.random`; all u32."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = high + keys[0], low + keys[1]
    for i in range(5):
        for rotation in ROTATIONS[4 * (i % 2) :][:4]:
            x = x + y
            y = (y << rotation) | (y >> (32 - rotation))
            y = x ^ y
        x = x + keys[(i + 1) % 3]
        y = y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y


def _random(seed: tuple[Array, Array], position: Array, tokens: Array) -> Array:
    zero = jnp.uint32(0)
    key = _threefry(seed, zero, position.astype(jnp.uint32))
    high, low = _threefry(key, zero, tokens.astype(jnp.uint32))
    mantissa = ((high ^ low) >> 9) | jnp.uint32(0x3F800000)
    return jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0


def _gumbel(seed: tuple[Array, Array], position: Array, tokens: Array) -> Array:
    """Noise f32 of tokens i32, equal to :func:`position_noise` up to rounding in the logarithms."""
    uniform = _random(seed, position, tokens)
    return -jnp.log(-jnp.log(jnp.maximum(uniform + FLOAT32_TINY, FLOAT32_TINY)))


def token_noise(seeds: Array, positions: Array, ids: Array) -> Array:
    """The columns f32 ``[N, M]`` of :func:`position_noise` for tokens i32 ``[M]``."""
    return _gumbel((seeds[:, :1], seeds[:, 1:]), positions[:, None], ids[None])


def position_uniform(seeds: Array, positions: Array) -> Array:
    """Exact uniform noise f32 in [0, 1) for seeds u32 ``[N, 2]`` and positions i32 ``[N, M]``."""
    return _random((seeds[:, :1], seeds[:, 1:]), positions, jnp.zeros_like(positions))


def _argmax(logits: Array) -> Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _reference(
    logits: Array,
    temperatures: Array,
    thresholds: Array,
    seeds: Array,
    positions: Array,
    ids: Array | None,
) -> Array:
    best = _argmax(logits)

    def draw() -> Array:
        filtered = kept_logits(logits, temperatures[:, None], thresholds[:, None])
        if ids is None:
            noise = position_noise(seeds, positions, logits.shape[1])
        else:
            noise = token_noise(seeds, positions, ids)
        return jnp.where(temperatures > 0, _argmax(filtered + noise), best)

    # noise costs several passes over the logits, so a greedy batch skips it
    return jax.lax.cond(jnp.any(temperatures > 0), draw, lambda: best)


def specjax_draw_tokens(
    logits_ref: Any,
    temperatures_ref: Any,
    thresholds_ref: Any,
    seeds_ref: Any,
    positions_ref: Any,
    *refs: Any,
    block: int,
) -> None:
    """Kernel body: each program finds the best token of one row in one part of the vocabulary."""
    ids_ref, (value_ref, index_ref) = refs[:-2], refs[-2:]
    row, share, vocab_size = pl.program_id(0), pl.program_id(1), logits_ref.shape[1]
    tokens = share * block + jnp.arange(block, dtype=jnp.int32)
    inside = tokens < vocab_size
    logits = load(logits_ref.at[row, jnp.minimum(tokens, vocab_size - 1)])
    temperature = temperatures_ref[row]

    def noisy() -> Array:
        filtered = kept_logits(logits, temperature, thresholds_ref[row])
        seed = seeds_ref[row, 0], seeds_ref[row, 1]
        ids = [load(ref.at[jnp.minimum(tokens, vocab_size - 1)]) for ref in ids_ref]
        return filtered + _gumbel(seed, positions_ref[row], *(ids or [tokens]))

    values = jax.lax.cond(temperature > 0, noisy, lambda: logits)
    values = jnp.where(inside, values, -jnp.inf)
    best = jnp.max(values)
    value_ref[row, share] = best
    # NaN does not equal any value
    token = jnp.min(jnp.where(inside & (values == best), tokens, vocab_size))
    index_ref[row, share] = jnp.minimum(token, vocab_size - 1)


def draw_tokens(
    logits: Array,
    temperatures: Array,
    thresholds: Array,
    seeds: Array,
    positions: Array,
    ids: Array | None = None,
    *,
    implementation: str | None = None,
) -> Array:
    """Draw a column i32 ``[N]`` per row. Temperature 0 takes the best, or the first of equals.

    Args:
        logits: f32 ``[N, V]``, not yet divided by the temperature.
        temperatures: f32 ``[N]``.
        thresholds: f32 ``[N]``, the lowest logit that may be drawn.
        seeds: u32 ``[N, 2]``, one seed per request.
        positions: i32 ``[N]``, absolute positions of the drawn tokens.
        ids: i32 ``[V]``, the token id of each column, from which its noise is derived; ``None`` if
            columns are token ids.
    """
    implementation = resolve(implementation)
    arguments = (logits, temperatures, thresholds, seeds, positions)
    if implementation == "xla":
        return _reference(*arguments, ids)
    rows, vocab_size = logits.shape
    block = min(BLOCK, power_of_two(vocab_size))
    shape = (rows, pl.cdiv(vocab_size, block))
    values, index = triton_call(
        partial(specjax_draw_tokens, block=block),
        grid=shape,
        out_shape=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ),
        num_warps=max(1, min(8, block // 128)),
        implementation=implementation,
    )(*arguments, *(() if ids is None else (ids,)))
    return jnp.take_along_axis(index, _argmax(values)[:, None], axis=1)[:, 0]

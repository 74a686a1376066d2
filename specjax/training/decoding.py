"""The compiled half of data generation: prefill and decode of rows over a dense cache.

Axes: B rows, P rows of one prefill, T padded prompt length, L cache length, V vocabulary, N query
heads, KV key/value heads, G = N / KV, H head dim.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Weights
from specjax.models.layers import Attend, pick_row, rotated
from specjax.training.attention import masked_attention

Cache = tuple[tuple[jax.Array, jax.Array], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """State of the decoding rows, carried through the compiled loop."""

    cache: Cache  # per layer keys and values [B, L, KV, H]
    tokens: jax.Array  # i32[B, L]
    length: jax.Array  # i32[B], tokens so far; the last one is not in the cache
    limit: jax.Array  # i32[B], length at which the row stops
    temperature: jax.Array  # f32[B], 0 is greedy
    active: jax.Array  # bool[B]
    step: jax.Array  # i32 scalar, decode steps so far


def _cached_attend(positions: jax.Array, implementation: str) -> Attend:
    """One new token per row at ``positions`` i32[B]; writes the cache and attends over it."""

    @rotated
    def attend(
        cache: Cache, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[Cache, jax.Array]:
        rows = jnp.arange(q.shape[0])
        keys, values = cache[layer]
        keys = keys.at[rows, positions].set(k[:, 0], unique_indices=True)
        values = values.at[rows, positions].set(v[:, 0], unique_indices=True)
        cache = (*cache[:layer], (keys, values), *cache[layer + 1 :])
        batch, _, heads, dim = q.shape
        kv_heads = k.shape[2]
        # the G queries of a key head go where a kernel expects query rows: one tile reads the keys
        queries = q.reshape(batch, kv_heads, heads // kv_heads, dim).swapaxes(1, 2)
        if implementation == "cudnn":
            out = jax.nn.dot_product_attention(
                queries,
                keys,
                values,
                query_seq_lengths=jnp.full_like(positions, heads // kv_heads),
                key_value_seq_lengths=positions + 1,
                implementation="cudnn",
            )
        else:
            mask = jnp.arange(keys.shape[1]) <= positions[:, None]
            out = masked_attention(queries, keys, values, mask[:, None, None])
        return cache, out.swapaxes(1, 2).reshape(batch, 1, heads, dim)

    return attend


def _prompt_attend(slots: jax.Array, implementation: str) -> Attend:
    """Prompts from position 0, whose keys and values go to the cache rows ``slots`` i32[P]."""

    @rotated
    def attend(
        cache: Cache, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[Cache, jax.Array]:
        keys, values = cache[layer]
        length = q.shape[1]
        # slots out of range belong to padding rows and are dropped
        keys = keys.at[slots, :length].set(k, mode="drop")
        values = values.at[slots, :length].set(v, mode="drop")
        cache = (*cache[:layer], (keys, values), *cache[layer + 1 :])
        if implementation == "cudnn":
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
            return cache, out
        return cache, masked_attention(q, k, v, jnp.tril(jnp.ones((1, 1, length, length), bool)))

    return attend


def _sample(logits: jax.Array, temperature: jax.Array, key: jax.Array) -> jax.Array:
    """Tokens i32[B] from float32 logits ``[B, V]``: greedy where the temperature is 0."""
    noise = jax.random.gumbel(key, logits.shape, jnp.float32)
    return jnp.argmax(logits + temperature[:, None] * noise, axis=-1).astype(jnp.int32)


def _append(rows: Rows, token: jax.Array, stops: jax.Array) -> Rows:
    """Append one token to each active row and stop rows at their limit or a stop token."""
    batch, size = rows.tokens.shape
    at = jnp.where(rows.active, rows.length, size)
    tokens = rows.tokens.at[jnp.arange(batch), at].set(token, mode="drop")
    length = rows.length + rows.active.astype(jnp.int32)
    ended = (token[:, None] == stops).any(axis=-1) | (length >= rows.limit)
    return replace(rows, tokens=tokens, length=length, active=rows.active & ~ended)


def prefill(
    flat: FlatModel[CausalLM],
    implementation: str,
    weights: Weights,
    rows: Rows,
    stops: jax.Array,
    key: jax.Array,
    slots: jax.Array,
    prompts: jax.Array,
    lengths: jax.Array,
    limits: jax.Array,
    temperatures: jax.Array,
) -> Rows:
    """Put prompts i32[P, T] into the rows ``slots`` and sample their first token."""
    model = flat.rebuild(weights)
    count, width = prompts.shape
    positions = jnp.broadcast_to(jnp.arange(width), (count, width))
    hidden, _, cache = model(prompts, positions, rows.cache, _prompt_attend(slots, implementation))
    last = pick_row(hidden, lengths - 1)[:, 0]
    token = _sample(model.logits(last), temperatures, key)
    prompt_rows = Rows(
        cache=(),
        tokens=jnp.pad(prompts, ((0, 0), (0, rows.tokens.shape[1] - width))),
        length=lengths,
        limit=limits,
        temperature=temperatures,
        active=jnp.ones((count,), bool),
        step=rows.step,
    )
    new = _append(prompt_rows, token, stops)
    return Rows(
        cache=cache,
        tokens=rows.tokens.at[slots].set(new.tokens, mode="drop"),
        length=rows.length.at[slots].set(new.length, mode="drop"),
        limit=rows.limit.at[slots].set(new.limit, mode="drop"),
        temperature=rows.temperature.at[slots].set(new.temperature, mode="drop"),
        active=rows.active.at[slots].set(new.active, mode="drop"),
        step=rows.step,
    )


def decode(
    flat: FlatModel[CausalLM],
    implementation: str,
    num_steps: int,
    weights: Weights,
    rows: Rows,
    stops: jax.Array,
    key: jax.Array,
) -> Rows:
    """Decode ``num_steps`` tokens of every active row."""
    model = flat.rebuild(weights)

    def body(_: jax.Array, rows: Rows) -> Rows:
        # inactive rows rewrite their last position, which no later token of theirs reads
        at = jnp.maximum(rows.length - 1, 0)
        current = jnp.take_along_axis(rows.tokens, at[:, None], axis=1)
        hidden, _, cache = model(
            current, at[:, None], rows.cache, _cached_attend(at, implementation)
        )
        token = _sample(
            model.logits(hidden[:, 0]), rows.temperature, jax.random.fold_in(key, rows.step)
        )
        return _append(replace(rows, cache=cache, step=rows.step + 1), token, stops)

    return jax.lax.fori_loop(0, num_steps, body, rows)

"""Batched generation of training data: a dense cache, rows refilled as they finish.

A fixed number of rows decodes in one compiled loop of ``chunk_steps`` tokens; between loops the
host takes out finished rows and prefills new prompts into them, so the batch stays full.

Axes: B rows, P rows of one prefill, T padded prompt length, L cache length, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import ModelConfig
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Weights
from specjax.models.layers import Attend
from specjax.training.attention import default_implementation, masked_attention

logger = logging.getLogger(__name__)

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
    return Rows(
        cache=rows.cache,
        tokens=tokens,
        length=length,
        limit=rows.limit,
        temperature=rows.temperature,
        active=rows.active & ~ended,
        step=rows.step,
    )


def _prefill(
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
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
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


def _decode(
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
        moved = Rows(
            cache=cache,
            tokens=rows.tokens,
            length=rows.length,
            limit=rows.limit,
            temperature=rows.temperature,
            active=rows.active,
            step=rows.step + 1,
        )
        return _append(moved, token, stops)

    return jax.lax.fori_loop(0, num_steps, body, rows)


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """Sizes of the generator. Device memory of the cache is ``B * L`` tokens of keys and values."""

    num_rows: int = 256
    prefill_rows: int = 64
    max_prompt_len: int = 224
    max_new_tokens: int = 256
    chunk_steps: int = 32

    def __post_init__(self) -> None:
        for name in ("num_rows", "prefill_rows", "max_prompt_len", "max_new_tokens", "chunk_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def cache_len(self) -> int:
        """Cache length L, a multiple of 64."""
        return -(-(self.max_prompt_len + self.max_new_tokens) // 64) * 64


@dataclass(frozen=True)
class Sampler:
    """Generates continuations of many prompts with one target model.

    ``weights`` are the target's in the order of ``flat``, in the dtype to compute in.
    """

    flat: FlatModel[CausalLM]
    weights: Weights
    model: ModelConfig
    config: GeneratorConfig
    stop_ids: tuple[int, ...]
    implementation: str = ""
    _compiled: dict[str, Any] = field(default_factory=dict, repr=False)

    def _functions(self) -> tuple[Callable[..., Rows], Callable[..., Rows]]:
        if not self._compiled:
            name = self.implementation or default_implementation(self.model.jnp_dtype)
            steps = self.config.chunk_steps
            self._compiled["prefill"] = jax.jit(
                partial(_prefill, self.flat, name), donate_argnums=1
            )
            self._compiled["decode"] = jax.jit(
                partial(_decode, self.flat, name, steps), donate_argnums=1
            )
        return self._compiled["prefill"], self._compiled["decode"]

    def _empty_rows(self) -> Rows:
        config, model = self.config, self.model
        batch, size = config.num_rows, config.cache_len
        shape = (batch, size, model.num_kv_heads, model.head_dim)
        return Rows(
            cache=tuple(
                (jnp.zeros(shape, model.jnp_dtype), jnp.zeros(shape, model.jnp_dtype))
                for _ in range(model.num_layers)
            ),
            tokens=jnp.zeros((batch, size), jnp.int32),
            length=jnp.ones((batch,), jnp.int32),
            limit=jnp.ones((batch,), jnp.int32),
            temperature=jnp.zeros((batch,), jnp.float32),
            active=jnp.zeros((batch,), bool),
            step=jnp.zeros((), jnp.int32),
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_new_tokens: int,
        seed: int,
        on_finished: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Continue every prompt to a stop token (kept) or ``max_new_tokens``.

        Args:
            prompts: token ids; each 1 to ``config.max_prompt_len`` long.
            temperatures: one per prompt; 0 is greedy.
            max_new_tokens: at most ``config.max_new_tokens``.
            seed: of the sampling noise.
            on_finished: called with the numbers of prompts and tokens that just finished.

        Returns:
            The continuations, in the order of the prompts.

        Raises:
            ValueError: if a prompt or ``max_new_tokens`` does not fit the configured sizes.
        """
        config = self.config
        if not 1 <= max_new_tokens <= config.max_new_tokens:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} must be between 1 and "
                f"GeneratorConfig.max_new_tokens={config.max_new_tokens}"
            )
        for i, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= config.max_prompt_len:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens; it must have 1 to "
                    f"GeneratorConfig.max_prompt_len={config.max_prompt_len}"
                )
        prefill, decode = self._functions()
        rows = self._empty_rows()
        stops = jnp.asarray(self.stop_ids or (-1,), jnp.int32)
        # the counter-based generator of the hardware: noise is needed for [B, V] at every step
        key = jax.random.key(seed, impl="rbg")
        results: list[list[int]] = [[] for _ in prompts]
        owner = np.full(config.num_rows, -1)
        # popped from the end: short prompts first, so that few prefills are padded far
        waiting = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        round_index = 0
        while waiting or (owner >= 0).any():
            free = np.flatnonzero(owner < 0)
            for start in range(0, len(free), config.prefill_rows):
                if not waiting:
                    break
                slots = free[start : start + config.prefill_rows]
                if len(slots) < min(config.prefill_rows, len(waiting)) and (owner >= 0).any():
                    break  # wait for a full prefill
                ids = [waiting.pop() for _ in range(min(len(slots), len(waiting)))]
                owner[slots[: len(ids)]] = ids
                round_index += 1
                rows = prefill(
                    self.weights,
                    rows,
                    stops,
                    jax.random.fold_in(key, 2**30 + round_index),
                    *self._prefill_arguments(slots, ids, prompts, temperatures, max_new_tokens),
                )
            rows = decode(self.weights, rows, stops, key)
            active, length = np.asarray(rows.active), np.asarray(rows.length)
            finished = np.flatnonzero((owner >= 0) & ~active)
            if len(finished):
                tokens = np.asarray(rows.tokens)
                produced = 0
                for row in finished:
                    i = int(owner[row])
                    results[i] = tokens[row, len(prompts[i]) : length[row]].tolist()
                    produced += len(results[i])
                owner[finished] = -1
                if on_finished is not None:
                    on_finished(len(finished), produced)
        return results

    def _prefill_arguments(
        self,
        slots: np.ndarray,
        ids: list[int],
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_new_tokens: int,
    ) -> tuple[np.ndarray, ...]:
        config = self.config
        count = config.prefill_rows
        longest = max(len(prompts[i]) for i in ids)
        half = -(-config.max_prompt_len // 2)
        width = half if longest <= half else config.max_prompt_len
        padded = np.zeros((count, width), np.int32)
        lengths = np.ones((count,), np.int32)
        temperature = np.zeros((count,), np.float32)
        target = np.full((count,), config.num_rows, np.int32)
        for row, i in enumerate(ids):
            padded[row, : len(prompts[i])] = prompts[i]
            lengths[row] = len(prompts[i])
            temperature[row] = temperatures[i]
            target[row] = slots[row]
        return target, padded, lengths, lengths + max_new_tokens, temperature

"""Batched generation of training data: a dense cache, rows refilled as they finish.

A fixed number of rows decodes in one compiled loop of ``CHUNK_STEPS`` tokens; between loops the
host takes out finished rows and prefills new prompts into them, so the batch stays full.
docs/training.md compares it with the engine, whose host reads every round.

Axes: B rows, P rows of one prefill, T padded prompt length, L cache length, V vocabulary, N query
heads, KV key/value heads, H head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_integer
from specjax.config import ModelConfig
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Weights
from specjax.models.layers import Attend, pick_row, rotated
from specjax.training.ttt import masked_attention

CHUNK_STEPS = 32
# per layer keys and values [B, L, KV, H]
Cache = tuple[tuple[jax.Array, jax.Array], ...]
Requests = list[tuple[Sequence[int], float]]  # prompts and temperatures


class Rows(NamedTuple):
    """Texts of the decoding rows."""

    tokens: jax.Array  # i32[B, L]
    length: jax.Array  # i32[B], tokens so far; the last one is not in the cache
    limit: jax.Array  # i32[B], length at which the row stops
    temperature: jax.Array  # f32[B], 0 is greedy
    active: jax.Array  # bool[B]


State = tuple[Cache, Rows]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampler:
    """Generates continuations of many prompts with one target model.

    ``weights`` are the target's in the order of ``flat``, in the dtype to compute in. Device memory
    of the cache is ``num_rows`` times prompt and completion in keys and values.

    ValueError for prompts and completions beyond the model's context.
    """

    flat: FlatModel[CausalLM]
    weights: Weights
    model: ModelConfig
    stop_ids: tuple[int, ...]
    num_rows: int
    prefill_rows: int
    max_prompt_len: int
    max_new_tokens: int

    def __post_init__(self) -> None:
        window = "sliding_window, which data generation does not implement,"
        context = self.model.max_position_embeddings
        for what, limit in (("the model's context", context), (window, self.model.sliding_window)):
            if limit is not None and self.max_prompt_len + self.max_new_tokens > limit:
                raise ValueError(
                    f"--max-prompt-len={self.max_prompt_len} plus {self.max_new_tokens} tokens "
                    "(the larger of --max-answer-tokens and --max-user-tokens) exceeds "
                    f"{what} of {limit} tokens"
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

        A temperature of 0 is greedy; ``on_finished`` is called with the numbers of prompts and
        tokens that just finished.

        ValueError if a prompt or ``max_new_tokens`` does not fit the sampler's sizes.
        """
        check_integer("max_new_tokens", max_new_tokens, 1, self.max_new_tokens)
        for i, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self.max_prompt_len:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens; it must have 1 to "
                    f"--max-prompt-len={self.max_prompt_len}"
                )
        prefill, decode = self._compiled
        requests = list(zip(prompts, temperatures, strict=True))
        state = self._empty()
        # the counter-based generator of the hardware: noise is needed for [B, V] at every step
        key = jax.random.key(seed, impl="rbg")
        results: list[list[int]] = [[] for _ in prompts]
        owner = np.full(self.num_rows, -1)
        # popped from the end: short prompts first, so that few prefills are padded far
        waiting = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        num_prefills = num_steps = 0
        while waiting or (owner >= 0).any():
            free = np.flatnonzero(owner < 0)
            while waiting and len(free):
                count = min(self.prefill_rows, len(waiting))
                if len(free) < count and (owner >= 0).any():
                    break  # wait for a full prefill
                slots, free = free[:count], free[count:]
                ids = [waiting.pop() for _ in slots]
                owner[slots] = ids
                num_prefills += 1
                noise = jax.random.fold_in(key, 2**30 + num_prefills)
                padded, new = self._padded(slots, [requests[i] for i in ids], max_new_tokens)
                state = prefill(self.weights, state, noise, padded, new)
            state = decode(self.weights, state, key, np.int32(num_steps))
            num_steps += CHUNK_STEPS
            _, rows = state
            finished = np.flatnonzero((owner >= 0) & ~np.asarray(rows.active))
            if len(finished):
                tokens, length = np.asarray(rows.tokens), np.asarray(rows.length)
                for row in finished:
                    i = int(owner[row])
                    results[i] = tokens[row, len(prompts[i]) : length[row]].tolist()
                if on_finished is not None:
                    on_finished(len(finished), sum(len(results[i]) for i in owner[finished]))
                owner[finished] = -1
        return results

    @cached_property
    def _compiled(self) -> tuple[Callable[..., State], Callable[..., State]]:
        donated = partial(jax.jit, donate_argnums=1)
        return donated(self._prefill), donated(self._decode)

    def _empty(self) -> State:
        model, batch = self.model, self.num_rows
        size = -(-(self.max_prompt_len + self.max_new_tokens) // 64) * 64
        shape = (batch, size, model.num_kv_heads, model.head_dim)
        empty = partial(jnp.zeros, shape, model.dtypes.kv)
        tokens, temperature = jnp.zeros((batch, size), jnp.int32), jnp.zeros(batch)
        length, limit = jnp.ones(batch, jnp.int32), jnp.ones(batch, jnp.int32)
        rows = Rows(tokens, length, limit, temperature, active=jnp.zeros(batch, bool))
        return tuple((empty(), empty()) for _ in range(model.num_layers)), rows

    def _padded(
        self, slots: np.ndarray, requests: Requests, max_new_tokens: int
    ) -> tuple[np.ndarray, Rows]:
        """Slots i32[P] and new rows of a prefill; padding has a slot out of range."""
        size = self.prefill_rows
        # two widths, so that two functions compile
        half = -(-self.max_prompt_len // 2)
        width = half if all(len(prompt) <= half for prompt, _ in requests) else self.max_prompt_len
        tokens, length = np.zeros((size, width), np.int32), np.ones(size, np.int32)
        padded, temperature = np.full(size, self.num_rows, np.int32), np.zeros(size, np.float32)
        for row, (prompt, warmth) in enumerate(requests):
            tokens[row, : len(prompt)] = prompt
            padded[row], length[row], temperature[row] = slots[row], len(prompt), warmth
        new = (tokens, length, length + max_new_tokens, temperature, np.ones(size, bool))
        return padded, Rows(*map(jnp.asarray, new))

    def _prefill(
        self, weights: Weights, state: State, key: jax.Array, slots: jax.Array, new: Rows
    ) -> State:
        """Put ``new`` rows, of tokens i32[P, T], into ``slots`` and sample a token each."""
        model = self.flat.rebuild(weights)
        (cache, rows), (count, width) = state, new.tokens.shape
        causal = jnp.tril(jnp.ones((1, 1, width, width), bool))
        # slots out of range belong to padding rows and are dropped
        attend = _cached_attend(
            (slots, slice(width)),
            lambda q, k, v, keys, values: masked_attention(q, k, v, causal, is_causal=True),
            mode="drop",
        )
        positions = jnp.broadcast_to(jnp.arange(width), (count, width))
        hidden, _, cache = model(new.tokens, positions, cache, attend)
        last = pick_row(hidden, new.length - 1)[:, 0]
        padding = ((0, 0), (0, rows.tokens.shape[1] - width))
        new = new._replace(tokens=jnp.pad(new.tokens, padding))
        new = self._append(new, model.logits(last), key)
        return cache, jax.tree.map(lambda old, put: old.at[slots].set(put, mode="drop"), rows, new)

    def _decode(
        self, weights: Weights, state: State, key: jax.Array, num_steps: jax.Array
    ) -> State:
        """``CHUNK_STEPS`` more tokens of every active row; ``num_steps`` ran before."""
        model = self.flat.rebuild(weights)
        batch, size = state[1].tokens.shape

        def body(step: jax.Array, state: State) -> State:
            cache, rows = state
            # inactive rows rewrite their last position, which no later token of theirs reads
            at = jnp.maximum(rows.length - 1, 0)[:, None]
            mask = (jnp.arange(size) <= at)[:, None, None]

            def attention(
                q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, values: jax.Array
            ) -> jax.Array:
                # a key head's queries become query rows: one tile of a kernel reads the keys
                queries = q.reshape(batch, k.shape[2], -1, q.shape[3]).swapaxes(1, 2)
                lengths = {
                    "query_seq_lengths": jnp.full((batch,), queries.shape[1], jnp.int32),
                    "key_value_seq_lengths": at[:, 0] + 1,
                }
                out = masked_attention(queries, keys, values, mask, **lengths)
                return out.swapaxes(1, 2).reshape(q.shape)

            here = (jnp.arange(batch)[:, None], at)
            attend = _cached_attend(here, attention, unique_indices=True)
            current = jnp.take_along_axis(rows.tokens, at, axis=1)
            hidden, _, cache = model(current, at, cache, attend)
            noise = jax.random.fold_in(key, num_steps + step)
            return cache, self._append(rows, model.logits(hidden[:, 0]), noise)

        return jax.lax.fori_loop(0, CHUNK_STEPS, body, state)

    def _append(self, rows: Rows, logits: jax.Array, key: jax.Array) -> Rows:
        """Sample a token for each active row; rows end at their limit or a stop token."""
        noise = rows.temperature[:, None] * jax.random.gumbel(key, logits.shape, jnp.float32)
        token = jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
        batch, size = rows.tokens.shape
        at = jnp.where(rows.active, rows.length, size)
        tokens = rows.tokens.at[jnp.arange(batch), at].set(token, mode="drop")
        length = rows.length + rows.active.astype(jnp.int32)
        ended = jnp.isin(token, jnp.asarray(self.stop_ids, jnp.int32)) | (length >= rows.limit)
        return rows._replace(tokens=tokens, length=length, active=rows.active & ~ended)


def _cached_attend(at: Any, attention: Callable[..., jax.Array], **scatter: Any) -> Attend:
    """Stores keys and values ``at`` places of the cache; ``attention(q, k, v, keys, values)``."""

    @rotated
    def attend(
        cache: Cache, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[Cache, jax.Array]:
        keys, values = cache[layer]
        keys, values = keys.at[at].set(k, **scatter), values.at[at].set(v, **scatter)
        cache = (*cache[:layer], (keys, values), *cache[layer + 1 :])
        return cache, attention(q, k, v, keys, values)

    return attend

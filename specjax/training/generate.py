"""Batched generation of training data: a dense cache, rows refilled as they finish.

A fixed number of rows decodes in one compiled loop of ``chunk_steps`` tokens; between loops the
host takes out finished rows and prefills new prompts into them, so the batch stays full. SmolLM2
135M in bfloat16 on one H200, 2048 rows of 512 tokens: 244k tokens/s in the loop, 195k with prefill.
"""

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
from specjax.training.attention import default_implementation
from specjax.training.decoding import Rows, decode, prefill


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

    def __post_init__(self) -> None:
        context, window = self.model.max_position_embeddings, self.model.sliding_window
        longest = self.config.max_prompt_len + self.config.max_new_tokens
        if longest > context:
            raise ValueError(
                f"max_prompt_len={self.config.max_prompt_len} plus max_new_tokens="
                f"{self.config.max_new_tokens} exceeds the model's context of {context} tokens"
            )
        if window is not None and longest > window:
            raise ValueError(
                f"max_prompt_len={self.config.max_prompt_len} plus max_new_tokens="
                f"{self.config.max_new_tokens} exceeds the model's sliding_window={window}, which "
                "training data generation does not implement"
            )

    def _functions(self) -> tuple[Callable[..., Rows], Callable[..., Rows]]:
        if not self._compiled:
            name = self.implementation or default_implementation(self.model.jnp_dtype)
            steps = self.config.chunk_steps
            self._compiled["prefill"] = jax.jit(partial(prefill, self.flat, name), donate_argnums=1)
            self._compiled["decode"] = jax.jit(
                partial(decode, self.flat, name, steps), donate_argnums=1
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
        prefill_rows, decode_rows = self._functions()
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
                rows = prefill_rows(
                    self.weights,
                    rows,
                    stops,
                    jax.random.fold_in(key, 2**30 + round_index),
                    *self._prefill_arguments(slots, ids, prompts, temperatures, max_new_tokens),
                )
            rows = decode_rows(self.weights, rows, stops, key)
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

"""Interface for changing the target's logits before they are divided by the temperature.

docs/architecture.md describes the interface. Every node of a tree sees the tokens before it: those
of the request, and the drafts between the root and the node. A processor therefore changes the
logits of a node exactly as plain decoding would at that position.

``PROCESSORS`` are applied in their order. Masks come first. The others have SGLang's order:
frequency and presence, repetition, logit bias. Penalties and bias keep -inf.

Axes: B batch, T tree nodes, V vocabulary, R request slots, C history.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.sampling.params import SamplingParams
from specjax.types import SamplingTable, VerifyInput


@dataclass(frozen=True)
class LogitInputs:
    """Inputs of a processor in addition to logits and state."""

    sampling: SamplingTable  # parameters of the B requests
    tokens: Array  # i32 [R, C], the texts by position, up to the roots of the trees
    slots: Array  # i32 [B], request slots

    @property
    def history(self) -> Array:
        """Tokens i32 ``[B, C]``."""
        return self.tokens[self.slots]


@dataclass(frozen=True)
class NewTokens:
    """Tokens added to the texts of B requests."""

    tokens: Array  # i32 [B, N]
    counts: Array  # i32 [B], number of valid tokens
    starts: Array  # i32 [B], absolute position of the first token
    sampling: SamplingTable  # parameters of the requests


class LogitProcessor(ABC):
    """Changes the logits at every node of a verified tree."""

    # whether it needs the complete history after a prefix-cache hit; state does
    needs_history: ClassVar[bool] = True

    # host side

    def is_used(self, params: SamplingParams) -> bool:
        """Whether a request needs the processor; a greedy batch that needs none skips all."""
        return True

    def fill(self, row: np.void, params: SamplingParams) -> None:
        """Write the ``SamplingTable`` fields that the processor reads; called if it is used."""
        return None

    def abstract_state(self, num_slots: int, vocab_size: int) -> Any:
        """Shapes and dtypes ``[R, ...]``; the state of an empty text is zeros."""
        return ()

    # traced, pure

    @abstractmethod
    def adjust(self, tree: VerifyInput, logits: Array, state: Any, inputs: LogitInputs) -> Array:
        """Return new logits f32 ``[B, T, V]``; ``state [B, ...]`` is the state at the root."""

    def advance(self, state: Any, new: NewTokens) -> Any:
        """Return the state ``[B, ...]`` after texts have grown."""
        return state


def at_tokens(values: Array, ids: Array) -> Any:
    """Select tokens i32 ``[B, 1 or T, N]`` of ``values [B, T, V]`` for an update; skips -1."""
    batch, rows, vocab_size = values.shape
    # -1 would wrap to the last token
    ids = jnp.where(ids >= 0, ids, vocab_size)
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    t = jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    return values.at[b, t, ids]


class MinNewTokens(LogitProcessor):
    """Forbids end tokens until a request has produced its minimum number of tokens."""

    needs_history = False

    def is_used(self, params: SamplingParams) -> bool:
        return params.min_new_tokens > 0

    def fill(self, row: np.void, params: SamplingParams) -> None:
        row["min_new_tokens"] = params.min_new_tokens

    def adjust(self, tree: VerifyInput, logits: Array, state: Any, inputs: LogitInputs) -> Array:
        sampling = inputs.sampling
        produced = tree.positions + 1 - sampling.prompt_lens[:, None]
        is_too_early = (produced < sampling.min_new_tokens[:, None])[:, :, None]
        ends = jnp.where(is_too_early, sampling.end_token_ids[:, None], -1)
        tokens = jnp.arange(logits.shape[2], dtype=jnp.int32)
        # XLA fuses comparisons into the pass for penalties; a scatter would copy the logits first
        is_forbidden = reduce(
            jnp.logical_or, (ends[:, :, e, None] == tokens for e in range(ends.shape[2]))
        )
        return jnp.where(is_forbidden, -jnp.inf, logits)


class Penalties(LogitProcessor):
    """Penalises tokens that occurred before.

    Frequency and presence count the produced tokens. Repetition also counts the prompt, as in vLLM
    and Hugging Face transformers.
    """

    def is_used(self, params: SamplingParams) -> bool:
        return params.has_penalties

    def fill(self, row: np.void, params: SamplingParams) -> None:
        row["repetition_penalties"] = params.repetition_penalty
        row["frequency_penalties"] = params.frequency_penalty
        row["presence_penalties"] = params.presence_penalty

    def adjust(self, tree: VerifyInput, logits: Array, state: Any, inputs: LogitInputs) -> Array:
        """Count the tokens in the history once per request, and drafts on the path of each node."""
        sampling, history = inputs.sampling, inputs.history
        batch, rows, vocab_size = logits.shape
        index = jnp.arange(history.shape[1], dtype=jnp.int32)
        is_prompt = index < sampling.prompt_lens[:, None]
        is_charged = (
            (sampling.repetition_penalties != 1)
            | (sampling.frequency_penalties != 0)
            | (sampling.presence_penalties != 0)
        )
        is_known = (index <= tree.positions[:, :1]) & is_charged[:, None]
        once = jnp.zeros((batch, 1, vocab_size), jnp.int32)

        def count(mask: Array) -> Array:
            return at_tokens(once, jnp.where(mask, history, -1)[:, None]).add(1, mode="drop")

        produced = jnp.broadcast_to(count(is_known & ~is_prompt), logits.shape)
        tokens = jnp.arange(vocab_size, dtype=jnp.int32)
        # the root, row 0, is already in the history; XLA fuses the sums into one pass
        for i in range(1, rows):
            drafted = tree.draft_tokens[:, i, None, None] == tokens
            produced = produced + (tree.tree_mask[:, :, i, None] & drafted).astype(jnp.int32)
        was_produced = produced > 0
        was_seen = was_produced | (count(is_known & is_prompt) > 0)
        frequency, presence = sampling.frequency_penalties, sampling.presence_penalties
        charged = logits - frequency[:, None, None] * produced.astype(jnp.float32)
        charged = charged - presence[:, None, None] * was_produced.astype(jnp.float32)
        penalty = jnp.where(was_seen, sampling.repetition_penalties[:, None, None], 1.0)
        return jnp.where(charged > 0, charged / penalty, charged * penalty)


class LogitBias(LogitProcessor):
    """Adds the request's bias to the logits of the tokens that it names."""

    needs_history = False

    def is_used(self, params: SamplingParams) -> bool:
        return bool(params.biases)

    def fill(self, row: np.void, params: SamplingParams) -> None:
        for i, (token, value) in enumerate(params.biases):
            row["bias_ids"][i], row["bias_values"][i] = token, value

    def adjust(self, tree: VerifyInput, logits: Array, state: Any, inputs: LogitInputs) -> Array:
        ids, values = inputs.sampling.bias_ids[:, None], inputs.sampling.bias_values[:, None]
        return at_tokens(logits, ids).add(values, mode="drop")


PROCESSORS: tuple[LogitProcessor, ...] = (MinNewTokens(), Penalties(), LogitBias())


def mask_words(vocab_size: int) -> int:
    """Number of words in a mask of tokens."""
    return -(-vocab_size // 32)


def keep_allowed(logits: Array, masks: Array) -> Array:
    """Set logits f32 ``[..., V]`` to -inf if their bit in ``masks`` i32 ``[..., V / 32]`` is 0.

    Bit i of word w is token ``32 * w + i``; the last word may have more bits than there are tokens.
    """
    bits = masks[..., None] >> jnp.arange(32, dtype=jnp.int32) & 1
    is_allowed = bits.reshape(*masks.shape[:-1], -1)[..., : logits.shape[-1]] > 0
    return jnp.where(is_allowed, logits, -jnp.inf)


def used_by(params: SamplingParams) -> list[LogitProcessor]:
    return [processor for processor in PROCESSORS if processor.is_used(params)]


def needs_history(params: SamplingParams) -> bool:
    """Whether a request needs the complete history after a prefix-cache hit."""
    return any(processor.needs_history for processor in used_by(params))


def abstract_states(num_slots: int, vocab_size: int) -> tuple[Any, ...]:
    """Shapes and dtypes of the states of all processors, by request slot."""
    return tuple(processor.abstract_state(num_slots, vocab_size) for processor in PROCESSORS)


def adjust_logits(
    tree: VerifyInput, logits: Array, states: tuple[Any, ...], inputs: LogitInputs
) -> Array:
    """Apply all processors to logits f32 ``[B, T, V]``; ``states`` are by request slot."""
    states = jax.tree.map(lambda leaf: leaf[inputs.slots], states)
    for processor, state in zip(PROCESSORS, states or ((),) * len(PROCESSORS), strict=True):
        logits = processor.adjust(tree, logits, state, inputs)
    return logits


def advance_states(states: tuple[Any, ...], slots: Array, new: NewTokens) -> tuple[Any, ...]:
    """Return the states of all request slots after slots i32 ``[B]`` got new tokens."""
    if not jax.tree.leaves(states):
        return states
    rows = jax.tree.map(lambda leaf: leaf[slots], states)
    rows = tuple(x.advance(row, new) for x, row in zip(PROCESSORS, rows, strict=True))
    return jax.tree.map(lambda leaf, row: leaf.at[slots].set(row), states, rows)

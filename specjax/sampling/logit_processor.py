"""Interface for changing the target's logits before they are divided by the temperature.

A :class:`LogitProcessor` itself has no state. The *state* of each request is a pytree by request
slot, on the device next to lengths and history. It depends only on the text: prefill computes it
from the history, so it is the same after a preemption, a prefix-cache hit or a prefill in another
engine. Rounds advance it only by accepted tokens, so drafts never enter it.

Every node of a tree sees the tokens before it: those of the request, and the drafts between the
root and the node. A processor therefore changes the logits of a node exactly as plain decoding
would at that position, and accepting drafts does not change any token.

Axes: B batch, T tree nodes, V vocabulary, R request slots, C history.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.sampling.params import SamplingParams
from specjax.types import SamplingTable, VerifyInput


@dataclass(frozen=True)
class LogitInputs:
    """Inputs of a processor in addition to logits and state."""

    sampling: SamplingTable  # parameters of the B requests
    tokens: jax.Array  # i32 [R, C], the texts by position, up to the roots of the trees
    slots: jax.Array  # i32 [B], request slots

    @property
    def history(self) -> jax.Array:
        """Tokens i32 ``[B, C]``."""
        return self.tokens[self.slots]


@dataclass(frozen=True)
class NewTokens:
    """Tokens added to the texts of B requests."""

    tokens: jax.Array  # i32 [B, N]
    counts: jax.Array  # i32 [B], number of valid tokens
    starts: jax.Array  # i32 [B], absolute position of the first token
    sampling: SamplingTable  # parameters of the requests


class LogitProcessor(ABC):
    """Changes the logits at every node of a verified tree.

    Attributes:
        needs_history: whether it needs the complete history after a prefix-cache hit; state does.
    """

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
    def adjust(
        self, tree: VerifyInput, logits: jax.Array, state: Any, inputs: LogitInputs
    ) -> jax.Array:
        """Return new logits f32 ``[B, T, V]``; ``state [B, ...]`` is the state at the root."""

    def advance(self, state: Any, new: NewTokens) -> Any:
        """Return the state ``[B, ...]`` after texts have grown."""
        return state


def at_tokens(values: jax.Array, ids: jax.Array) -> Any:
    """Select tokens i32 ``[B, 1 or T, N]`` of ``values [B, T, V]`` for an update; skips -1."""
    batch, rows, vocab_size = values.shape
    # -1 would wrap to the last token
    ids = jnp.where(ids >= 0, ids, vocab_size)
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    t = jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    return values.at[b, t, ids]

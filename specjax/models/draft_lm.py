"""A language model in the place of a draft head."""

from typing import ClassVar

import jax

from specjax.models.decoder import CausalLM


class DraftLM(CausalLM):
    """A target family that drafts for another model over the same vocabulary.

    The recurrent state of drafting is its last hidden state, which its passes do not read.
    """

    vocabulary: ClassVar[None] = None  # a column of the logits is its token

    def logits(self, hidden: jax.Array, target: CausalLM | None = None) -> jax.Array:
        """Float32 logits ``[..., V]`` of final hidden states ``[..., D]``, all its own."""
        return super().logits(hidden)

    def target_ids(self, draft_ids: jax.Array) -> jax.Array:
        return draft_ids

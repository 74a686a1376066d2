"""Plain decoding: nothing is drafted, a round verifies the bonus token alone."""

from dataclasses import dataclass
from typing import Any

import jax

from specjax.speculative.algorithm import Batch, PromptChunks, Rows, SpeculativeAlgorithm, State
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape, VerifyInput, VerifyOutput

# engine arguments that only drafting reads, where they differ from these
UNUSED = {
    "speculative_num_steps": None,
    "speculative_num_draft_tokens": None,
    "speculative_eagle_topk": 1,
    "speculative_adaptive": False,
    "speculative_adaptive_config": None,
    "speculative_use_rejection_sampling": False,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "draft": None,
    "draft_rope_theta": None,
    "simulate_accept_length": None,
}


@dataclass(frozen=True)
class Plain(SpeculativeAlgorithm):
    """A draft of no tokens, without state and rows."""

    def validate(self, args: Any) -> None:
        """Refuse what would have no effect."""
        unused = [name for name, value in UNUSED.items() if getattr(args, name) != value]
        if unused:
            raise ValueError(f"{unused} are given, but speculative_algorithm is None; set it")

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        return DraftShape.chain(0)

    def is_none(self) -> bool:
        return True

    def prefill(
        self, batch: Batch, state: State, rows: Rows, chunks: PromptChunks, features: jax.Array
    ) -> tuple[State, Rows]:
        return state, rows

    def propose(
        self, batch: Batch, state: State, rows: Rows, shape: DraftShape
    ) -> tuple[VerifyInput, State]:
        return chain_input(batch.bonus_tokens[:, None], batch.seq_lens), state

    def extend(
        self, batch: Batch, state: State, rows: Rows, verified: VerifyOutput, shape: DraftShape
    ) -> tuple[State, Rows]:
        return state, rows


PLAIN = Plain("NONE")

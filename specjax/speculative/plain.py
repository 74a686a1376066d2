"""Plain decoding: nothing is drafted, a round verifies the bonus token alone."""

from dataclasses import dataclass
from typing import Any

import jax

from specjax.speculative.algorithm import Batch, PromptChunks, Rows, SpeculativeAlgorithm, State
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape, VerifyInput, VerifyOutput


@dataclass(frozen=True)
class Plain(SpeculativeAlgorithm):
    """A draft of no tokens, without state and rows."""

    def reads(self, option: str) -> bool:
        return option == "speculative_algorithm"

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

"""What the rounds of one tier run with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specjax.types import DraftShape

ByBucket = Mapping[int, Callable[..., Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SpecRuntimeState:
    """Everything that a round of one tier runs with; a switch replaces it as a whole.

    Compiled functions are by batch bucket; a worker of another kind may leave them out.
    ``greedy_round`` is for batches of which no row asks for more than the best token, empty where
    it would be no faster.
    """

    shape: DraftShape
    round: ByBucket = field(default_factory=dict)
    greedy_round: ByBucket = field(default_factory=dict)

    @property
    def speculative_num_steps(self) -> int:
        """Drafted levels; 0 for plain decoding."""
        return self.shape.steps

    @property
    def speculative_num_draft_tokens(self) -> int:
        """Rows of one verify, the root included."""
        return self.shape.nodes

"""What the rounds of one tier run with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.stages import Compiled

from specjax.types import DraftShape

ByBucket = Mapping[int, Compiled]


@dataclass(frozen=True, kw_only=True, eq=False)
class SpecRuntimeState:
    """Everything that a round of one tier runs with; a switch replaces it as a whole.

    Compiled functions are by batch bucket; a worker of another kind may leave them out.
    ``greedy_round`` is for batches of which no row asks for more than the best token, empty where
    it would be no faster; the three stages are there where they were asked for.
    """

    shape: DraftShape
    round: ByBucket = field(default_factory=dict)
    greedy_round: ByBucket = field(default_factory=dict)
    draft: ByBucket = field(default_factory=dict)
    verify: ByBucket = field(default_factory=dict)
    extend: ByBucket = field(default_factory=dict)

    @property
    def speculative_num_steps(self) -> int:
        """Drafted levels; 0 for plain decoding."""
        return self.shape.steps

    @property
    def speculative_num_draft_tokens(self) -> int:
        """Rows of one verify, the root included."""
        return self.shape.nodes

"""What the rounds of one tier run with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specjax.types import DraftShape

ByBucket = Mapping[int, Callable[..., Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SpecRuntimeState:
    """Everything that a round of one tier runs with; a switch replaces it as a whole.

    The engine's own has compiled functions by batch bucket: fused rounds, and their stages if these
    were compiled by then (:meth:`ModelRunner.compile_stages`). A worker of another kind fills in
    what it dispatches, in any form.
    """

    speculative_num_steps: int  # drafted levels; 0 for plain decoding
    speculative_num_draft_tokens: int  # rows of one verify, the root included
    speculative_eagle_topk: int = 1  # branches per level; 1 is a chain
    draft: Any = None
    verify: Any = None
    extend: Any = None
    round: ByBucket = field(default_factory=dict)
    # for batches of which no row asks for more than the best token; empty if it is not faster
    greedy_round: ByBucket = field(default_factory=dict)

    @property
    def shape(self) -> DraftShape:
        """The tier."""
        steps, nodes = self.speculative_num_steps, self.speculative_num_draft_tokens
        return DraftShape(steps, self.speculative_eagle_topk, nodes)

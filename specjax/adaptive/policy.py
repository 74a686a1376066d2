"""What a policy of adaptive speculation offers."""

from collections.abc import Sequence
from typing import Any, Protocol


class AdaptiveSpecPolicy(Protocol):
    """Decides the tier (drafted tokens a round) from the counts of verified rounds.

    A policy depends on nothing but its construction and the reported rounds, in their order, so
    that devices which report the same rounds take the same decisions.
    """

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """Every tier the policy may choose, ascending."""

    @property
    def current_steps(self) -> int:
        """The tier of the latest decision."""

    def steps_for_batch(self, batch_size: int) -> int:
        """The tier for the next round of ``batch_size`` rows; asking changes nothing."""

    def on_verify_complete(
        self, num_accepted_drafts: Sequence[int], *, executed_steps: int, batch_size: int
    ) -> bool:
        """Take in one round; whether the tier for ``batch_size`` changed.

        Args:
            num_accepted_drafts: accepted drafts of each live row, without the bonus token; zeros
                for a plain round.
            executed_steps: the tier that the round ran with, which need not be the current one.
            batch_size: rows of the round.
        """

    def describe(self) -> dict[str, Any]:
        """The policy's figures for server information, as JSON values."""

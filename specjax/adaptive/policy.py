"""What a policy is: it chooses the tier of each round from the drafts accepted in earlier ones."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

from specjax.adaptive.survival import NO_RECORD, RoundRecord
from specjax.types import DraftShape


class AdaptiveSpecPolicy(ABC):
    """Chooses the tier from the counts of accepted drafts in verified rounds.

    Decisions depend only on these counts, the records and the constructor's arguments, so two
    policies that get the same ones make the same decisions. ``tiers`` has all tiers that the policy
    may choose, in ascending order, and ``tier`` is that of the last decision, or the initial one.
    """

    tiers: tuple[DraftShape, ...]

    @property
    @abstractmethod
    def tier(self) -> DraftShape: ...

    @abstractmethod
    def tier_for_batch(self, batch_size: int, record: RoundRecord = NO_RECORD) -> DraftShape:
        """The tier for the next round of ``batch_size`` rows; does not change any state.

        ``record`` has what is known before the round: context, requests and share.
        """

    @abstractmethod
    def on_verify_complete(
        self,
        num_accepted_drafts: Sequence[int],
        *,
        tier: DraftShape,
        batch_size: int,
        record: RoundRecord = NO_RECORD,
    ) -> bool:
        """Record a round in any tier; return whether the tier for this batch size changed."""

    def describe(self) -> dict[str, Any]:
        """The policy's metrics as JSON values, for server information."""
        return {}

    @property
    def ema_accept_len(self) -> float:
        """Moving average of accepted drafts per row, without the bonus token; 0 if not kept."""
        return 0.0

    def calibration(self, requests: Sequence[Hashable]) -> tuple[Any, Any, Any] | None:
        """How packed rounds rate the drafts of these requests; ``None`` leaves it as it is.

        It has the slope, the intercepts by depth and the offset of each request with which
        :func:`specjax.speculative.packing.survival` rates drafts.
        """
        return None


def check_counts(num_accepted_drafts: Sequence[int], tier: DraftShape) -> None:
    """Raise ValueError for counts that are impossible in a round in this tier."""
    if not 0 <= min(num_accepted_drafts) <= max(num_accepted_drafts) <= tier.depth:
        raise ValueError(f"{num_accepted_drafts=} must be from 0 to {tier.depth} for {tier=}")

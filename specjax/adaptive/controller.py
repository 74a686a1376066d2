"""Policies choose the tier of each round; a controller asks one, and counts what rounds accept."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specjax.adaptive.survival import NO_RECORD, RoundRecord
from specjax.types import DraftShape

logger = logging.getLogger(__name__)


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


@dataclass
class TierCounts:
    """The number of reported rounds in one tier, and of drafts in their live rows."""

    rounds: int = 0
    proposed_drafts: int = 0
    accepted_drafts: int = 0


class TierController:
    """Asks a policy for the tier of each round, and reports accepted drafts to it.

    The engine dispatches rounds before it has read earlier ones: it calls
    :meth:`activate_for_batch` before every dispatch, and :meth:`on_verify_complete` with the tier
    and the batch size when a round is read.

    Raises ValueError if ``policy`` is not an :class:`~specjax.adaptive.AdaptiveSpecPolicy`.

    Attributes:
        params: the policy, under SGLang's name.
        tier: the tier of the next rounds.
    """

    def __init__(self, policy: AdaptiveSpecPolicy) -> None:
        if not isinstance(policy, AdaptiveSpecPolicy):
            raise ValueError(
                f"{policy=} is not a policy; derive it from AdaptiveSpecPolicy, or pass a "
                "configuration as config_path"
            )
        self.policy = self.params = policy
        self.tier = policy.tier
        self.switches = 0
        # all tiers from the start, because other threads iterate over them
        self.tiers = {tier: TierCounts() for tier in policy.tiers}
        logger.info(
            "adaptive decoding: policy %s, tiers %s, first tier %s",
            policy.describe().get("policy", type(policy).__name__),
            ", ".join(map(str, policy.tiers)),
            self.tier,
        )

    def on_verify_complete(
        self,
        num_accepted_drafts: Sequence[int],
        *,
        tier: DraftShape,
        batch_size: int,
        record: RoundRecord = NO_RECORD,
    ) -> bool:
        """Record one verified round; return whether the tier for its batch size changed.

        ``num_accepted_drafts`` has the accepted drafts of each live row, without the bonus token; 0
        in a plain round. ``tier`` and ``batch_size`` (rows, including padding) are those of the
        round. ``record`` has what else is known about it.

        Without live rows, nothing changes. Raises ValueError for a count that is impossible in the
        tier, or a tier that is not a candidate.
        """
        counts = [int(count) for count in num_accepted_drafts]
        if not counts:
            return False
        check_counts(counts, tier)
        if tier not in self.tiers:
            raise ValueError(f"{tier=} is not one of tiers={self.policy.tiers}")
        has_moved = self.policy.on_verify_complete(
            counts, tier=tier, batch_size=batch_size, record=record
        )
        figures = self.tiers[tier]
        figures.rounds += 1
        # packed rounds share rows, also those of padding, so a request may verify more than others
        proposed = record.num_proposed_drafts if tier.packed else ()
        figures.proposed_drafts += sum(proposed) if proposed else (tier.nodes - 1) * len(counts)
        figures.accepted_drafts += sum(counts)
        return has_moved

    def activate_for_batch(self, batch_size: int, record: RoundRecord = NO_RECORD) -> DraftShape:
        """Return the tier for the next round of ``batch_size`` rows, padding included.

        ``record`` is as for a policy.
        """
        tier = self.policy.tier_for_batch(batch_size, record)
        if tier != self.tier:
            message = "adaptive decoding: speculative_num_steps changed from %s to %s"
            logger.debug(message, self.tier, tier)
            self.switches += 1
            self.tier = tier
        return tier

    @property
    def ema_accept_len(self) -> float:
        return float(self.policy.ema_accept_len)

    @property
    def wasted_drafts(self) -> int:
        return sum(tier.proposed_drafts - tier.accepted_drafts for tier in self.tiers.values())

    @property
    def num_rounds(self) -> int:
        return sum(counts.rounds for counts in self.tiers.values())

    @property
    def num_plain_rounds(self) -> int:
        return sum(counts.rounds for tier, counts in self.tiers.items() if not tier.steps)

    def totals(self) -> dict[str, Any]:
        """Current values by their names in :class:`specjax.metrics.Totals`; any thread may call."""
        shared = "tier", "ema_accept_len", "wasted_drafts", "num_rounds", "num_plain_rounds"
        values, described = {name: getattr(self, name) for name in shared}, self.policy.describe()
        names = {"expected_tokens", "realised_tokens", "calibration_error"} & described.keys()
        return values | {"num_switches": self.switches} | {name: described[name] for name in names}

    def describe(self) -> dict[str, Any]:
        return {
            "speculative_num_steps": self.tier.steps,
            "candidate_steps": sorted({tier.steps for tier in self.tiers}),
            "switches": self.switches,
            "ema_accept_len": self.ema_accept_len,
            "num_verify_rounds": self.num_rounds - self.num_plain_rounds,
            "num_plain_rounds": self.num_plain_rounds,
            "wasted_drafts": self.wasted_drafts,
            "tiers": {str(tier): asdict(t) for tier, t in self.tiers.items() if t.rounds},
            **self.policy.describe(),
        }

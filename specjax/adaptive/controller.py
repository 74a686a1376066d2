"""The tier of each round: what a policy decides it by, and states of workers that switch by it."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from specjax.adaptive.config import ConfigSource
from specjax.adaptive.ema import AdaptiveSpeculativeParams
from specjax.types import DraftShape

logger = logging.getLogger(__name__)

EMA_ALPHA = 0.2


class TierState(Protocol):
    """What a worker runs a tier with: any object that knows the tier's steps.

    If it has ``speculative_num_draft_tokens`` too, these have to be the tier's rows.
    """

    @property
    def speculative_num_steps(self) -> int:
        """Drafted tokens of a round, 0 for plain decoding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SpecRuntimeState:
    """All that a worker's rounds of one tier run with, in any form; swapped as a whole."""

    speculative_num_steps: int  # drafted levels; 0 for plain decoding
    speculative_num_draft_tokens: int  # rows of one verify, the root included
    draft: Any = None
    verify: Any = None
    extend: Any = None


State = TypeVar("State", bound=TierState)


class AdaptiveSpecWorker(Protocol[State]):
    """A worker whose tier can change between rounds; ``State`` is of its own making.

    Building a state may take long (it compiles, it allocates); applying one must not.
    docs/adaptive_decoding.md has a worker to begin with.
    """

    @property
    def speculative_num_steps(self) -> int:
        """The tier to begin with."""

    def build_adaptive_runtime_state(
        self, *, speculative_num_steps: int, speculative_num_draft_tokens: int
    ) -> State:
        """All that rounds of a tier run with; draft tokens are rows of a verify, with the root."""

    def apply_runtime_state(self, state: State) -> None:
        """Run the rounds to come with ``state``; rounds in flight keep theirs."""


class AdaptiveSpecPolicy(Protocol):
    """Decides the tier from the counts of verified rounds.

    It depends on nothing else but its construction, so that devices which report the same rounds
    take the same decisions.
    """

    @property
    def tiers(self) -> tuple[DraftShape, ...]:
        """Every tier the policy may choose, ascending."""

    @property
    def tier(self) -> DraftShape:
        """The tier of the latest decision; at first the one to start with."""

    def tier_for_batch(self, batch_size: int) -> DraftShape:
        """The tier for the next round of ``batch_size`` rows; asking changes nothing."""

    def on_verify_complete(
        self, num_accepted_drafts: Sequence[int], *, tier: DraftShape, batch_size: int
    ) -> bool:
        """Take in one round, which need not be of the current tier; whether the batch's changed."""

    def describe(self) -> dict[str, Any]:
        """The policy's figures for server information, as JSON values."""


def check_counts(num_accepted_drafts: Sequence[int], tier: DraftShape) -> None:
    """Refuse counts that a round of the tier cannot have."""
    if not 0 <= min(num_accepted_drafts) <= max(num_accepted_drafts) <= tier.depth:
        raise ValueError(f"{num_accepted_drafts=} must be from 0 to {tier.depth} for {tier=}")


@dataclass
class TierCounts:
    """Reported rounds of one tier, and the drafts of their live rows."""

    rounds: int = 0
    proposed_drafts: int = 0
    accepted_drafts: int = 0


class AdaptiveController:
    """Asks a policy for the tier of each round, and tells it what rounds accepted.

    A caller that dispatches rounds before earlier ones are read, as the engine does, calls
    :meth:`activate_for_batch` before every dispatch, and :meth:`on_verify_complete` with the tier
    and the batch that the round ran with.

    A worker that has a state for each tier calls :meth:`init_states` before its first round. It may
    do the same, or call :meth:`on_verify_complete` with the counts alone after every verify. Either
    way the worker is given the state of the tier that the policy moves to.

    Args:
        worker: whose state changes, if there is one.
        policy: decides; by default the EMA policy from the worker's ``speculative_num_steps`` on.
        config_path: of the default policy, for :func:`specjax.adaptive.load_adaptive_config`.

    Raises:
        ValueError: ``policy`` is not a policy, or both it and ``config_path`` are given.

    Attributes:
        params: the policy, under SGLang's name.
        tier: that of the rounds to come.
    """

    def __init__(
        self,
        worker: AdaptiveSpecWorker[Any] | None,
        policy: AdaptiveSpecPolicy | None = None,
        *,
        config_path: ConfigSource = None,
    ) -> None:
        if policy is None:
            first = 0 if worker is None else worker.speculative_num_steps
            policy = AdaptiveSpeculativeParams(first, config_path)
        elif config_path is not None:
            raise ValueError(f"{policy=} excludes {config_path=}; pass one of them")
        elif isinstance(policy, type) or not hasattr(policy, "on_verify_complete"):
            raise ValueError(f"{policy=} is not a policy; pass a configuration as config_path")
        self.worker = worker
        self.policy = self.params = policy
        self.tier = policy.tier
        self.switches = 0
        # all of them from the start, since other threads read the figures
        self.tiers = {tier: TierCounts() for tier in policy.tiers}
        self._ema = 0.0
        self._states: dict[DraftShape, TierState] = {}
        logger.info(
            "adaptive decoding: policy %s, tiers %s, first tier %s",
            policy.describe().get("policy", type(policy).__name__),
            ", ".join(map(str, policy.tiers)),
            self.tier,
        )

    def register(self, state: TierState) -> None:
        """Add a state that was built elsewhere; refused if its tier is no candidate or has one."""
        steps = state.speculative_num_steps
        nodes = getattr(state, "speculative_num_draft_tokens", None)
        fitting = [t for t in self.tiers if t.steps == steps and nodes in (None, t.nodes)]
        if not fitting:
            raise ValueError(
                f"speculative_num_steps={steps} with speculative_num_draft_tokens={nodes} is not "
                f"one of tiers={self.policy.tiers}"
            )
        if fitting[0] in self._states:
            raise ValueError(f"speculative_num_steps={steps} is registered twice")
        self._states[fitting[0]] = state

    def init_states(self) -> None:
        """Build the states of all tiers that have none, and apply that of the first tier."""
        assert self.worker is not None
        for tier in sorted(self.tiers.keys() - self._states):
            state = self.worker.build_adaptive_runtime_state(
                speculative_num_steps=tier.steps, speculative_num_draft_tokens=tier.nodes
            )
            if state.speculative_num_steps != tier.steps:
                raise ValueError(
                    f"the worker built speculative_num_steps={state.speculative_num_steps} "
                    f"where {tier.steps} was asked for"
                )
            self._states[tier] = state
        # whatever the worker runs now may not be the state that is registered
        self.worker.apply_runtime_state(self._states[self.tier])

    def on_verify_complete(
        self,
        num_accepted_drafts: Sequence[int],
        *,
        tier: DraftShape | None = None,
        batch_size: int | None = None,
    ) -> bool:
        """Take in one verified round; whether the policy moved for that batch.

        With the counts alone the round is one of the present tier, of as many rows, and the tier of
        the next one holds when this returns. Otherwise ``tier`` is what the round ran with, and
        ``batch_size`` its rows, padding included.

        Counts are the accepted drafts of each live row, without the bonus token; zeros for a plain
        round. Nothing happens without live rows. ValueError for a count that the tier cannot have,
        a tier that is no candidate, or one keyword without the other.
        """
        if (tier is None) != (batch_size is None):
            raise ValueError(f"{tier=} and {batch_size=}: give both or none")
        counts = [int(count) for count in num_accepted_drafts]
        rows, accepted = len(counts), sum(counts)
        if not rows:
            return False
        executed = self.tier if tier is None else tier
        check_counts(counts, executed)
        if executed not in self.tiers:
            raise ValueError(f"{tier=} is not one of tiers={self.policy.tiers}")
        size = rows if batch_size is None else batch_size
        has_moved = self.policy.on_verify_complete(counts, tier=executed, batch_size=size)
        figures = self.tiers[executed]
        figures.rounds += 1
        figures.proposed_drafts += (executed.nodes - 1) * rows
        figures.accepted_drafts += accepted
        if executed.steps > 0:
            self._ema += EMA_ALPHA * (accepted / rows - self._ema)
        if tier is None:
            self.activate_for_batch(size)
        return has_moved

    def activate_for_batch(self, batch_size: int) -> DraftShape:
        """The tier for the next round of ``batch_size`` rows with padding; a worker gets its state.

        ValueError if the worker has none for it.
        """
        tier = self.policy.tier_for_batch(batch_size)
        if self.worker is not None and tier not in self._states:
            raise ValueError(f"{tier=} has no state; call init_states()")
        if tier != self.tier:
            if self.worker is not None:
                self.worker.apply_runtime_state(self._states[tier])
            logger.info("speculative_num_steps %s -> %s", self.tier, tier)
            self.switches += 1
            self.tier = tier
        return tier

    @property
    def ema_accept_len(self) -> float:
        """Accepted drafts of a row and verify, without the bonus token: a moving average."""
        return float(getattr(self.policy, "ema_accept_len", self._ema))

    @property
    def wasted_drafts(self) -> int:
        return sum(tier.proposed_drafts - tier.accepted_drafts for tier in self.tiers.values())

    def describe(self) -> dict[str, Any]:
        """Figures for server information, as JSON values."""
        return {
            "speculative_num_steps": self.tier.steps,
            "candidate_steps": sorted({tier.steps for tier in self.tiers}),
            "switches": self.switches,
            "ema_accept_len": self.ema_accept_len,
            "num_verify_rounds": sum(t.rounds for tier, t in self.tiers.items() if tier.steps),
            "wasted_drafts": self.wasted_drafts,
            "tiers": {str(tier): asdict(t) for tier, t in self.tiers.items() if t.rounds},
            **self.policy.describe(),
        }

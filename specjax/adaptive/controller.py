"""Choose the tier of each round with a policy, and switch a worker to the tier's state."""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from specjax.adaptive.config import ConfigSource
from specjax.adaptive.ema import AdaptiveSpeculativeParams
from specjax.adaptive.survival import NO_RECORD, RoundRecord
from specjax.types import DraftShape

logger = logging.getLogger(__name__)

EMA_ALPHA = 0.2


@dataclass(frozen=True, kw_only=True, eq=False)
class SpecRuntimeState:
    """The runtime state of a worker for rounds in one tier; its parts may be any objects."""

    speculative_num_steps: int  # number of drafted levels; 0 for plain decoding
    speculative_num_draft_tokens: int  # rows per verify pass, including the root
    draft: Any = None
    verify: Any = None
    extend: Any = None


State = TypeVar("State")


class AdaptiveSpecWorker(Protocol[State]):
    """A worker whose tier can change between rounds; it defines its own ``State`` type.

    A state is any object with the tier's ``speculative_num_steps``. If it also has
    ``speculative_num_draft_tokens``, this must be the tier's rows per verify.
    Building a state may be slow (it compiles and allocates); applying one must be fast.
    docs/extending.md has an example worker.
    """

    @property
    def speculative_num_steps(self) -> int:
        """The initial tier."""

    def build_adaptive_runtime_state(
        self, *, speculative_num_steps: int, speculative_num_draft_tokens: int
    ) -> State:
        """Build the state for rounds in one tier; draft tokens are rows per verify, with root."""

    def apply_runtime_state(self, state: State) -> None:
        """Use ``state`` for later rounds; rounds in flight keep theirs."""


class AdaptiveSpecPolicy(Protocol):
    """Chooses the tier from the counts of accepted drafts in verified rounds.

    Decisions depend only on these counts, the records and the constructor's arguments, so two
    policies that get the same ones make the same decisions.
    """

    @property
    def tiers(self) -> tuple[DraftShape, ...]:
        """All tiers that the policy may choose, in ascending order."""

    @property
    def tier(self) -> DraftShape:
        """The tier of the last decision, or the initial tier."""

    def tier_for_batch(self, batch_size: int, record: RoundRecord = NO_RECORD) -> DraftShape:
        """The tier for the next round of ``batch_size`` rows; does not change any state.

        ``record`` has what is known before the round: context, requests and share.
        """

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


class AdaptiveController:
    """Asks a policy for the tier of each round, and reports accepted drafts to it.

    A caller that dispatches rounds before it has read earlier ones, like the engine, calls
    :meth:`activate_for_batch` before every dispatch, and :meth:`on_verify_complete` with the tier
    and the batch size when a round is read. A worker with one state per tier, which the controller
    applies, calls :meth:`init_states` first. It may then leave out :meth:`activate_for_batch`.

    Args:
        worker: the worker whose state changes, if any.
        policy: by default the EMA policy, starting from the worker's ``speculative_num_steps``.
        config_path: configuration of the default policy, as for ``load_adaptive_config``.

    Raises:
        ValueError: if ``policy`` is not a policy, or both it and ``config_path`` are given.

    Attributes:
        params: the policy, under SGLang's name.
        tier: the tier of the next rounds.
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
            raise ValueError(f"{policy=} and {config_path=} cannot be combined; pass only one")
        elif isinstance(policy, type) or not hasattr(policy, "on_verify_complete"):
            raise ValueError(f"{policy=} is not a policy; pass a configuration as config_path")
        self.worker = worker
        self.policy = self.params = policy
        self.tier = policy.tier
        self.switches = 0
        # all tiers from the start, because other threads iterate over them
        self.tiers = {tier: TierCounts() for tier in policy.tiers}
        self._ema = 0.0
        self._states: dict[DraftShape, Any] = {}
        logger.info(
            "adaptive decoding: policy %s, tiers %s, first tier %s",
            policy.describe().get("policy", type(policy).__name__),
            ", ".join(map(str, policy.tiers)),
            self.tier,
        )

    def register(self, state: Any) -> None:
        """Add a state for a tier of the policy that has none."""
        steps = state.speculative_num_steps
        nodes = getattr(state, "speculative_num_draft_tokens", None)
        fitting = [t for t in self.tiers if t.steps == steps and nodes in (None, t.nodes)]
        if not fitting:
            raise ValueError(
                f"speculative_num_steps={steps} with speculative_num_draft_tokens={nodes} is not "
                f"one of tiers={self.policy.tiers}; pass the steps of one of them"
            )
        if fitting[0] in self._states:
            raise ValueError(f"a state for speculative_num_steps={steps} was already added")
        self._states[fitting[0]] = state

    def init_states(self) -> None:
        """Build the states that tiers still lack, and apply the state of the first tier."""
        assert self.worker is not None
        for tier in sorted(self.tiers.keys() - self._states):
            state = self.worker.build_adaptive_runtime_state(
                speculative_num_steps=tier.steps, speculative_num_draft_tokens=tier.nodes
            )
            if state.speculative_num_steps != tier.steps:
                raise ValueError(
                    f"the worker built speculative_num_steps={state.speculative_num_steps}, "
                    f"but {tier.steps} was requested"
                )
            self._states[tier] = state
        # the worker's current state may differ from the registered one
        self.worker.apply_runtime_state(self._states[self.tier])

    def on_verify_complete(
        self,
        num_accepted_drafts: Sequence[int],
        *,
        tier: DraftShape | None = None,
        batch_size: int | None = None,
        record: RoundRecord = NO_RECORD,
    ) -> bool:
        """Record one verified round; return whether the tier for its batch size changed.

        ``num_accepted_drafts`` has the accepted drafts of each live row, without the bonus token; 0
        in a plain round. ``record`` has what else is known about the round.
        ``tier`` and ``batch_size`` (rows, including padding) are those of the
        round. If they are left out, the round ran in the current tier with one row per count, and
        the state of the next tier is applied before the call returns.

        Without live rows, nothing changes. Raises ValueError for a count that is impossible in the
        tier, a tier that is not a candidate, or one keyword without the other.
        """
        if (tier is None) != (batch_size is None):
            raise ValueError(f"{tier=} and {batch_size=} must be given together, or not at all")
        counts = [int(count) for count in num_accepted_drafts]
        rows, accepted = len(counts), sum(counts)
        if not rows:
            return False
        executed = self.tier if tier is None else tier
        check_counts(counts, executed)
        if executed not in self.tiers:
            raise ValueError(f"{tier=} is not one of tiers={self.policy.tiers}")
        size = rows if batch_size is None else batch_size
        has_moved = self.policy.on_verify_complete(
            counts, tier=executed, batch_size=size, record=record
        )
        figures = self.tiers[executed]
        figures.rounds += 1
        # packed rounds share rows, also those of padding, so a request may verify more than others
        known = record.num_proposed_drafts if executed.packed else ()
        figures.proposed_drafts += sum(known) if known else (executed.nodes - 1) * rows
        figures.accepted_drafts += accepted
        if executed.steps > 0:
            self._ema += EMA_ALPHA * (accepted / rows - self._ema)
        if tier is None:
            self.activate_for_batch(size)
        return has_moved

    def activate_for_batch(self, batch_size: int, record: RoundRecord = NO_RECORD) -> DraftShape:
        """Return the tier for the next round of ``batch_size`` rows, and apply its state.

        ``batch_size`` includes padding; ``record`` is as for a policy.
        Raises ValueError if the worker has no state for the tier.
        """
        tier = self.policy.tier_for_batch(batch_size, record)
        if self.worker is not None and tier not in self._states:
            raise ValueError(f"{tier=} has no state; call init_states()")
        if tier != self.tier:
            if self.worker is not None:
                self.worker.apply_runtime_state(self._states[tier])
            message = "adaptive decoding: speculative_num_steps changed from %s to %s"
            logger.debug(message, self.tier, tier)
            self.switches += 1
            self.tier = tier
        return tier

    def calibration(self, requests: Sequence[Hashable]) -> tuple[Any, Any, Any] | None:
        """The result of the policy's method ``calibration``, if it has one; packed rounds use it.

        It has the slope, the intercepts by depth and the offset of each request with which
        :func:`specjax.speculative.packing.survival` rates drafts.
        """
        estimate = getattr(self.policy, "calibration", None)
        return None if estimate is None else estimate(requests)

    @property
    def ema_accept_len(self) -> float:
        """Moving average of accepted drafts per row and verify pass, without the bonus token."""
        return float(getattr(self.policy, "ema_accept_len", self._ema))

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
        own = "tier", "ema_accept_len", "wasted_drafts", "num_rounds", "num_plain_rounds"
        found, known = {name: getattr(self, name) for name in own}, self.policy.describe()
        names = {"expected_tokens", "realised_tokens", "calibration_error"} & known.keys()
        return found | {"num_switches": self.switches} | {name: known[name] for name in names}

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

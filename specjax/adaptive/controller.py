"""The runtime states of the tiers, which of them runs next, and what a policy offers for that."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from specjax.adaptive.config import ConfigSource
from specjax.adaptive.ema import AdaptiveSpeculativeParams

logger = logging.getLogger(__name__)

EMA_ALPHA = 0.2


class TierState(Protocol):
    """What a worker runs a tier with: any object that knows its tier."""

    @property
    def speculative_num_steps(self) -> int:
        """Drafted tokens of a round, 0 for plain decoding."""


State = TypeVar("State", bound=TierState)


class AdaptiveSpecWorker(Protocol[State]):
    """A worker whose tier can change between rounds; ``State`` is of its own making.

    Building a state may take long (it compiles, it allocates); applying one must not.
    docs/adaptive_decoding.md has a worker to begin with.
    """

    @property
    def speculative_num_steps(self) -> int:
        """The tier of the rounds to come."""

    def build_adaptive_runtime_state(
        self, *, speculative_num_steps: int, speculative_num_draft_tokens: int
    ) -> State:
        """All that rounds of a tier run with; draft tokens are rows of a verify, with the root."""

    def apply_runtime_state(self, state: State) -> None:
        """Run the rounds to come with ``state``; rounds in flight keep theirs."""


class AdaptiveSpecPolicy(Protocol):
    """Decides the tier (drafted tokens a round) from the counts of verified rounds.

    It depends on nothing else but its construction, so that devices which report the same rounds
    take the same decisions.
    """

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """Every tier the policy may choose, ascending."""

    @property
    def current_steps(self) -> int:
        """The tier of the latest decision; at first the one to start with, which may be 0."""

    def steps_for_batch(self, batch_size: int) -> int:
        """The tier for the next round of ``batch_size`` rows; asking changes nothing."""

    def on_verify_complete(
        self, num_accepted_drafts: Sequence[int], *, executed_steps: int, batch_size: int
    ) -> bool:
        """Take in one round, which need not be of the current tier; whether the batch's changed."""

    def describe(self) -> dict[str, Any]:
        """The policy's figures for server information, as JSON values."""


def check_counts(num_accepted_drafts: Sequence[int], executed_steps: int) -> None:
    """Refuse counts that a round of ``executed_steps`` drafts cannot have."""
    if not 0 <= min(num_accepted_drafts) <= max(num_accepted_drafts) <= executed_steps:
        raise ValueError(
            f"num_accepted_drafts={num_accepted_drafts} must be within 0 and "
            f"executed_steps={executed_steps}"
        )


@dataclass
class TierCounts:
    """Reported rounds of one tier, and the drafts of their live rows."""

    rounds: int = 0
    proposed_drafts: int = 0
    accepted_drafts: int = 0


class AdaptiveController:
    """Holds the runtime state of every tier and gives the worker the one its policy asks for.

    A worker calls :meth:`init_states` before its first round, and then

    - :meth:`on_verify_complete` with the counts alone behind every verify, which changes the
      worker's state at once where the policy says so; or
    - if it dispatches rounds before earlier ones are read, :meth:`activate_for_batch` before every
      dispatch and :meth:`on_verify_complete` with the tier and the batch that the round ran with.

    Args:
        worker: whose tier changes.
        policy: decides; by default the EMA policy from the worker's ``speculative_num_steps`` on.
        draft_tokens: gives the rows of a verify for a tier; a chain has one more than its steps.
        config_path: of the default policy, for :func:`specjax.adaptive.load_adaptive_config`.

    Raises:
        ValueError: ``policy`` is not a policy, or both it and ``config_path`` are given.

    Attributes:
        params: the policy, under SGLang's name.
    """

    def __init__(
        self,
        worker: AdaptiveSpecWorker[Any],
        policy: AdaptiveSpecPolicy | None = None,
        draft_tokens: Callable[[int], int] = lambda steps: steps + 1,
        *,
        config_path: ConfigSource = None,
    ) -> None:
        if policy is None:
            policy = AdaptiveSpeculativeParams(worker.speculative_num_steps, config_path)
        elif config_path is not None:
            raise ValueError(f"{policy=} excludes {config_path=}; pass one of them")
        elif isinstance(policy, type) or not hasattr(policy, "on_verify_complete"):
            raise ValueError(f"{policy=} is not a policy; pass a configuration as config_path")
        self.worker = worker
        self.policy = self.params = policy
        self.switches = 0
        # all of them from the start, since other threads read the figures
        self.tiers = {steps: TierCounts() for steps in policy.candidate_steps}
        self._ema = 0.0
        self._draft_tokens = draft_tokens
        self._states: dict[int, TierState] = {}

    def register(self, state: TierState) -> None:
        """Add a state that was built elsewhere; refused if its tier is no candidate or has one."""
        steps = state.speculative_num_steps
        self._check_candidate("speculative_num_steps", steps)
        if steps in self._states:
            raise ValueError(f"speculative_num_steps={steps} is registered twice")
        self._states[steps] = state

    def init_states(self) -> None:
        """Build the states of all candidates that have none, and apply that of the first tier."""
        for steps in sorted(self.tiers.keys() - self._states):
            state = self.worker.build_adaptive_runtime_state(
                speculative_num_steps=steps, speculative_num_draft_tokens=self._draft_tokens(steps)
            )
            if state.speculative_num_steps != steps:
                raise ValueError(
                    f"the worker built speculative_num_steps={state.speculative_num_steps} "
                    f"where {steps} was asked for"
                )
            self._states[steps] = state
        first = self.policy.current_steps
        # whatever the worker runs now may not be the state that is registered
        self.worker.apply_runtime_state(self._states[first])
        logger.info(
            "adaptive decoding: policy %s, candidate steps %s, first tier %d",
            self.policy.describe().get("policy", type(self.policy).__name__),
            list(self.policy.candidate_steps),
            first,
        )

    def on_verify_complete(
        self,
        num_accepted_drafts: Sequence[int],
        *,
        executed_steps: int | None = None,
        batch_size: int | None = None,
    ) -> bool:
        """Take in one verified round; whether the policy moved for that batch.

        With the counts alone the round is one of the worker's present tier, of as many rows, and
        the worker has its new state when this returns. Otherwise ``executed_steps`` is the tier
        that it ran with, and ``batch_size`` its rows, padding included.

        Counts are the accepted drafts of each live row, without the bonus token; zeros for a plain
        round. Nothing happens without live rows. ValueError for a count outside of 0 to
        ``executed_steps``, a tier that is no candidate, or one keyword without the other.
        """
        if (executed_steps is None) != (batch_size is None):
            raise ValueError(f"{executed_steps=} and {batch_size=}: give both or none")
        counts = [int(count) for count in num_accepted_drafts]
        rows, accepted = len(counts), sum(counts)
        if not rows:
            return False
        applies_at_once = executed_steps is None
        if executed_steps is None or batch_size is None:
            executed_steps, batch_size = self.worker.speculative_num_steps, rows
        check_counts(counts, executed_steps)
        self._check_candidate("executed_steps", executed_steps)
        ran = {"executed_steps": executed_steps, "batch_size": batch_size}
        has_moved = self.policy.on_verify_complete(counts, **ran)
        tier = self.tiers[executed_steps]
        tier.rounds += 1
        tier.proposed_drafts += (self._draft_tokens(executed_steps) - 1) * rows
        tier.accepted_drafts += accepted
        if executed_steps > 0:
            self._ema += EMA_ALPHA * (accepted / rows - self._ema)
        if applies_at_once:
            self.activate_for_batch(batch_size)
        return has_moved

    def _check_candidate(self, name: str, steps: int) -> None:
        if steps not in self.tiers:
            raise ValueError(
                f"{name}={steps} is not in candidate_steps={self.policy.candidate_steps}"
            )

    def activate_for_batch(self, batch_size: int) -> TierState:
        """Give the worker the state for its next round of ``batch_size`` rows with padding."""
        steps = self.policy.steps_for_batch(batch_size)
        if steps not in self._states:
            raise ValueError(f"speculative_num_steps={steps} has no state; call init_states()")
        before = self.worker.speculative_num_steps
        if before != steps:
            self.worker.apply_runtime_state(self._states[steps])
            self.switches += 1
            logger.info("speculative_num_steps %d -> %d", before, steps)
        return self._states[steps]

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
            "speculative_num_steps": self.worker.speculative_num_steps,
            "candidate_steps": list(self.policy.candidate_steps),
            "switches": self.switches,
            "ema_accept_len": self.ema_accept_len,
            "num_verify_rounds": sum(t.rounds for steps, t in self.tiers.items() if steps > 0),
            "wasted_drafts": self.wasted_drafts,
            "tiers": {
                str(steps): asdict(tier) for steps, tier in self.tiers.items() if tier.rounds
            },
            **self.policy.describe(),
        }

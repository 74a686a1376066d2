"""The pool of compiled tiers, and which of them runs next."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specjax.adaptive.policy import AdaptiveSpecPolicy
from specjax.checks import check_integer

logger = logging.getLogger(__name__)

EMA_ALPHA = 0.2


@dataclass(frozen=True, kw_only=True, eq=False)
class SpecRuntimeState:
    """Everything that a round of one tier runs with; a switch replaces it as a whole.

    The stages are compiled functions in the worker's own form, ``None`` where the worker has none.

    Args:
        speculative_num_steps: drafted levels; 0 for plain decoding.
        speculative_num_draft_tokens: rows of one verify, the root included.
        topk: branches of a level.
        draft: the draft stage.
        verify: the verify stage.
        extend: the extend stage.
        round: the three in one.
    """

    speculative_num_steps: int
    speculative_num_draft_tokens: int
    topk: int = 1
    draft: Any = None
    verify: Any = None
    extend: Any = None
    round: Any = None

    def __post_init__(self) -> None:
        check_integer("speculative_num_steps", self.speculative_num_steps, at_least=0)
        check_integer("speculative_num_draft_tokens", self.speculative_num_draft_tokens, at_least=1)
        check_integer("topk", self.topk, at_least=1)


class AdaptiveSpecWorker(Protocol):
    """A worker whose tier can change between rounds."""

    @property
    def speculative_num_steps(self) -> int:
        """The tier of the rounds to come."""

    def build_adaptive_runtime_state(self, steps: int, draft_tokens: int) -> SpecRuntimeState:
        """What a tier of ``steps`` and ``draft_tokens`` rows runs with."""

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        """Run the rounds to come with ``state``; rounds in flight keep theirs."""


@dataclass
class TierCounts:
    """Reported rounds of one tier, and the drafts of their live rows."""

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0


def chain_draft_tokens(steps: int) -> int:
    """Rows of a verify of a chain: the root and one for each draft."""
    return steps + 1


class AdaptiveController:
    """Holds the runtime state of every tier and gives the worker the one its policy asks for.

    Args:
        worker: runs the rounds.
        policy: chooses the tier.
        draft_tokens: rows of a verify for a tier.
    """

    def __init__(
        self,
        worker: AdaptiveSpecWorker,
        policy: AdaptiveSpecPolicy,
        draft_tokens: Callable[[int], int] = chain_draft_tokens,
    ) -> None:
        self.worker = worker
        self.policy = policy
        self.switches = 0
        # all of them from the start, since other threads read the figures
        self.tiers = {steps: TierCounts() for steps in policy.candidate_steps}
        self._ema = 0.0
        self._draft_tokens = draft_tokens
        self._states: dict[int, SpecRuntimeState] = {}

    def register(self, state: SpecRuntimeState) -> None:
        """Add a state that was built elsewhere.

        Raises:
            ValueError: if its tier is no candidate or has a state.
        """
        steps = state.speculative_num_steps
        if steps not in self.policy.candidate_steps:
            raise ValueError(
                f"speculative_num_steps={steps} is not in "
                f"candidate_steps={self.policy.candidate_steps}"
            )
        if steps in self._states:
            raise ValueError(f"speculative_num_steps={steps} is registered twice")
        self._states[steps] = state

    def init_states(self) -> None:
        """Build the states of all candidates that have none, and give the worker its first tier.

        To be called before the first request.

        Raises:
            ValueError: if the worker builds a state of another tier.
        """
        for steps in self.policy.candidate_steps:
            if steps in self._states:
                continue
            state = self.worker.build_adaptive_runtime_state(steps, self._draft_tokens(steps))
            if state.speculative_num_steps != steps:
                raise ValueError(
                    f"the worker built speculative_num_steps={state.speculative_num_steps} "
                    f"where {steps} was asked for"
                )
            self._states[steps] = state
        first = self.policy.current_steps
        if self.worker.speculative_num_steps != first:
            self.worker.apply_runtime_state(self._states[first])

    def on_verify_complete(
        self, num_accepted_drafts: Sequence[int], *, executed_steps: int, batch_size: int
    ) -> bool:
        """Take in one round that was read back; whether the policy moved for that batch.

        The worker changes at the next :meth:`activate_for_batch`.

        Args:
            num_accepted_drafts: accepted drafts of each live row, without the bonus token; zeros
                for a plain round. Nothing happens without live rows.
            executed_steps: the tier that the round ran with.
            batch_size: rows of the round.

        Raises:
            ValueError: for a count outside of 0 to ``executed_steps``.
        """
        if not num_accepted_drafts:
            return False
        if not 0 <= min(num_accepted_drafts) <= max(num_accepted_drafts) <= executed_steps:
            raise ValueError(
                f"num_accepted_drafts={num_accepted_drafts} must be within 0 and "
                f"executed_steps={executed_steps}"
            )
        tier = self.tiers[executed_steps]
        tier.rounds += 1
        tier.proposed += executed_steps * len(num_accepted_drafts)
        tier.accepted += sum(num_accepted_drafts)
        if executed_steps > 0:
            mean = sum(num_accepted_drafts) / len(num_accepted_drafts)
            self._ema += EMA_ALPHA * (mean - self._ema)
        return self.policy.on_verify_complete(
            num_accepted_drafts, executed_steps=executed_steps, batch_size=batch_size
        )

    def activate_for_batch(self, batch_size: int) -> SpecRuntimeState:
        """Give the worker the state for its next round, unless it runs that tier already.

        Raises:
            ValueError: if the tier has no state.
        """
        steps = self.policy.steps_for_batch(batch_size)
        state = self._states.get(steps)
        if state is None:
            raise ValueError(
                f"speculative_num_steps={steps} has no runtime state; registered: "
                f"{sorted(self._states)}; call init_states() before the first round"
            )
        before = self.worker.speculative_num_steps
        if before != steps:
            logger.debug("speculative_num_steps %d -> %d", before, steps)
            self.worker.apply_runtime_state(state)
            self.switches += 1
        return state

    @property
    def ema_accept_len(self) -> float:
        """Accepted drafts of a row and verify, bonus token left out: the policy's average, if it
        keeps one, else that of all verifies."""
        return float(getattr(self.policy, "ema_accept_len", self._ema))

    @property
    def num_verify_rounds(self) -> int:
        """Reported rounds that verified drafts; plain rounds are none."""
        return sum(tier.rounds for steps, tier in self.tiers.items() if steps > 0)

    @property
    def wasted_drafts(self) -> int:
        """Drafts proposed and not accepted."""
        return sum(tier.proposed - tier.accepted for tier in self.tiers.values())

    def describe(self) -> dict[str, Any]:
        """Figures for server information, as JSON values."""
        return {
            "speculative_num_steps": self.worker.speculative_num_steps,
            "candidate_steps": list(self.policy.candidate_steps),
            "switches": self.switches,
            "ema_accept_len": self.ema_accept_len,
            "num_verify_rounds": self.num_verify_rounds,
            "wasted_drafts": self.wasted_drafts,
            "tiers": {
                str(steps): {
                    "rounds": tier.rounds,
                    "proposed_drafts": tier.proposed,
                    "accepted_drafts": tier.accepted,
                }
                for steps, tier in sorted(self.tiers.items())
                if tier.rounds
            },
            **self.policy.describe(),
        }

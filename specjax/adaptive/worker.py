"""Switch a worker of another engine between the states of tiers, under SGLang's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from specjax.adaptive.config import ConfigSource
from specjax.adaptive.controller import AdaptiveSpecPolicy, TierController
from specjax.adaptive.ema import AdaptiveSpeculativeParams
from specjax.adaptive.survival import NO_RECORD, RoundRecord
from specjax.types import DraftShape


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


class AdaptiveController(TierController):
    """A controller that applies a worker's state of each tier.

    The worker calls :meth:`init_states` first. If it reads each round before it dispatches the
    next, it may leave out :meth:`activate_for_batch`.

    Args:
        worker: the worker whose state changes, if any.
        policy: by default the EMA policy, starting from the worker's ``speculative_num_steps``.
        config_path: configuration of the default policy, as for ``load_adaptive_config``.

    Raises:
        ValueError: if ``policy`` is not a policy, or both it and ``config_path`` are given.
    """

    def __init__(
        self,
        worker: AdaptiveSpecWorker[Any] | None,
        policy: AdaptiveSpecPolicy | None = None,
        *,
        config_path: ConfigSource = None,
    ) -> None:
        if policy is None:
            initial_steps = 0 if worker is None else worker.speculative_num_steps
            policy = AdaptiveSpeculativeParams(initial_steps, config_path)
        elif config_path is not None:
            raise ValueError(f"{policy=} and {config_path=} cannot be combined; pass only one")
        super().__init__(policy)
        self.worker = worker
        self._states: dict[DraftShape, Any] = {}

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
        """Record one verified round, as :meth:`TierController.on_verify_complete` does.

        If ``tier`` and ``batch_size`` are left out, the round ran in the current tier with one row
        per count, and the state of the next tier is applied before the call returns. Raises
        ValueError also for one of the two without the other.
        """
        if (tier is None) != (batch_size is None):
            raise ValueError(f"{tier=} and {batch_size=} must be given together, or not at all")
        size = len(num_accepted_drafts) if batch_size is None else batch_size
        has_moved = super().on_verify_complete(
            num_accepted_drafts, tier=tier or self.tier, batch_size=size, record=record
        )
        if tier is None and size:
            self.activate_for_batch(size)
        return has_moved

    def activate_for_batch(self, batch_size: int, record: RoundRecord = NO_RECORD) -> DraftShape:
        """Return the tier for the next round of ``batch_size`` rows, and apply its state.

        Raises ValueError if the worker has no state for the tier.
        """
        if self.worker is not None:
            tier = self.policy.tier_for_batch(batch_size, record)
            if tier not in self._states:
                raise ValueError(f"{tier=} has no state; call init_states()")
            if tier != self.tier:
                self.worker.apply_runtime_state(self._states[tier])
        return super().activate_for_batch(batch_size, record)

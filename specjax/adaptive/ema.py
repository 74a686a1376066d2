"""The EMA policy: draft one step more than batches accept on average.

The rule and its defaults follow SGLang's adaptive ``speculative_num_steps`` (change #21599). Step
0, which turns speculation off, follows SGLang's change #24055; the back-off between probes is new.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specjax.adaptive.config import AdaptiveSlot, ConfigSource, load_adaptive_config, nearest
from specjax.adaptive.controller import AdaptiveSpecPolicy
from specjax.adaptive.survival import NO_RECORD, RoundRecord
from specjax.types import DraftShape


@dataclass
class EmaState:
    """The state of the policy for one slot.

    ``waited`` and ``probe_wait`` count decisions at step 0, one every ``update_interval`` batches.
    ``is_probing`` is true from the decision that leaves step 0 until the next decision.
    """

    slot: AdaptiveSlot
    tier: DraftShape
    ema: float  # accepted drafts per row, without the bonus token
    count: int = 0  # non-empty batches
    waited: int = 0
    probe_wait: int = 1
    is_probing: bool = False

    def update(self, num_accepted_drafts: Sequence[int]) -> None:
        """Record one batch that ran in ``tier``; at step 0, the counts are ignored."""
        if not num_accepted_drafts:
            return
        if min(num_accepted_drafts) < 0:
            raise ValueError(f"num_accepted_drafts={num_accepted_drafts} must not be negative")
        slot = self.slot
        if self.tier.steps > 0:
            mean = sum(num_accepted_drafts) / len(num_accepted_drafts)
            self.ema = (1.0 - slot.ema_alpha) * self.ema + slot.ema_alpha * mean
        self.count += 1
        since = self.count - slot.warmup_batches
        if since > 0 and since % slot.update_interval == 0:
            if self.tier.steps > 0:
                self._decide()
            else:
                self._wait_or_probe()

    def _decide(self) -> None:
        slot, ema = self.slot, self.ema
        lower = [tier for tier in slot.tiers if tier < self.tier]
        higher = slot.tiers[len(lower) :]
        # the average is never below 0, so step 0 uses the threshold of step 1
        down = [t for t in lower if ema <= max(t.depth, 1) - 0.5 + slot.down_hysteresis]
        up = [t for t in higher if ema <= t.depth - 0.5 + slot.up_hysteresis]
        self.tier = (*down, *up, slot.tiers[-1])[0]
        wait = 1
        if self.tier.steps == 0:
            self.waited = 0
            if self.is_probing:
                most = max(1, slot.max_probe_interval // slot.update_interval)
                wait = min(2 * self.probe_wait, most)
        self.probe_wait, self.is_probing = wait, False

    def _wait_or_probe(self) -> None:
        self.waited += 1
        if len(self.slot.tiers) > 1 and self.waited >= self.probe_wait:
            self.tier, self.waited, self.is_probing = self.slot.tiers[1], 0, True
            if self.ema < 0:  # nothing measured yet, because the slot started at step 0
                self.ema = float(self.tier.depth - 1)


class AdaptiveSpeculativeParams(AdaptiveSpecPolicy):
    """The EMA policy, with one :class:`EmaState` per batch-size slot.

    After ``warmup_batches`` non-empty batches, and then every ``update_interval`` batches, the tier
    moves towards ``round(ema) + 1``. docs/adaptive_decoding.md has the rule for step 0. Each slot
    starts with the candidate nearest to ``initial_steps``. ``config`` is passed to
    :func:`specjax.adaptive.load_adaptive_config`. Tiers are chains by default.
    """

    def __init__(
        self, initial_steps: int, config: ConfigSource = None, tiers: Iterable[DraftShape] = ()
    ) -> None:
        self.config = load_adaptive_config(config).resolve("ema", tiers)
        self.tiers = self.config.tiers
        self.candidate_steps = self.config.candidate_steps
        initial = [(slot, nearest(slot.tiers, initial_steps)) for slot in self.config.slots]
        self._states = [EmaState(slot, tier, ema=float(tier.depth - 1)) for slot, tier in initial]
        self._active = 0

    @property
    def state(self) -> EmaState:
        """The state of the slot that reported last; before any report, that of the first slot."""
        return self._states[self._active]

    @property
    def tier(self) -> DraftShape:
        """The tier of the slot that reported last."""
        return self.state.tier

    @property
    def current_steps(self) -> int:
        return self.tier.steps

    @property
    def ema_accept_len(self) -> float:
        """Average accepted drafts per row in that slot, without the bonus token."""
        return max(0.0, self.state.ema)  # negative if a slot started at step 0 without a probe yet

    def tier_for_batch(self, batch_size: int, record: RoundRecord = NO_RECORD) -> DraftShape:
        return self._states[self.config.slot_index(batch_size)].tier

    def update(self, num_accepted_drafts: Sequence[int], batch_size: int | None = None) -> bool:
        """Record one batch that ran in the current tier; return whether the tier changed.

        Without ``batch_size``, it counts for the slot that reported last. An empty batch changes
        nothing. Raises ValueError for negative counts.
        """
        if batch_size is not None:
            self._active = self.config.slot_index(batch_size)
        before = self.tier
        self.state.update(num_accepted_drafts)
        return self.tier != before

    def on_verify_complete(
        self,
        num_accepted_drafts: Sequence[int],
        *,
        tier: DraftShape,
        batch_size: int,
        record: RoundRecord = NO_RECORD,
    ) -> bool:
        """Do the same as :meth:`update`, but ignore rounds that ran in another tier."""
        if tier != self.tier_for_batch(batch_size):
            return False
        return self.update(num_accepted_drafts, batch_size)

    def describe(self) -> dict[str, Any]:
        return {
            "policy": "ema",
            "ema_accept_len": self.ema_accept_len,
            "slots": {
                str(state.slot.min_batch_size): {
                    "steps": state.tier.steps,
                    "candidate_steps": list(state.slot.candidate_steps),
                    "ema_accept_len": max(0.0, state.ema),
                }
                for state in self._states
            },
        }

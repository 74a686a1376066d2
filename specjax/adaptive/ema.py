"""The EMA policy: one step deeper than what batches accept on average.

The rule and its defaults are those of SGLang's adaptive ``speculative_num_steps`` (change #21599);
step 0, which turns speculation off, follows its later change #24055, with a back-off of probes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specjax.adaptive.config import AdaptiveSlot, ConfigSource, load_adaptive_config, nearest
from specjax.types import DraftShape


@dataclass(frozen=True)
class EmaState:
    """What the policy remembers of one slot.

    ``waited`` and ``probe_wait`` count decisions (every ``update_interval`` batches) at step 0;
    ``is_probing`` holds from the decision that leaves step 0 to the next one.
    """

    tier: DraftShape
    ema: float  # accepted drafts of a row, without the bonus token
    count: int = 0  # non-empty batches
    waited: int = 0
    probe_wait: int = 1
    is_probing: bool = False


def update_ema(slot: AdaptiveSlot, state: EmaState, num_accepted_drafts: Sequence[int]) -> EmaState:
    """The state after one batch with ``state.tier``; at step 0 counts do not matter."""
    if not num_accepted_drafts:
        return state
    if min(num_accepted_drafts) < 0:
        raise ValueError(f"num_accepted_drafts={num_accepted_drafts} holds a negative count")
    ema = state.ema
    if state.tier.steps > 0:
        mean = sum(num_accepted_drafts) / len(num_accepted_drafts)
        ema = (1.0 - slot.ema_alpha) * ema + slot.ema_alpha * mean
    state = replace(state, ema=ema, count=state.count + 1)
    since = state.count - slot.warmup_batches
    if since <= 0 or since % slot.update_interval:
        return state
    return _wait_or_probe(slot, state) if state.tier.steps == 0 else _decide(slot, state)


def _decide(slot: AdaptiveSlot, state: EmaState) -> EmaState:
    lower = [tier for tier in slot.tiers if tier < state.tier]
    higher = slot.tiers[len(lower) :]
    # no average is below 0, so step 0 has the threshold of step 1
    down = [t for t in lower if state.ema <= max(t.depth, 1) - 0.5 + slot.down_hysteresis]
    up = [t for t in higher if state.ema <= t.depth - 0.5 + slot.up_hysteresis]
    tier = (*down, *up, slot.tiers[-1])[0]
    if tier.steps > 0:
        return replace(state, tier=tier, probe_wait=1, is_probing=False)
    most = max(1, slot.max_probe_interval // slot.update_interval)
    wait = min(2 * state.probe_wait, most) if state.is_probing else 1
    return replace(state, tier=tier, waited=0, probe_wait=wait, is_probing=False)


def _wait_or_probe(slot: AdaptiveSlot, state: EmaState) -> EmaState:
    waited = state.waited + 1
    if len(slot.tiers) == 1 or waited < state.probe_wait:
        return replace(state, waited=waited)
    tier = slot.tiers[1]
    # an average below 0 was never measured: the slot started with speculation off
    ema = state.ema if state.ema >= 0 else float(tier.depth - 1)
    return replace(state, tier=tier, ema=ema, waited=0, is_probing=True)


class AdaptiveSpeculativeParams:
    """Owner of the EMA policy's state, one :class:`EmaState` for each batch-size slot.

    After ``warmup_batches`` non-empty batches, and every ``update_interval`` from there on, the
    tier moves towards ``round(ema) + 1``; docs/adaptive_decoding.md has the rule of step 0.
    ``initial_steps`` is the tier to start with, moved to the nearest candidate of each slot;
    ``config`` goes to :func:`specjax.adaptive.load_adaptive_config`. Tiers are chains by default.
    """

    def __init__(
        self, initial_steps: int, config: ConfigSource = None, tiers: Iterable[DraftShape] = ()
    ) -> None:
        self.config = load_adaptive_config(config).resolve("ema", tiers)
        self.tiers = self.config.tiers
        self.candidate_steps = self.config.candidate_steps
        first = [nearest(slot.tiers, initial_steps) for slot in self.config.slots]
        self._states = [EmaState(tier, ema=float(tier.depth - 1)) for tier in first]
        self._active = 0

    @property
    def state(self) -> EmaState:
        """The state of the slot that reported last; of the smallest slot before any report."""
        return self._states[self._active]

    @property
    def tier(self) -> DraftShape:
        """The tier of the slot that reported last."""
        return self.state.tier

    @property
    def current_steps(self) -> int:
        """Its steps, under SGLang's name."""
        return self.tier.steps

    @property
    def ema_accept_len(self) -> float:
        """Average accepted drafts of a row, without the bonus token, in that slot."""
        return max(0.0, self.state.ema)  # below 0 before a slot at step 0 has measured any

    def tier_for_batch(self, batch_size: int) -> DraftShape:
        return self._states[self.config.slot_index(batch_size)].tier

    def update(self, num_accepted_drafts: Sequence[int], batch_size: int | None = None) -> bool:
        """Take in one batch that ran with the current tier; whether the tier changed.

        Without ``batch_size`` it counts for the slot that reported last. An empty one changes
        nothing, a negative count is refused.
        """
        if batch_size is not None:
            self._active = self.config.slot_index(batch_size)
        before = self.state
        after = update_ema(self.config.slots[self._active], before, num_accepted_drafts)
        self._states[self._active] = after
        return after.tier != before.tier

    def on_verify_complete(
        self, num_accepted_drafts: Sequence[int], *, tier: DraftShape, batch_size: int
    ) -> bool:
        """As :meth:`update`; results of a round that ran with another tier are left out."""
        if tier != self.tier_for_batch(batch_size):
            return False
        return self.update(num_accepted_drafts, batch_size)

    def describe(self) -> dict[str, Any]:
        return {
            "policy": "ema",
            "ema_accept_len": self.ema_accept_len,
            "slots": {
                str(slot.min_batch_size): {
                    "steps": state.tier.steps,
                    "candidate_steps": list(slot.candidate_steps),
                    "ema_accept_len": max(0.0, state.ema),
                }
                for slot, state in zip(self.config.slots, self._states, strict=True)
            },
        }

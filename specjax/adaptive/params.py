"""The EMA policy: one step deeper than what batches accept on average.

The rule and its defaults are those of SGLang's adaptive ``speculative_num_steps`` (change #21599);
step 0, which turns speculation off, follows its later change #24055, with a back-off of probes.
A decision is a function of a frozen state and the reported counts, so that devices which see the
same counts take the same decision.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specjax.adaptive.config import (
    AdaptiveConfig,
    AdaptiveSlot,
    load_adaptive_config,
)
from specjax.checks import check_integer


@dataclass(frozen=True)
class EmaState:
    """What the policy remembers of one slot.

    ``waited`` and ``probe_wait`` count decisions (every ``update_interval`` batches) at step 0;
    ``is_probing`` holds from the decision that leaves step 0 to the next one.
    """

    current_steps: int
    ema: float  # accepted drafts of a row, without the bonus token
    count: int = 0  # non-empty batches
    waited: int = 0
    probe_wait: int = 1
    is_probing: bool = False


def initial_ema_state(slot: AdaptiveSlot, initial_steps: int) -> EmaState:
    """The state before any batch: the candidate nearest to ``initial_steps``, the larger of two."""
    check_integer("initial_steps", initial_steps, at_least=0)
    steps = min(_candidates(slot), key=lambda c: (abs(c - initial_steps), -c))
    return EmaState(current_steps=steps, ema=float(steps - 1))


def update_ema(slot: AdaptiveSlot, state: EmaState, num_accepted_drafts: Sequence[int]) -> EmaState:
    """The state after one batch run with ``state.current_steps``.

    Args:
        slot: the resolved configuration of the slot.
        state: the state before.
        num_accepted_drafts: one count for each live row; an empty batch changes nothing. At step 0
            the counts are not read, but the round brings the next probe nearer.

    Raises:
        ValueError: for a negative count.
    """
    if not num_accepted_drafts:
        return state
    if min(num_accepted_drafts) < 0:
        raise ValueError(f"num_accepted_drafts={num_accepted_drafts} holds a negative count")
    ema = state.ema
    if state.current_steps > 0:
        mean = sum(num_accepted_drafts) / len(num_accepted_drafts)
        ema = (1.0 - slot.ema_alpha) * ema + slot.ema_alpha * mean
    count = state.count + 1
    state = replace(state, ema=ema, count=count)
    if count <= slot.warmup_batches or (count - slot.warmup_batches) % slot.update_interval:
        return state
    return _wait_or_probe(slot, state) if state.current_steps == 0 else _decide(slot, state)


def _decide(slot: AdaptiveSlot, state: EmaState) -> EmaState:
    candidates = _candidates(slot)
    start = index = candidates.index(state.current_steps)
    while index > 0 and state.ema <= _down_threshold(slot, candidates[index - 1]):
        index -= 1
    if index == start:
        last = len(candidates) - 1
        while index < last and state.ema > candidates[index] - 0.5 + slot.up_hysteresis:
            index += 1
    steps = candidates[index]
    if steps == 0:
        most = max(1, slot.max_probe_interval // slot.update_interval)
        wait = min(2 * state.probe_wait, most) if state.is_probing else 1
        return replace(state, current_steps=0, waited=0, probe_wait=wait, is_probing=False)
    return replace(state, current_steps=steps, probe_wait=1, is_probing=False)


def _down_threshold(slot: AdaptiveSlot, steps: int) -> float:
    """Largest average that moves down to ``steps``; no average is below 0, so 0 has its own."""
    return (0.5 if steps == 0 else steps - 0.5) + slot.down_hysteresis


def _wait_or_probe(slot: AdaptiveSlot, state: EmaState) -> EmaState:
    candidates = _candidates(slot)
    waited = state.waited + 1
    if len(candidates) == 1 or waited < state.probe_wait:
        return replace(state, waited=waited)
    steps = candidates[1]
    # an average below 0 was never measured: the slot started with speculation off
    ema = state.ema if state.ema >= 0 else float(steps - 1)
    return replace(state, current_steps=steps, ema=ema, waited=0, is_probing=True)


def _candidates(slot: AdaptiveSlot) -> tuple[int, ...]:
    if slot.candidate_steps is None:
        raise ValueError("candidate_steps=None; resolve the configuration for a policy first")
    return slot.candidate_steps


class AdaptiveSpeculativeParams:
    """Owner of the EMA policy's state, one :class:`EmaState` for each batch-size slot.

    After ``warmup_batches`` non-empty batches, and every ``update_interval`` from there on, the
    tier moves towards ``round(ema) + 1``, through several candidates at once if need be. A slot
    whose candidates begin with 0 turns speculation off where ``ema <= 0.5 + down_hysteresis``;
    from 0 it tries the next candidate after ``update_interval`` rounds, and after twice as many
    with each try that fails, up to ``max_probe_interval``. One try lasts ``update_interval``
    rounds, so that at the limit, with the defaults, tries are 1.5 % of the rounds.

    Args:
        initial_steps: the tier to start with, moved to the nearest candidate of each slot.
        config: a mapping, a path or a loaded configuration; see :func:`load_adaptive_config`.

    Raises:
        ValueError: naming the key and value that is wrong.
    """

    def __init__(
        self,
        initial_steps: int,
        config: "AdaptiveConfig | Mapping[str, Any] | str | os.PathLike[str] | None" = None,
    ) -> None:
        self.config = load_adaptive_config(config).resolve("ema")
        self._states = [initial_ema_state(slot, initial_steps) for slot in self.config.slots]
        self._active = 0

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """The tiers of all slots, ascending."""
        return self.config.candidate_steps

    @property
    def state(self) -> EmaState:
        """The state of the slot that reported last; of the smallest slot before any report."""
        return self._states[self._active]

    @property
    def current_steps(self) -> int:
        """The tier of the slot that reported last."""
        return self.state.current_steps

    @property
    def ema_accept_len(self) -> float:
        """Average accepted drafts of a row, without the bonus token, in that slot."""
        return max(0.0, self.state.ema)  # below 0 before a slot at step 0 has measured any

    def steps_for_batch(self, batch_size: int) -> int:
        """The tier for the next round of ``batch_size`` rows."""
        return self._states[self.config.slot_index(batch_size)].current_steps

    def update(self, num_accepted_drafts: Sequence[int], batch_size: int | None = None) -> bool:
        """Take in one batch that ran with the current tier; whether the tier changed.

        Args:
            num_accepted_drafts: accepted drafts of each live row, without the bonus token.
            batch_size: chooses the slot; the one that reported last without it.
        """
        if batch_size is not None:
            self._active = self.config.slot_index(batch_size)
        before = self.state
        after = update_ema(self.config.slots[self._active], before, num_accepted_drafts)
        self._states[self._active] = after
        return after.current_steps != before.current_steps

    def on_verify_complete(
        self, num_accepted_drafts: Sequence[int], *, executed_steps: int, batch_size: int
    ) -> bool:
        """As :meth:`update`; results of a round that ran with another tier are left out."""
        if executed_steps != self.steps_for_batch(batch_size):
            return False
        return self.update(num_accepted_drafts, batch_size)

    def describe(self) -> dict[str, Any]:
        """The policy's figures for server information."""
        return {
            "policy": "ema",
            "ema_accept_len": self.ema_accept_len,
            "slots": {
                str(slot.min_batch_size): {
                    "steps": state.current_steps,
                    "candidate_steps": list(_candidates(slot)),
                    "ema_accept_len": state.ema,
                }
                for slot, state in zip(self.config.slots, self._states, strict=True)
            },
        }

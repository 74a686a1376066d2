"""The cost-aware decision: the tier of the most expected tokens a second.

Every function is pure; :class:`specjax.adaptive.cost_policy.CostAwarePolicy` owns the state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specjax.adaptive.config import AdaptiveConfig, CostSettings
from specjax.adaptive.estimates import (
    AcceptanceEstimates,
    conditional_acceptance,
    expected_tokens,
    observe,
)
from specjax.adaptive.round_times import RoundTimes


@dataclass(frozen=True)
class CostModel:
    """What stays the same: a resolved configuration and the measured times of its tiers."""

    config: AdaptiveConfig
    times: RoundTimes

    def candidates(self, batch_size: int) -> tuple[int, ...]:
        """The tiers of the slot of ``batch_size``."""
        return self.config.slots[self.config.slot_index(batch_size)].candidate_steps or ()

    def rates(self, estimates: AcceptanceEstimates, batch_size: int) -> dict[int, float]:
        """Expected tokens a second of one row, for each tier of the slot."""
        acceptance = conditional_acceptance(estimates)
        return {
            steps: expected_tokens(acceptance, steps) / self.times.seconds(steps, batch_size)
            for steps in self.candidates(batch_size)
        }


@dataclass(frozen=True)
class CostState:
    """What the policy remembers between results."""

    estimates: AcceptanceEstimates
    steps: int  # the tier chosen at the last result
    bucket: int | None = None  # the batch bucket it was chosen for
    probe_steps: int | None = (
        None  # a deeper tier that runs instead until a result that loses to steps
    )
    waited: int = 0  # results since the last probe or change of tier
    probe_interval: int = 1  # results to wait
    debt: float = 0.0  # seconds that probes lost, less the share of the time they may lose
    deficit: float = 0.0  # seconds lost to plain decoding, less that share; negative is a credit


def choose(
    rates: Mapping[int, float], current: int, deficit: float, limit: float, hysteresis: float
) -> int:
    """The tier to run.

    Args:
        rates: estimated tokens a second for each candidate.
        current: the tier until now.
        deficit: seconds lost to plain decoding.
        limit: the deficit that turns speculation off.
        hysteresis: relative gain below which ``current`` stays, unless it loses to step 0.
    """
    if 0 in rates and (deficit > limit or (current == 0 and deficit > 0.0)):
        return 0
    best = max(rates, key=lambda steps: (rates[steps], -steps))
    if current not in rates or (0 in rates and rates[current] < rates[0]):
        return best
    return best if rates[best] > (1.0 + hysteresis) * rates[current] else current


def next_steps(model: CostModel, state: CostState, batch_size: int) -> int:
    """The tier for the next round of ``batch_size`` rows."""
    candidates = model.candidates(batch_size)
    if state.probe_steps in candidates:
        return state.probe_steps
    if state.steps in candidates and state.bucket == model.times.bucket(batch_size):
        return state.steps
    rates = model.rates(state.estimates, batch_size)
    return _choose(model, rates, state.steps, state.deficit, batch_size)


def update_cost(
    model: CostModel,
    state: CostState,
    num_accepted_drafts: Sequence[int],
    executed_steps: int,
    batch_size: int,
) -> CostState:
    """The state after one round, whichever tier it ran with.

    Args:
        model: configuration and times.
        state: the state before.
        num_accepted_drafts: one count for each live row; an empty round changes nothing.
        executed_steps: the tier that the round ran with; 0 for a plain round.
        batch_size: rows of the round.

    Raises:
        ValueError: for a count outside of 0 to ``executed_steps``, or a round without a time.
    """
    if not num_accepted_drafts:
        return state
    if not 0 <= min(num_accepted_drafts) <= max(num_accepted_drafts) <= executed_steps:
        raise ValueError(
            f"num_accepted_drafts={num_accepted_drafts} must be within 0 and "
            f"executed_steps={executed_steps}"
        )
    settings = model.config.cost
    estimates = observe(
        state.estimates, num_accepted_drafts, executed_steps, settings.acceptance_window
    )
    rates = model.rates(estimates, batch_size)
    tokens = 1.0 + sum(num_accepted_drafts) / len(num_accepted_drafts)
    seconds = model.times.seconds(executed_steps, batch_size)
    deficit = state.deficit
    if 0 in rates:
        plain = model.times.seconds(0, batch_size)
        lost = seconds - tokens * plain if executed_steps else -settings.probe_budget * plain
        deficit = max(deficit + lost, -settings.max_credit_rounds * plain)
    after = replace(
        state,
        estimates=estimates,
        steps=_choose(model, rates, state.steps, deficit, batch_size),
        bucket=model.times.bucket(batch_size),
        debt=_debt(state, rates, tokens, seconds, executed_steps, settings),
        deficit=deficit,
    )
    has_gained = tokens / seconds > rates.get(after.steps, 0.0)
    return _probe(settings, state, after, executed_steps, has_gained, model.candidates(batch_size))


def _choose(
    model: CostModel, rates: Mapping[int, float], current: int, deficit: float, batch_size: int
) -> int:
    settings = model.config.cost
    limit = settings.max_deficit_rounds * model.times.seconds(0, batch_size) if 0 in rates else 0.0
    return choose(rates, current, deficit, limit, settings.rate_hysteresis)


def _debt(
    state: CostState,
    rates: Mapping[int, float],
    tokens: float,
    seconds: float,
    executed_steps: int,
    settings: CostSettings,
) -> float:
    """Seconds that rounds deeper than the chosen tier lost to it, less their budget."""
    if executed_steps > state.steps and state.steps in rates:
        return max(0.0, state.debt + seconds - tokens / rates[state.steps])
    return max(0.0, state.debt - settings.probe_budget * seconds)


def _probe(
    settings: CostSettings,
    before: CostState,
    after: CostState,
    executed_steps: int,
    has_gained: bool,
    candidates: Sequence[int],
) -> CostState:
    """``after`` with a probe ended, begun, or brought nearer.

    A probe goes on while its results are better than what the chosen tier is expected to do.
    """
    if after.steps != before.steps:
        return replace(
            after, probe_steps=None, waited=0, probe_interval=settings.min_probe_interval
        )
    if before.probe_steps is not None:
        if before.probe_steps not in candidates:
            return replace(after, probe_steps=None, waited=0)
        if executed_steps != before.probe_steps or has_gained:
            return after
        interval = min(2 * before.probe_interval, settings.max_probe_interval)
        return replace(after, probe_steps=None, waited=0, probe_interval=interval)
    waited = before.waited + 1
    deeper = [steps for steps in candidates if steps > after.steps]
    may_lose = after.debt <= 0.0 and (after.steps > 0 or after.deficit <= 0.0)
    if waited < before.probe_interval or not deeper or not may_lose:
        return replace(after, waited=waited)
    return replace(after, probe_steps=deeper[0], waited=0)

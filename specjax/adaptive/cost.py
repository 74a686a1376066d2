"""The cost-aware decision: the tier of the most expected tokens a second.

Every function is pure; :class:`specjax.adaptive.cost_policy.CostAwarePolicy` owns the state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specjax.adaptive.config import AdaptiveConfig, CostSettings
from specjax.adaptive.estimates import (
    AcceptanceEstimates,
    conditional_acceptance,
    expected_tokens,
    observe,
    proven_acceptance,
)
from specjax.adaptive.round_times import RoundTimes

# Speculation that stopped at the limit of its losses may begin again when they are down to this
# share of it. Less makes one unlucky start long: with 0, 0.75 instead of 0.83 of the best tier's
# speed over 128 tokens in the worst tenth of runs (acceptance 0.7, round times of a 135M model).
RESUME_SHARE = 0.3
# Every so many failed probes, one looks further than at the next deeper tier.
PROBES_A_TURN = 8


@dataclass(frozen=True)
class CostModel:
    """What stays the same: a resolved configuration and the measured times of its tiers."""

    config: AdaptiveConfig
    times: RoundTimes
    # asked for several times a round, between two dispatches
    _candidates: dict[int, tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def candidates(self, batch_size: int) -> tuple[int, ...]:
        """The tiers of the slot of ``batch_size``."""
        found = self._candidates.get(batch_size)
        if found is None:
            found = self.config.slots[self.config.slot_index(batch_size)].candidate_steps or ()
            self._candidates[batch_size] = found
        return found

    def rates(self, acceptance: Sequence[float], batch_size: int) -> dict[int, float]:
        """Expected tokens a second of one row, for each tier of the slot.

        Args:
            acceptance: conditional acceptance of each drafted position.
            batch_size: rows of the round.
        """
        seconds = self.times.by_steps(batch_size)
        tokens = expected_tokens(acceptance)
        return {steps: tokens[steps] / seconds[steps] for steps in self.candidates(batch_size)}

    def proven_rates(
        self, estimates: AcceptanceEstimates, steps: int, batch_size: int
    ) -> dict[int, float]:
        """Rates in which tiers deeper than ``steps`` count for no more than they have shown.

        What may lie deeper is for probes to find out, whose losses are bounded: a tier that is
        chosen for acceptance nobody has seen would be chosen again and again.
        """
        return self.rates(proven_acceptance(estimates, steps), batch_size)


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
    failed_probes: int = 0  # since the last change of tier
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
    if 0 in rates and deficit > (limit if current else RESUME_SHARE * limit):
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
    rates = model.proven_rates(state.estimates, state.steps, batch_size)
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
    seconds = model.times.seconds(executed_steps, batch_size)
    estimates = observe(
        state.estimates, num_accepted_drafts, executed_steps, settings.acceptance_window
    )
    rates = model.proven_rates(estimates, state.steps, batch_size)
    tokens = 1.0 + sum(num_accepted_drafts) / len(num_accepted_drafts)
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
    if after.steps != state.steps:
        return _settled(model, state, after, batch_size)
    if after.probe_steps is None:
        return _awaiting_probe(model, after, batch_size)
    if after.probe_steps not in model.candidates(batch_size):
        return replace(after, probe_steps=None, waited=0)
    has_gained = tokens / seconds > rates.get(after.steps, 0.0)
    # a probe goes on while its results are better than what the chosen tier is expected to do
    if executed_steps != after.probe_steps or has_gained:
        return after
    return _failed_probe(settings, after)


def _settled(model: CostModel, before: CostState, after: CostState, batch_size: int) -> CostState:
    """``after`` with the wait for a probe behind a change of tier.

    A tier that has just proved itself may not be the last, so that a rise looks on at once.
    """
    interval = model.config.cost.min_probe_interval
    if after.steps > before.steps:
        hopes = _hopes(model, after, batch_size)
        if max(hopes, key=lambda steps: hopes[steps]) > after.steps:
            interval = 1
    return replace(after, probe_steps=None, waited=0, probe_interval=interval, failed_probes=0)


def _failed_probe(settings: CostSettings, state: CostState) -> CostState:
    """The state behind a probe that lost: the next one waits for twice as long."""
    interval = max(settings.min_probe_interval, 2 * state.probe_interval)
    return replace(
        state,
        probe_steps=None,
        waited=0,
        probe_interval=min(interval, settings.max_probe_interval),
        failed_probes=state.failed_probes + 1,
    )


def _awaiting_probe(model: CostModel, state: CostState, batch_size: int) -> CostState:
    """The state with a probe begun or brought nearer."""
    waited = state.waited + 1
    limit = RESUME_SHARE * _deficit_limit(model, batch_size)
    may_lose = state.debt <= 0.0 and (state.steps > 0 or state.deficit <= limit)
    if waited < state.probe_interval or not may_lose:
        return replace(state, waited=waited)
    target = _probe_target(model, state, batch_size)
    return replace(state, waited=waited if target is None else 0, probe_steps=target)


def _hopes(model: CostModel, state: CostState, batch_size: int) -> dict[int, float]:
    """Rates in which positions that nobody has seen accept as much as those before them."""
    return model.rates(conditional_acceptance(state.estimates), batch_size)


def _probe_target(model: CostModel, state: CostState, batch_size: int) -> int | None:
    """The deeper tier to try: at first the best one by hope, or else the next that could win.

    Now and then it is one deeper still: deep drafts may be accepted where shallow ones tell nothing
    of it, as in a batch of which some rows accept everything.
    """
    hopes = _hopes(model, state, batch_size)
    wanted = (1.0 + model.config.cost.rate_hysteresis) * hopes.get(state.steps, 0.0)
    possible = [
        steps
        for steps in model.candidates(batch_size)
        if steps > state.steps and (steps + 1) / model.times.seconds(steps, batch_size) > wanted
    ]
    if not possible:
        return None
    if state.failed_probes == 0:
        best = max(possible, key=lambda steps: (hopes[steps], -steps))
        return best if hopes[best] > wanted else possible[0]
    turn, rest = divmod(state.failed_probes, PROBES_A_TURN)
    return possible[turn % len(possible)] if rest == 0 else possible[0]


def _choose(
    model: CostModel, rates: Mapping[int, float], current: int, deficit: float, batch_size: int
) -> int:
    limit = _deficit_limit(model, batch_size)
    return choose(rates, current, deficit, limit, model.config.cost.rate_hysteresis)


def _deficit_limit(model: CostModel, batch_size: int) -> float:
    """Seconds that speculation may lose to plain decoding before it stops."""
    if 0 not in model.candidates(batch_size):
        return 0.0
    return model.config.cost.max_deficit_rounds * model.times.seconds(0, batch_size)


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

"""Throughput of the policies in the model of decoding of simulation.py."""

from itertools import pairwise

import pytest

from specjax.adaptive import AdaptiveSpeculativeParams, BudgetPolicy
from specjax.types import DraftShape

from .simulation import (
    LLAMA_8B,
    SMOLLM2,
    Phase,
    Policy,
    Seconds,
    Static,
    Times,
    round_seconds,
    simulate,
    simulate_batch,
)

TIERS = (0, 1, 3, 7)
TOKENS = 500  # per row and phase
CASES = [(SMOLLM2, 1), (LLAMA_8B, 1), (LLAMA_8B, 8), (LLAMA_8B, 32)]
IDS = ["smollm2-1", "8b-1", "8b-8", "8b-32"]


def acceptance(first: float) -> tuple[float, ...]:
    """Acceptance rates that fall slightly with depth."""
    return tuple(first * 0.97**i for i in range(7))


def transition(low: float, high: float, tokens: int = TOKENS) -> list[Phase]:
    return [Phase(tokens, acceptance(low)), Phase(tokens, acceptance(high))] * 2


def rate(
    policy: type[BudgetPolicy] | type[AdaptiveSpeculativeParams] | int,
    phases: list[Phase],
    times: Seconds,
    batch_size: int,
) -> float:
    seconds = 0.0
    tokens = 0
    for seed in range(4 if batch_size == 1 else 1):
        chosen: Policy
        if isinstance(policy, int):
            chosen = Static(policy)
        elif policy is BudgetPolicy:
            chosen = BudgetPolicy(times, 3)
        else:
            chosen = AdaptiveSpeculativeParams(3)
        outcome = simulate(chosen, phases, times, batch_size=batch_size, seed=seed)
        seconds += outcome.seconds
        tokens += outcome.tokens
    return tokens / seconds


@pytest.mark.slow
@pytest.mark.parametrize(("table", "batch_size"), CASES, ids=IDS)
@pytest.mark.parametrize(("low", "high"), [(0.03, 0.95), (0.2, 0.8), (0.3, 0.9), (0.35, 0.97)])
def test_changing_acceptance_beats_every_fixed_tier(
    table: Times, batch_size: int, low: float, high: float
) -> None:
    times = round_seconds(table)
    phases = transition(low, high)
    fixed = [rate(steps, phases, times, batch_size) for steps in TIERS]
    adaptive = rate(BudgetPolicy, phases, times, batch_size)
    assert adaptive >= 1.0 * max(fixed)
    assert adaptive >= 1.1 * min(fixed)
    assert adaptive >= 0.97 * fixed[0]


@pytest.mark.slow
@pytest.mark.parametrize(("table", "batch_size"), CASES, ids=IDS)
@pytest.mark.parametrize("first", [0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 0.95])
def test_steady_acceptance_costs_little(table: Times, batch_size: int, first: float) -> None:
    times = round_seconds(table)
    phases = [Phase(2 * TOKENS, acceptance(first))]
    fixed = [rate(steps, phases, times, batch_size) for steps in TIERS]
    adaptive = rate(BudgetPolicy, phases, times, batch_size)
    assert adaptive >= 0.96 * max(fixed)
    assert adaptive >= 0.97 * fixed[0]


def test_the_ema_policy_ignores_round_times() -> None:
    times = round_seconds(SMOLLM2)
    phases = [Phase(TOKENS, acceptance(0.1))]
    plain = rate(0, phases, times, 1)
    assert rate(AdaptiveSpeculativeParams, phases, times, 1) < 0.85 * plain
    assert rate(BudgetPolicy, phases, times, 1) > 0.97 * plain


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_late_results_are_tolerated(delay: int) -> None:
    times = round_seconds(SMOLLM2)
    phases = transition(0.1, 0.9)
    plain = simulate(Static(0), phases, times).rate
    outcome = simulate(BudgetPolicy(times, 3), phases, times, delay=delay)
    assert outcome.rate > 1.1 * plain
    # both phases with high acceptance are detected
    middle = [i for i, steps in enumerate(outcome.tiers) if steps == 7]
    gaps = [b - a for a, b in pairwise(middle)]
    assert max(gaps) > 200


# milliseconds per round of the 8B shape on an H200; between measured batch sizes, estimates
WIDE: Times = {
    1: (4.22, 4.45, 4.88, 5.85),
    16: (4.9, 5.2, 6.1, 8.2),
    32: (5.58, 5.97, 7.44, 10.98),
    64: (6.9, 7.8, 10.9, 17.9),
}
PACKED = DraftShape(7, 1, 8, packed=4)


@pytest.mark.slow
@pytest.mark.parametrize("size", WIDE)
@pytest.mark.parametrize("chance", [0.05, 0.3, 0.6, 0.9])
def test_every_load_is_near_its_best_tier(chance: float, size: int) -> None:
    times = round_seconds(WIDE)
    load = [[chance] * size]
    fixed = [simulate_batch(DraftShape.chain(n), load, times, seconds=8)[0].rate for n in TIERS]
    found = simulate_batch(BudgetPolicy(times, 3), load, times, seconds=8)[0].rate
    assert found > 0.97 * max(fixed)
    assert found > 0.97 * fixed[0]


@pytest.mark.parametrize("seed", range(4))
def test_a_changing_load_is_followed_within_half_a_second(seed: int) -> None:
    times = round_seconds(WIDE)
    low, high = [0.05] * 16, [0.9] * 16
    for load, best in ((low, DraftShape.chain(0)), (high, DraftShape.chain(7))):
        other = low if load is high else high
        stretches = [load, other, load, other, load]
        good = best.__eq__
        found = simulate_batch(BudgetPolicy(times, 3), stretches, times, good=good, seed=seed)
        fixed = simulate_batch(best, [load], times, seed=seed)[0].rate
        for stretch in found[2::2]:
            assert stretch.seconds_to_good < 0.5
            assert stretch.rate > 0.92 * fixed


@pytest.mark.slow
def test_packed_rows_pay_off_if_requests_differ() -> None:
    times = dict(round_seconds(WIDE))
    for size, row in WIDE.items():  # verifies as many rows as three drafts, and drafts four more
        times[PACKED, size] = (row[2] + 4 * 0.14) * 1e-3
    load = [[0.9, 0.3] * 16]
    fixed = [simulate_batch(DraftShape.chain(n), load, times, seconds=10)[0].rate for n in TIERS]
    policy = BudgetPolicy(times, 3)
    assert simulate_batch(policy, load, times, seconds=10)[0].rate > 1.1 * max(fixed)
    assert policy.chosen == PACKED
    # if all requests are alike, nothing is gained by them
    alike = [[0.9] * 32]
    fixed = [simulate_batch(DraftShape.chain(n), alike, times)[0].rate for n in TIERS]
    assert simulate_batch(BudgetPolicy(times, 3), alike, times)[0].rate > 0.97 * max(fixed)


def test_packed_rounds_do_not_hide_that_late_drafts_survive() -> None:
    """While the fourth draft is always rejected, packed rounds leave it untried."""
    tiers = [DraftShape.chain(0), DraftShape.chain(7), PACKED]
    times = {(tier, 32): 5e-3 + 2e-5 * 32 * tier.verified for tier in tiers}
    three, every = [[rates] * 32 for rates in ((0.97,) * 3 + (0.02,) * 4, (0.98,) * 7)]
    best = simulate_batch(DraftShape.chain(7), [every], times)[0].rate
    policy = BudgetPolicy(times, 7, {"candidate_steps": [0, 7]})
    found = simulate_batch(policy, [three, every] * 2, times)
    assert min(stretch.rate for stretch in found[1::2]) > 0.9 * best


def test_times_while_serving_replace_wrong_measurements() -> None:
    """The deepest tier takes 1.5 times as long as measured, for example with a lower clock."""
    measured = {(DraftShape.chain(k), 32): s for k, s in {0: 5.0, 1: 5.5, 3: 6.5, 7: 8.0}.items()}
    measured = {pair: 1e-3 * value for pair, value in measured.items()}
    times = measured | {(DraftShape.chain(7), 32): 12e-3}
    batch = [[0.8] * 32]
    rates = [simulate_batch(DraftShape.chain(k), batch, times)[0].rate for k in TIERS]
    best = max(rates)
    assert rates[2] == best
    for is_timed in (False, True):
        policy = BudgetPolicy(measured, 3)
        (found,) = simulate_batch(policy, batch, times, is_timed=is_timed)
        assert (found.rate > 0.97 * best) == is_timed
        assert (policy.chosen == DraftShape.chain(3)) == is_timed


@pytest.mark.parametrize("first", [0, 7, "packed"])
def test_packed_rounds_end_if_all_requests_are_alike(first: int | str) -> None:
    """All drafts of all requests survive equally often, so packed rounds leave out good ones."""
    packed = DraftShape.chain(7)._replace(packed=5)
    times = {(DraftShape.chain(k), 64): ms for k, ms in {0: 7.2, 1: 8.2, 3: 11.0, 7: 17.5}.items()}
    times = {pair: 1e-3 * ms for pair, ms in (times | {(packed, 64): 13.9}).items()}
    batch = [[0.9] * 64]
    best = max(simulate_batch(DraftShape.chain(k), batch, times)[0].rate for k in TIERS)
    policy = BudgetPolicy(times, 7 if first == "packed" else first)
    policy.chosen = packed if first == "packed" else policy.chosen
    assert simulate_batch(policy, batch, times)[0].rate > 0.97 * best


def test_expected_tokens_of_packed_rounds_are_realised() -> None:
    """Requests differ, and few late drafts of the worse ones are tried."""
    packed = DraftShape.chain(7)._replace(packed=5)
    times = {(DraftShape.chain(k), 32): ms for k, ms in {0: 5.5, 1: 6.3, 3: 7.6, 7: 11.3}.items()}
    times = {pair: 1e-3 * ms for pair, ms in (times | {(packed, 32): 9.7}).items()}
    policy = BudgetPolicy(times, 7)
    simulate_batch(policy, [[0.9, 0.3] * 16], times, seconds=1.0)
    before = policy.expected_tokens, policy.realised_tokens
    simulate_batch(policy, [[0.9, 0.3] * 16], times, seconds=3.0)
    assert policy.chosen == packed
    expected, realised = policy.expected_tokens - before[0], policy.realised_tokens - before[1]
    assert expected == pytest.approx(realised, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_packed_rounds_return_after_bad_acceptance(seed: int) -> None:
    """The last packed rounds before a change realise too little, which says nothing about later."""
    packed = DraftShape.chain(7)._replace(packed=5)
    times = {(DraftShape.chain(k), 32): ms for k, ms in {0: 5.5, 1: 6.0, 3: 6.8, 7: 8.9}.items()}
    times = {pair: 1e-3 * ms for pair, ms in (times | {(packed, 32): 7.4}).items()}
    policy, mixed, bad = BudgetPolicy(times, 7), [0.9, 0.3] * 16, [0.05] * 32
    first, _, *later = simulate_batch(policy, [mixed, bad, mixed, mixed], times, seed=seed)
    assert policy.chosen == packed
    assert min(stretch.rate for stretch in later) > 0.96 * first.rate


@pytest.mark.parametrize("slowdown", [1.11, 1.2])
def test_slow_rounds_of_many_rows_do_not_make_plain_ones_look_slow(slowdown: float) -> None:
    """Drafts pay off for a long time, and then slightly less than plain decoding."""
    measured = {(DraftShape.chain(k), 64): 1e-3 * ms for k, ms in {0: 7.2, 7: 17.5}.items()}
    real = {pair: s * (slowdown if pair[0].steps else 1.0) for pair, s in measured.items()}
    policy = BudgetPolicy(measured, 7, {"candidate_steps": [0, 7]})
    stretches = [[0.95] * 64, [0.62] * 64, [0.62] * 64]
    rates = simulate_batch(policy, stretches, real, seconds=8.0, is_timed=True)
    plain = simulate_batch(DraftShape.chain(0), [[0.62] * 64], real)[0].rate
    assert rates[-1].rate > 0.98 * plain

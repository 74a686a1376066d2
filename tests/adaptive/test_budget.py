import random
import re
from itertools import accumulate, pairwise, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.adaptive import BudgetPolicy
from specjax.adaptive.budget import (
    MAX_CREDIT,
    MAX_DEFICIT,
    PLAIN_LOSS_BUDGET,
    AcceptanceEstimates,
    expected_tokens,
)
from specjax.adaptive.survival import RoundRecord
from specjax.types import DraftShape

from .simulation import LLAMA_8B, SMOLLM2, chain_seconds, round_seconds

ROOT = Path(__file__).parents[2]
ONE = {"candidate_steps": [1]}
chain = DraftShape.chain


def test_rounds_of_a_tier_that_is_not_a_candidate() -> None:
    policy = BudgetPolicy({(chain(steps), 1): 1.0 + steps for steps in (1, 3)}, 1, ONE)
    policy.on_verify_complete([3], tier=chain(3), batch_size=1)
    assert policy.estimates.acceptance(1)[0] > 0.7
    with pytest.raises(ValueError, match=r"steps=5.* has no round time"):
        policy.on_verify_complete([5], tier=chain(5), batch_size=1)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4), st.integers(0, 2**32))
def test_estimates_approach_the_chances(chances: list[float], seed: int) -> None:
    rng = random.Random(seed)
    steps = len(chances)
    estimates = AcceptanceEstimates(steps)
    for _ in range(60):
        counts = []
        for _ in range(200):
            count = 0
            while count < steps and rng.random() < chances[count]:
                count += 1
            counts.append(count)
        estimates.observe(counts, [steps] * len(counts))
    for rows, chance, estimate in zip(
        estimates.tries, chances, estimates.acceptance(steps), strict=True
    ):
        if rows > 1000:
            assert estimate == pytest.approx(chance, abs=0.09)


def chosen(
    seconds: dict[int, float], current: int, accepted: list[float], deficit: float = 0.0
) -> int:
    """The tier chosen with known acceptance by a policy that was at ``current``."""
    policy = BudgetPolicy(
        {(chain(steps), 1): value for steps, value in seconds.items()},
        current,
        {"candidate_steps": list(seconds)},
    )
    policy.chosen, policy.deficit, policy._bucket = chain(current), deficit, 0
    policy.estimates.accepted = accepted
    policy.estimates.tries = [1.0] * len(accepted)
    return policy.tier_for_batch(1).steps


def test_choice() -> None:
    full = [1.0, 1.0, 1.0]
    times = {0: 1.0, 1: 2 / 1.1, 3: 4 / 1.12}  # rates 1, 1.1 and 1.12 if all drafts are accepted
    assert chosen(times, 1, full) == 1  # the gain is below the hysteresis
    assert chosen(times | {3: 4 / 1.13}, 1, full) == 3
    assert chosen(times, 7, full) == 3  # 7 is not a candidate of this slot
    assert chosen({0: 1.0, 1: 2.002}, 1, [1.0]) == 0  # hysteresis does not favour a loss
    assert chosen(times, 3, full, deficit=MAX_DEFICIT + 0.1) == 0  # the loss is too large
    assert chosen(times, 0, full, deficit=3.1) == 0  # not repaid yet
    assert chosen(times, 0, full, deficit=2.9) == 3
    assert chosen({1: 2.0, 3: 2.0}, 1, full, deficit=11.0) == 3  # step 0 is not a candidate
    assert chosen({0: 1.0, 1: 2.0}, 7, [1.0]) == 0  # of equals, the cheaper one


def feed(policy: BudgetPolicy, counts_of_rows: list[int], batch_size: int = 1) -> int:
    tier = policy.tier_for_batch(batch_size)
    counts = [min(count, tier.depth) for count in counts_of_rows]
    policy.on_verify_complete(counts, tier=tier, batch_size=batch_size)
    return tier.steps


@pytest.mark.parametrize("initial", [0, 1, 3, 7])
def test_full_acceptance_reaches_the_top_and_none_the_bottom(initial: int) -> None:
    policy = BudgetPolicy(round_seconds(SMOLLM2), initial)
    assert [feed(policy, [7]) for _ in range(60)][-10:] == [7] * 10
    off = [feed(policy, [0]) for _ in range(700)]
    assert off[40:].count(0) > 0.94 * len(off[40:])
    times = {(tier.steps, batch): value for (tier, batch), value in round_seconds(SMOLLM2).items()}
    assert sum(times[steps, 1] - times[0, 1] for steps in off[40:]) < 0.03 * 660 * times[0, 1]
    probes = [i for i, steps in enumerate(off) if steps and i > 40]
    assert probes  # one round each, spaced so that each is repaid
    gaps = [b - a for a, b in pairwise(probes)]
    assert max(gaps) <= (times[7, 1] - times[0, 1]) / (PLAIN_LOSS_BUDGET * times[0, 1]) + 2
    assert all(off[i + 1] == 0 for i in probes)
    assert 7 in [feed(policy, [7]) for _ in range(100)]


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_losses_stay_within_the_stated_bounds(delay: int) -> None:
    # an adversary accepts nothing, except occasionally just enough to be probed again
    times = round_seconds(SMOLLM2)
    rng = random.Random(delay)
    policy = BudgetPolicy(times, 7)
    plain = times[chain(0), 1]
    lost = plain_seconds = 0.0
    pending: list[tuple[DraftShape, int]] = []
    for _ in range(3000):
        tier = policy.tier_for_batch(1)
        count = tier.depth if rng.random() < 0.15 else 0
        lost += times[tier, 1] - (1 + count) * plain
        plain_seconds += plain if tier.steps == 0 else 0.0
        in_flight = (delay + 1) * (times[chain(7), 1] - plain)
        limit = MAX_DEFICIT * plain + in_flight
        assert lost <= PLAIN_LOSS_BUDGET * plain_seconds + limit + 1e-9
        pending.append((tier, count))
        if len(pending) > delay:
            executed, reported = pending.pop(0)
            policy.on_verify_complete([reported], tier=executed, batch_size=1)


def test_probes_of_deeper_tiers_keep_to_their_budget() -> None:
    times = {(1, 1): 1.0, (3, 1): 1.9}
    policy = BudgetPolicy(chain_seconds(times), 1, {"candidate_steps": [1, 3]})
    tiers = [feed(policy, [1]) for _ in range(1000)]
    probes = [i for i, steps in enumerate(tiers) if steps == 3]
    # a probe produces 2 tokens in 1.9 seconds, the chosen tier would produce 3.8: 0.9 s to repay
    assert len(probes) > 10
    gaps = [b - a for a, b in pairwise(probes)]
    assert min(gaps[1:]) >= 0.9 / 0.02
    assert 0.9 * len(probes) <= 0.02 * sum(times[steps, 1] for steps in tiers) + 0.9


def test_a_gain_pays_for_the_fall_that_ends_it() -> None:
    rounds = {}
    for has_credit in (False, True):
        policy = BudgetPolicy(round_seconds(SMOLLM2), 7)
        for _ in range(200):
            feed(policy, [7])
        assert policy.deficit == pytest.approx(-MAX_CREDIT * policy.table.seconds(chain(0), 1))
        policy.deficit = min(policy.deficit, 0.0) if has_credit else 0.0
        while policy.tier.steps:
            feed(policy, [0])
        rounds[has_credit] = next(i for i in range(1000) if feed(policy, [0]))
    assert rounds[True] < 20 < 300 < rounds[False]


def test_a_tier_that_loses_to_plain_decoding_does_not_stay() -> None:
    times = {(0, 1): 1.0, (1, 1): 2.1, (7, 1): 9.0}
    policy = BudgetPolicy(chain_seconds(times), 7, {"candidate_steps": [0, 1, 7]})
    tiers = [feed(policy, [7]) for _ in range(2000)]  # even full acceptance does not pay off
    assert set(tiers[2:]) == {0}


def test_a_tier_that_cannot_win_is_skipped() -> None:
    """One draft costs more than it gains, and seven pay off: probes go directly to those."""
    times = {(0, 1): 1.0, (1, 1): 2.6, (3, 1): 3.3, (7, 1): 4.0}
    policy = BudgetPolicy(chain_seconds(times), 7)
    before = [feed(policy, [0]) for _ in range(1000)]
    assert before[100:].count(0) > 0.97 * 900
    assert 1 not in before
    assert {0, 3} <= set(before[10:])
    after = [feed(policy, [7]) for _ in range(400)]
    assert 1 not in after
    assert after[-50:] == [7] * 50


@pytest.mark.parametrize("initial", [0, 7])
def test_a_cut_chain_is_rated_by_its_verified_rows(initial: int) -> None:
    """Four tokens in 1.2 s are a higher rate than eight in 3 s."""
    times = {(chain(0), 1): 1.0, (chain(7, 4), 1): 1.2, (chain(7), 1): 3.0}
    policy = BudgetPolicy(times, initial, {"candidate_steps": [0, 7]})
    assert policy.tier == (chain(7) if initial else chain(0))
    for _ in range(60):
        feed(policy, [7])
    assert policy.chosen == chain(7, 4)


def test_the_batch_decides_by_its_own_times() -> None:
    times = {(0, 1): 1.0, (7, 1): 1.1, (0, 8): 1.0, (7, 8): 9.0}
    policy = BudgetPolicy(chain_seconds(times), 7, {"candidate_steps": [0, 7]})
    for _ in range(20):
        policy.on_verify_complete([3], tier=chain(7), batch_size=1)
    assert [policy.tier_for_batch(n).steps for n in (1, 2, 8, 1)] == [7, 0, 0, 7]
    for wrong in (9, 1.5, 0, "1"):
        with pytest.raises(ValueError, match="batch_size="):
            policy.tier_for_batch(wrong)  # type: ignore[arg-type]


def test_packed_tiers_run_only_at_buckets_with_a_time() -> None:
    packed = chain(7)._replace(packed=4)
    times = {(chain(0), 1): 1.0, (chain(7), 1): 9.0}
    times |= {(chain(0), 8): 1.0, (chain(7), 8): 9.0, (packed, 8): 1.1}
    policy = BudgetPolicy(times, 7, {"candidate_steps": [0, 7]})
    policy.chosen = packed
    assert [policy.tier_for_batch(size) for size in (8, 1)] == [packed, chain(0)]
    with pytest.raises(ValueError, match=r"packed=4.* has no round time at batch_size=1"):
        policy.on_verify_complete([3], tier=packed, batch_size=1)


def test_expected_tokens_are_those_before_the_round() -> None:
    tiers = chain(3), chain(3)._replace(packed=2), chain(0), chain(1)
    policy = BudgetPolicy(dict(zip(product(tiers, [2]), (1.2, 1.1, 1.0, 1.1), strict=True)), 3)
    assert policy.survival is not None
    expected = realised = 0.0
    for i, counts in enumerate([[1, 2], [2, 0], [0, 0], [0, 1], [1, 1], [0, 2]]):
        tier, before = tiers[i % 4], policy.estimates.acceptance(policy.chosen.depth)
        known, share = ("a", "b"), 1.0
        if tier.packed:
            best, all_drafts = (policy.survival.survivors(known, n, 3) for n in (2, 6))
            share = policy.packed_yield * best / all_drafts
        if tier.steps and i:  # before the first result, nothing was decided
            expected += 2 * (1 + share * (expected_tokens(before)[tier.depth] - 1))
            realised += 2 + sum(counts)
        policy.on_verify_complete(counts, tier=tier, batch_size=2, record=RoundRecord((), 0, known))
        figures = policy.describe()
        assert figures["expected_tokens"] == pytest.approx(expected)
        assert figures["realised_tokens"] == realised
    policy.on_verify_complete([], tier=chain(2), batch_size=2)
    assert policy.describe() == figures


def test_requests_without_drafts_take_a_row_and_gain_nothing() -> None:
    packed = chain(3)._replace(packed=2)
    times = {(chain(0), 8): 1.0, (packed, 8): 1.4, (chain(3), 8): 1.5}
    policy = BudgetPolicy(times, 3, {"candidate_steps": [0, 3]})
    assert policy.survival is not None
    policy.estimates.tries, policy.estimates.accepted = [90.0] * 3, [81.0] * 3
    gain = expected_tokens([0.9] * 3)[3] - 1
    for known, live, drafts, chosen in (
        ("abcd", 4, 12, packed),
        ("abcd", 8, 8, chain(3)),
        ("a", 8, 8, chain(0)),
    ):
        share = len(known) / live
        record = RoundRecord((), 0.0, known, share)
        kept = policy.survival.survivors(known, drafts, 3)
        kept /= policy.survival.survivors(known, 3 * len(known), 3)
        assert (kept < 1) == (drafts < 3 * len(known))
        rates, _ = policy._rates(policy._times(policy.tiers, 8, 0.0), 8, record)
        assert rates == pytest.approx(
            {
                chain(0): 1.0,
                packed: (1 + share * kept * gain) / 1.4,
                chain(3): (1 + share * gain) / 1.5,
            }
        )
        policy._bucket = 1  # another batch size, so the tier is chosen again
        assert policy.tier_for_batch(8, record) == chosen
    policy.on_verify_complete([3], tier=chain(3), batch_size=8, record=record)
    assert policy.chosen == chain(0)
    assert policy.deficit == pytest.approx(1.5 - (1 + 3 / 8))


def test_slots_limit_the_candidates() -> None:
    config = {"1": {}, "4": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [0]}}
    policy = BudgetPolicy(round_seconds(LLAMA_8B), 7, config)
    for _ in range(300):
        for size in (1, 5, 8):
            tier = feed(policy, [2] * size, size)
            assert tier in {1: (0, 1, 3, 7), 5: (1, 3), 8: (0,)}[size]


def test_empty_rounds_change_nothing_and_wrong_ones_are_refused() -> None:
    policy = BudgetPolicy(round_seconds(SMOLLM2), 3)
    before = policy.describe()
    assert not policy.on_verify_complete([], tier=chain(3), batch_size=1)
    for counts, steps in (([4], 3), ([-1], 3), ([1], 0), ([2], 5)):
        with pytest.raises(ValueError, match="steps="):
            policy.on_verify_complete(counts, tier=chain(steps), batch_size=1)
    assert policy.describe() == before
    times = chain_seconds({(1, 1): 1.0, (1, 2): 1.0, (3, 1): 1.0})
    with pytest.raises(ValueError, match=r"round times are missing for .*nodes=4, .*\), 2\)\]"):
        BudgetPolicy(times, 1, {"candidate_steps": [1, 3]})
    with pytest.raises(ValueError, match=r"candidate_steps=\[5\] have no tier"):
        BudgetPolicy(round_seconds(SMOLLM2), 3, {"candidate_steps": [1, 5]})


def test_a_probe_of_one_slot_does_not_keep_another_from_probing() -> None:
    times = {(steps, size): 1.0 + 0.01 * steps for steps in (0, 1, 7) for size in (1, 8)}
    slots = {"1": {"candidate_steps": [0, 7]}, "8": {"candidate_steps": [0, 1]}}
    policy = BudgetPolicy(chain_seconds(times), 0, slots)
    policy.estimates.accepted = [0.0] * 7
    feed(policy, [0])
    assert policy.probe == chain(7)
    assert 1 in [feed(policy, [1] * 8, 8) for _ in range(200)]


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(
    st.tuples(*[st.floats(0.02, limit) for limit in (1.2, 1.5, 3.0)]),
    st.lists(st.integers(0, 7), min_size=1, max_size=4),
    st.sampled_from([0, 1, 3, 7]),
)
def test_no_oscillation_on_a_constant_input(
    more: tuple[float, ...], counts: list[int], initial: int
) -> None:
    """With any round times, the tier settles on one that is best or nearly best for the counts."""
    costs = accumulate(more, initial=1.0)
    times = {(k, 4): cost for k, cost in zip((0, 1, 3, 7), costs, strict=True)}
    policy, rows = BudgetPolicy(chain_seconds(times), initial), len(counts)
    tiers, tokens, seconds = [], 0.0, 0.0
    for i in range(1500):
        executed = feed(policy, counts, rows)
        if i >= 500:
            tiers.append(policy.chosen.steps)
            tokens += 1 + sum(min(count, executed) for count in counts) / rows
            seconds += times[executed, 4]
    rates = {
        k: (1 + sum(min(count, k) for count in counts) / rows) / times[k, 4] for k in (0, 1, 3, 7)
    }
    assert sum(a != b for a, b in pairwise(tiers)) <= 2
    assert tokens / seconds > 0.95 * max(rates.values())
    assert tokens / seconds > 0.97 * rates[0]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_tier_is_a_candidate_and_the_same_counts_lead_to_the_same_state(
    data: st.DataObject,
) -> None:
    times = round_seconds(LLAMA_8B)
    config = {"candidate_steps": data.draw(st.lists(st.sampled_from([0, 1, 3, 7]), min_size=1))}
    first, second = (BudgetPolicy(times, 3, config) for _ in range(2))
    for _ in range(data.draw(st.integers(0, 60))):
        size = data.draw(st.integers(1, 12))
        executed = data.draw(st.sampled_from(first.tiers))
        counts = data.draw(st.lists(st.integers(0, executed.depth), max_size=size))
        before = first.tier_for_batch(size)
        changed = first.on_verify_complete(counts, tier=executed, batch_size=size)
        second.on_verify_complete(counts, tier=executed, batch_size=size)
        assert first.describe() == second.describe()
        assert first.tier_for_batch(size) in first.tiers
        assert changed == (first.tier_for_batch(size) != before)


def test_policies_do_not_import_jax() -> None:
    for path in (ROOT / "specjax" / "adaptive").glob("*.py"):
        assert not re.search(r"^\s*(import|from) jax", path.read_text(), re.MULTILINE), path

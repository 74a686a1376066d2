"""The cost table."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.adaptive import BudgetPolicy
from specjax.adaptive.cost import CONTEXTS, CostTable
from specjax.adaptive.survival import RoundRecord
from specjax.types import DraftShape

chain = DraftShape.chain
TIERS = (chain(0), chain(1), chain(7, 4), chain(7))
PAIRS = [(tier, bucket) for tier in TIERS for bucket in (1, 8, 32)]
TIMES = st.floats(1e-4, 1.0)


@given(st.lists(st.lists(TIMES, min_size=2, max_size=2), min_size=12, max_size=12))
def test_more_work_is_never_cheaper(times: list[list[float]]) -> None:
    table = CostTable(dict(zip(PAIRS, times, strict=True)))
    for context in (0, 512, 2000, 10_000):
        for tier, bucket in PAIRS:
            assert table.seconds(tier, bucket, context) >= min(map(min, times))
            for other, size in PAIRS:
                if other.steps <= tier.steps and other.nodes <= tier.nodes and size <= bucket:
                    for near in CONTEXTS:
                        smaller = table.seconds(other, size, near)
                        assert smaller <= table.seconds(tier, bucket, near) * (1 + 1e-12)


def test_time_is_linear_in_the_context() -> None:
    table = CostTable({(chain(0), 1): [1.0, 3.0], (chain(0), 4): [2.0, 1.9]})
    short, long = CONTEXTS
    middle = (short + long) / 2
    found = [table.seconds(chain(0), 1, at) for at in (0, short, middle, long, long + middle)]
    assert found[:4] == pytest.approx([1.0, 1.0, 2.0, 3.0])
    assert found[4] > 3.0
    assert table.seconds(chain(0), 4, long) == 3.0  # at least that of fewer requests
    assert [table.bucket_of(size) for size in (1, 2, 4)] == [1, 4, 4]
    with pytest.raises(ValueError, match=r"batch_size=5 exceeds the largest of \[1, 4\]"):
        table.bucket_of(5)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), True, "1", None, [1.0, 0.0]])
def test_times_are_above_0(value: Any) -> None:
    with pytest.raises(ValueError, match=r"seconds of tier 1 at 1="):
        CostTable({(chain(1), 1): value})


def test_long_contexts_can_change_the_tier() -> None:
    """With long contexts, rows cost less in comparison, because reading the KV takes longer."""
    times = {(chain(0), 1): [1.0, 4.0], (chain(3), 1): [2.2, 4.4]}
    policy = BudgetPolicy(times, 0, {"candidate_steps": [0, 3]})
    policy.estimates.tries, policy.estimates.accepted = [9.0] * 3, [6.0, 4.5, 4.5]
    policy._bucket = 8  # another batch size, so the tier is chosen again
    assert policy.tier_for_batch(1, RoundRecord(context=100)) == chain(0)
    assert policy.tier_for_batch(1, RoundRecord(context=4096)) == chain(3)


def test_drafts_that_were_not_proposed_do_not_count_as_rejected() -> None:
    policy = BudgetPolicy({(chain(3), 1): 1.0}, 3, {"candidate_steps": [3]})
    for _ in range(50):
        policy.on_verify_complete([1], tier=chain(3), batch_size=1, record=RoundRecord([1]))
    first, second, _ = policy.estimates.acceptance(1)
    assert first > 0.98
    assert second == 0.0
    assert not policy.estimates.tries[1]


@given(st.lists(st.tuples(st.sampled_from(PAIRS), TIMES), max_size=40))
def test_served_rounds_correct_the_table_within_limits(rounds: list[tuple[Any, float]]) -> None:
    table, before = CostTable(dict.fromkeys(PAIRS, 0.01)), 0.01
    for (tier, bucket), seconds in rounds:
        others = [table.seconds(*pair) for pair in PAIRS if pair[1] != bucket]
        old = table.seconds(tier, bucket)
        table.observe(tier, bucket, 0.0, seconds)
        new, limited = table.seconds(tier, bucket), min(max(seconds, before / 2), before * 2)
        assert abs(limited - new) <= abs(limited - old) + 1e-12  # it comes closer
        assert before / 2 <= new * (1 + 1e-9)
        assert new <= before * 2 * (1 + 1e-9)
        assert [table.seconds(*pair) for pair in PAIRS if pair[1] != bucket] == others
    for _ in range(60):
        table.observe(chain(7), 8, 0.0, 0.015)
    assert table.seconds(chain(7), 8) == pytest.approx(0.015, rel=1e-2)

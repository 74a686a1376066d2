from copy import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.adaptive import AdaptiveSpeculativeParams
from specjax.types import DraftShape

chain = DraftShape.chain

# decide after every batch, with the last batch as the average
AT_ONCE: dict[str, Any] = {"ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1}


def run(initial_steps: int, config: dict[str, Any], means: list[int]) -> list[int]:
    """Tiers after each batch, whose average is the exponential average of the means."""
    params = AdaptiveSpeculativeParams(initial_steps, {**AT_ONCE, **config})
    tiers = []
    average, weight = params.ema_accept_len, params.config.slots[0].ema_alpha
    for mean in means:
        before = params.current_steps
        changed = params.update([mean])
        average += weight * (mean * (before > 0) + average * (before == 0) - average)
        assert params.ema_accept_len == pytest.approx(average)
        assert changed == (params.current_steps != before)
        tiers.append(params.current_steps)
    return tiers


def test_defaults() -> None:
    params = AdaptiveSpeculativeParams(3)
    (slot,) = params.config.slots
    assert params.candidate_steps == (1, 3, 7)
    assert (slot.ema_alpha, slot.warmup_batches, slot.update_interval) == (0.2, 10, 5)
    assert (slot.down_hysteresis, slot.up_hysteresis) == (-0.25, 0.0)
    assert (params.current_steps, params.ema_accept_len) == (3, 2.0)


@pytest.mark.parametrize(
    ("initial", "expected"), [(0, 1), (1, 1), (2, 3), (3, 3), (4, 3), (5, 7), (6, 7), (99, 7)]
)
def test_the_first_tier_is_the_nearest_candidate_the_larger_of_two(
    initial: int, expected: int
) -> None:
    assert AdaptiveSpeculativeParams(initial).current_steps == expected


@pytest.mark.parametrize(
    ("initial", "config", "means", "tiers"),
    [
        (3, {}, [3], [7]),
        (3, {"down_hysteresis": 0.0}, [0], [1]),
        (3, {"up_hysteresis": 0.75}, [3], [3]),
        (3, {"up_hysteresis": 0.75}, [4], [7]),
        (7, {"down_hysteresis": -0.75}, [2], [7]),
        (7, {"down_hysteresis": -0.75}, [1], [3]),
        (3, {"ema_alpha": 0.5, "down_hysteresis": 0.0}, [4, 0, 0, 0], [7, 3, 3, 1]),
        (1, {}, [7], [7]),
        (7, {}, [0], [1]),
        (3, {"candidate_steps": [0]}, [0] * 5, [0] * 5),  # permanently off
    ],
)
def test_golden_decisions(
    initial: int, config: dict[str, Any], means: list[int], tiers: list[int]
) -> None:
    assert run(initial, config, means) == tiers


def test_thresholds_are_strict_upwards_and_inclusive_downwards() -> None:
    up = AdaptiveSpeculativeParams(3, AT_ONCE)
    assert not up.update([2, 3])  # 2.5 is the threshold
    assert up.update([2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 16])  # 36 / 11
    down = AdaptiveSpeculativeParams(3, {**AT_ONCE, "down_hysteresis": 0.0})
    assert down.update([0, 1])  # 0.5 is the threshold
    assert down.current_steps == 1


def test_decisions_wait_for_warmup_and_interval() -> None:
    params = AdaptiveSpeculativeParams(
        1, {"ema_alpha": 1.0, "warmup_batches": 3, "update_interval": 2}
    )
    changes = [params.update([7]) for _ in range(4)]
    assert changes == [False] * 4
    assert params.ema_accept_len == 7.0  # also measured during warm-up
    assert params.update([7])
    assert params.current_steps == 7
    assert [params.update([0]), params.update([0])] == [False, True]


def test_empty_batches_change_nothing() -> None:
    config = {"ema_alpha": 1.0, "warmup_batches": 1, "update_interval": 1}
    params = AdaptiveSpeculativeParams(3, config)
    before = copy(params.state)
    assert not any(params.update([]) for _ in range(10))
    assert params.state == before
    assert not params.update([0])
    assert params.update([0])


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        AdaptiveSpeculativeParams(3).update([2, -1])


def test_results_of_another_tier_are_left_out() -> None:
    params = AdaptiveSpeculativeParams(3, AT_ONCE)
    before = copy(params.state)
    assert not params.on_verify_complete([7], tier=chain(7), batch_size=1)
    assert params.state == before
    assert params.on_verify_complete([3], tier=chain(3), batch_size=1)


def test_slots_keep_their_own_average_and_tier() -> None:
    params = AdaptiveSpeculativeParams(
        3, {**AT_ONCE, "2": {}, "8": {"candidate_steps": [0, 1, 3]}, "32": {"candidate_steps": [1]}}
    )
    assert params.candidate_steps == (0, 1, 3, 7)
    sizes = (1, 2, 7, 8, 31, 32, 500)
    assert [params.tier_for_batch(size).steps for size in sizes] == [3, 3, 3, 3, 3, 1, 1]
    assert params.on_verify_complete([0] * 9, tier=chain(3), batch_size=9)
    assert [params.tier_for_batch(size).steps for size in sizes] == [3, 3, 3, 0, 0, 1, 1]
    assert (params.current_steps, params.ema_accept_len) == (0, 0.0)
    assert params.on_verify_complete([3], tier=chain(3), batch_size=1)
    assert [params.tier_for_batch(size).steps for size in sizes] == [7, 7, 7, 0, 0, 1, 1]
    assert (params.current_steps, params.ema_accept_len) == (7, 3.0)


def test_step_0_probes_at_doubling_intervals_and_recovers() -> None:
    config = {"candidate_steps": [0, 1, 3], "max_probe_interval": 80, "warmup_batches": 0}
    params = AdaptiveSpeculativeParams(1, config)
    waits, wait = [], 0
    for _ in range(500):
        steps = params.current_steps
        params.on_verify_complete([0], tier=chain(steps), batch_size=1)
        if steps == 0:
            wait += 1
        elif wait:
            waits.append(wait)
            wait = 0
    # every probe lasts five rounds; between them are waits of 5, 10, 20, 40, 80, 80, ...
    assert waits[:6] == [5, 10, 20, 40, 80, 80]
    rounds = 0
    while params.current_steps != 3:
        steps = params.current_steps
        params.on_verify_complete([steps], tier=chain(steps), batch_size=1)
        rounds += 1
        assert rounds < 80 + 3 * 5
    # success resets the wait
    while params.current_steps != 0:
        params.on_verify_complete([0], tier=params.tier, batch_size=1)
    assert params.state.probe_wait == 1


def test_step_0_keeps_the_average_and_starts_a_probe_from_a_measured_one() -> None:
    params = AdaptiveSpeculativeParams(0, {**AT_ONCE, "candidate_steps": [0, 3]})
    assert params.ema_accept_len == 0.0
    assert params.update([0])  # the first decision at step 0 is a probe
    assert (params.current_steps, params.ema_accept_len) == (3, 2.0)
    assert params.update([0])
    assert (params.current_steps, params.ema_accept_len) == (0, 0.0)
    params.update([3])
    assert params.ema_accept_len == 0.0


@st.composite
def configs(draw: st.DrawFn, lowest: int = 1) -> dict[str, Any]:
    down = draw(st.floats(-0.49, 0.45))
    steps = draw(st.lists(st.integers(lowest, 12), min_size=1, max_size=5))
    return {
        "candidate_steps": steps,
        "ema_alpha": draw(st.floats(0.01, 1.0)),
        "warmup_batches": draw(st.integers(0, 20)),
        "update_interval": draw(st.integers(1, 9)),
        "down_hysteresis": down,
        "up_hysteresis": draw(st.floats(down, 0.45)),
    }


@settings(deadline=None, max_examples=60)
@given(configs(lowest=0), st.integers(0, 20), st.data())
def test_the_tier_is_always_a_candidate(
    config: dict[str, Any], initial: int, data: st.DataObject
) -> None:
    params = AdaptiveSpeculativeParams(initial, config)
    for share in data.draw(st.lists(st.floats(0, 1), max_size=80)):
        assert params.current_steps in set(config["candidate_steps"])
        params.update([round(share * params.current_steps)])


@settings(deadline=None, max_examples=60)
@given(configs(), st.integers(0, 20))
def test_constant_acceptance_reaches_the_ends(config: dict[str, Any], initial: int) -> None:
    # the average comes within 0.01 of its limit, once for each tier in between
    rounds = int(8 / config["ema_alpha"]) + config["warmup_batches"] + config["update_interval"]
    for accepts_all, end in ((True, max), (False, min)):
        params = AdaptiveSpeculativeParams(initial, config)
        for _ in range(rounds * len(config["candidate_steps"])):
            params.update([params.current_steps if accepts_all else 0])
        assert params.current_steps == end(config["candidate_steps"])


@settings(deadline=None, max_examples=60)
@given(configs(), st.integers(0, 20), st.integers(0, 12))
def test_a_constant_input_does_not_oscillate(
    config: dict[str, Any], initial: int, count: int
) -> None:
    params = AdaptiveSpeculativeParams(initial, config)
    tiers = [params.current_steps]
    for _ in range(2000):
        params.update([min(count, params.current_steps)])
        if params.current_steps != tiers[-1]:
            tiers.append(params.current_steps)
    turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(tiers, tiers[1:], tiers[2:], strict=False))
    assert turns <= 1  # the first tier's assumed average may be off on either side
    assert len(tiers) <= 2 * len(set(config["candidate_steps"]))

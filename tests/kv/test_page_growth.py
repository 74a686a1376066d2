"""Pages grow on demand with few uploads, and move to the requests that lack them."""

from dataclasses import replace

import numpy as np
import pytest

from specjax.kv.budget import GROW_DISPATCHES, MIN_RESERVE
from specjax.runtime.runner import SLOT_INPUTS
from specjax.sampling.params import SamplingParams
from specjax.scheduling.request import RunningRequest

from ..support.runners import make_request, plain_outputs
from ..support.schedulers import STEPS, Serving

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(6)
PROMPTS = [RNG.integers(6, 61, size=n).tolist() for n in (3, 4, 2, 4)]
SEEDS = range(len(PROMPTS))
LONG = SamplingParams(temperature=0.0, max_new_tokens=120, ignore_eos=True)
SHAPES = [(STEPS, 1), (0, 4), (0, 1)]


@pytest.mark.parametrize(
    ("num_steps", "rounds", "run_ahead"),
    [pytest.param(STEPS, 1, 1, marks=pytest.mark.slow), (0, 4, 2), (0, 1, 0), (0, 1, 2)],
)
def test_rows_hold_only_pages_that_they_write_soon(num_steps, rounds, run_ahead) -> None:
    serving = Serving(num_steps=num_steps, rounds=rounds, run_ahead=run_ahead)
    requests = serving.add(PROMPTS, LONG)
    advance = rounds * (num_steps + 1)
    while serving.scheduler.has_work:
        serving.step()
        for row in serving.rows:
            known = len(row.request.input_ids) + len(row.request.output_ids)
            tokens = len(row.pages) * 4
            # the watched runner has checked that they suffice
            assert tokens <= known + (run_ahead + GROW_DISPATCHES) * advance + 3
            assert tokens <= row.request.max_kv_tokens + 3
    assert [r.output_ids for r in requests] == plain_outputs(PROMPTS, LONG, SEEDS)
    serving.check_clean()


@pytest.mark.parametrize(("num_steps", "rounds"), SHAPES)
def test_page_tables_are_seldom_uploaded(num_steps, rounds, monkeypatch) -> None:
    serving = Serving(num_steps=num_steps, rounds=rounds, run_ahead=1)
    uploads = []
    read = SLOT_INPUTS["pages"]
    monkeypatch.setitem(SLOT_INPUTS, "pages", lambda runner: uploads.append(1) or read(runner))
    requests = serving.add(PROMPTS, LONG)
    while len(serving.rows) < len(PROMPTS):  # one prefill per step
        serving.step()
    at_start = len(uploads)
    while not any(r.is_finished for r in requests):
        before = len(uploads)
        serving.step()
    num_rounds = serving.watched.calls.count("round")
    assert before - at_start <= 2 + num_rounds // 4
    serving.finish()


def test_slack_goes_to_who_needs_it() -> None:
    """Three rows hold more than they need; the pool has no free page for the fourth."""
    serving = Serving(num_pages=1 + 90)
    params = replace(LONG, max_new_tokens=60)
    old = serving.add(PROMPTS[:3], params)
    while serving.watched.calls.count("round") < 2:
        serving.step()
    spare = serving.allocator.allocate(serving.allocator.num_free)
    assert spare is not None
    held = [len(row.pages) for row in serving.rows]
    (new,) = serving.add(PROMPTS[3:], replace(params, max_new_tokens=2))
    serving.scheduler.step()
    assert len(serving.running) + new.is_finished == 4
    assert sum(len(row.pages) for row in serving.rows[:3]) < sum(held)
    serving.allocator.free(spare)
    serving.finish()
    assert sum(r.num_retractions for r in [*old, new]) == 0
    expected = plain_outputs(PROMPTS[:3], LONG, SEEDS[:3])
    assert [r.output_ids for r in old] == [whole[:60] for whole in expected]


def test_the_cache_gives_way_before_a_request_does() -> None:
    serving = Serving(num_pages=1 + 40, is_cached=True)
    assert serving.cache is not None
    serving.add(PROMPTS, replace(LONG, max_new_tokens=30))
    serving.finish()
    assert serving.cache.num_pages >= 20
    (request,) = serving.add([[60, *PROMPTS[0]]], LONG)
    serving.finish()
    assert request.num_retractions == 0
    assert len(request.output_ids) == 120


def test_preemptions_make_admissions_more_careful() -> None:
    """A third request fits at first, not after two preemptions, and fits again later."""
    serving = Serving(num_steps=0, num_pages=1 + 44)
    running = serving.add(PROMPTS[:2], LONG)
    while len(serving.rows) < 2:
        serving.step()
    budget = serving.scheduler._budget
    request = make_request(PROMPTS[2], LONG)

    def fits() -> bool:
        row = RunningRequest(
            request=request,
            slot=4,
            prefill_ids=request.known_ids,
            max_kv_tokens=request.max_kv_tokens,
            num_cacheable=request.num_cacheable,
        )
        is_admitted = budget.admit(row, serving.rows, budget.capacity(serving.rows))
        if is_admitted:
            budget.release(row, None)
        return is_admitted

    assert [row.request for row in serving.rows] == running
    assert fits()
    budget.raise_reserve()
    budget.raise_reserve()
    assert not fits()
    for _ in range(1000):
        assert budget.grow((), serving.rows)
    assert fits()
    # the reserve stays within its bounds
    for _ in range(10):
        budget.raise_reserve()
    assert budget._reserve == 1.0
    for _ in range(3000):
        budget.grow((), serving.rows)
    assert budget._reserve == MIN_RESERVE
    serving.finish()

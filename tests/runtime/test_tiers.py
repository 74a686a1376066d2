"""Several step counts over one state: switching between any two rounds changes no token."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from specjax.adaptive import AdaptiveController
from specjax.adaptive.round_seconds import measure_round_seconds
from specjax.runtime.runner import ModelRunner, RunnerConfig
from specjax.sampling.params import SamplingParams

from ..copying import copied_weights, plain_output, plain_outputs
from ..scheduling.serving import Serving
from ..settings import counted_compilations
from ..tiny import EAGLE3, TARGET, Networks, make_request, make_runner

TIERS = (0, 1, 3, 4)
RNG = np.random.default_rng(21)
PROMPTS = [RNG.integers(6, 61, size=n).tolist() for n in (9, 5, 20, 3, 7, 30)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.95)


@cache
def tier_runner(rounds: int = 1) -> ModelRunner:
    """A compiled runner of all tiers."""
    config = make_runner(EAGLE3, 4).config
    config = replace(config, other_tiers=TIERS[:-1], rounds_per_dispatch=rounds)
    runner = ModelRunner(Networks.of(TARGET, EAGLE3), config)
    runner.compile(show_progress=False)
    runner.load(*copied_weights())
    return runner


class Forced:
    """A policy that does as it is told, and remembers what it hears."""

    candidate_steps = TIERS
    current_steps = 0

    def __init__(self, steps: Any) -> None:
        self._steps = steps
        self.heard: list[tuple[list[int], int, int]] = []

    def steps_for_batch(self, batch_size: int) -> int:
        self.current_steps = next(self._steps)
        return self.current_steps

    def on_verify_complete(
        self, counts: Sequence[int], *, executed_steps: int, batch_size: int
    ) -> bool:
        self.heard.append((list(counts), executed_steps, batch_size))
        return False

    def describe(self) -> dict[str, Any]:
        return {}


def serving_with(steps: Any, *, rounds: int = 1, **options: Any) -> tuple[Serving, Forced]:
    runner, policy = tier_runner(rounds), Forced(steps)
    runner.reset_rows()
    serving = Serving(runner=runner, **options)
    controller = AdaptiveController(serving.watched, policy)  # type: ignore[arg-type]
    controller.init_states()
    serving.scheduler._controller = controller
    return serving, policy


def random_steps(seed: int) -> Any:
    rng, last = random.Random(seed), -1
    while True:
        last = rng.choice([steps for steps in TIERS if steps != last])
        yield last


def stretches(rng: random.Random) -> Any:
    """Tiers that stay for some rounds, often without drafts."""
    while True:
        yield from [rng.choice((*TIERS, 0))] * rng.randint(1, 6)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("rounds", "run_ahead"), [(1, 0), (1, 1), (1, 2), (3, 1)])
def test_forced_switches_change_no_token(rounds, run_ahead, params) -> None:
    serving, policy = serving_with(random_steps(5), rounds=rounds, run_ahead=run_ahead)
    requests = serving.add(PROMPTS, params)
    serving.finish()
    assert [r.output_ids for r in requests] == plain_outputs(PROMPTS, params, range(6))
    executed = {steps for _, steps, _ in policy.heard}
    assert executed == set(TIERS)
    for request in requests:
        meta = request.result()["meta_info"]
        by_steps = {int(k): n for k, n in meta["spec_rounds_by_steps"].items()}
        verifies = sum(n for steps, n in by_steps.items() if steps)
        assert meta["spec_verify_ct"] == verifies == sum(meta["spec_correct_drafts_histogram"])
        proposed = sum(steps * n for steps, n in by_steps.items())
        assert proposed - 4 <= meta["spec_num_proposed_drafts"] <= proposed
        wasted = meta["spec_num_proposed_drafts"] - meta["spec_num_correct_drafts"]
        assert meta["spec_num_wasted_drafts"] == wasted
        if rounds == 1:
            assert meta["spec_num_switches"] > 5
        assert "spec_ema_accept_len" in meta


def test_the_policy_hears_of_every_round_and_what_it_ran_with() -> None:
    serving, policy = serving_with(random_steps(6), run_ahead=1)
    requests = serving.add(PROMPTS[:3], GREEDY)
    serving.finish()
    for counts, steps, batch_size in policy.heard:
        assert 0 <= min(counts, default=0)
        assert max(counts, default=0) <= steps
        assert len(counts) <= batch_size <= 3
    correct = sum(r.spec.num_correct_drafts for r in requests if r.spec)
    # the last round of a request may bring more than is kept
    heard = sum(sum(counts) for counts, _, _ in policy.heard)
    assert correct <= heard <= correct + 4 * 3


def test_the_policy_hears_nothing_of_requests_that_ended() -> None:
    """A round is in flight when one of its requests is aborted."""
    serving, policy = serving_with(random_steps(6), run_ahead=2)
    requests = serving.add(PROMPTS[:3], GREEDY)
    while len(policy.heard) < 8:
        serving.step()
    serving.scheduler.abort(requests[1])
    heard = len(policy.heard)
    serving.step()
    serving.step()
    assert len(policy.heard) > heard
    for counts, _, batch_size in policy.heard[heard:]:
        assert len(counts) == 2
        assert batch_size in (2, 3)
    assert policy.heard[heard][2] == 3
    serving.finish()


@pytest.mark.parametrize(("rounds", "run_ahead"), [(1, 0), (1, 1), (1, 2), (3, 1)])
def test_switches_beside_all_that_a_scheduler_does(rounds, run_ahead) -> None:
    """Retractions, prefixes out of the cache, flushes and aborts, with tiers that go up and down.

    A request that resumes, or reads another's draft KV, may do so between any two tiers.
    """
    rng = random.Random(rounds + run_ahead)
    serving, policy = serving_with(
        stretches(rng), rounds=rounds, run_ahead=run_ahead, num_pages=1 + 25, is_cached=True
    )
    prompts = [text for prompt in PROMPTS for text in (prompt, [*prompt, 9, 9], prompt)]
    params = [GREEDY, SEEDED]
    requests = [
        make_request(prompt, params[i % 2], seed=i % 5, width=TIERS[-1])
        for i, prompt in enumerate(prompts)
    ]
    serving.add_all(requests)
    num_steps = 0
    while serving.scheduler.has_work:
        serving.step()
        num_steps += 1
        if num_steps % 60 == 0:
            serving.scheduler.flush_cache()
        if num_steps % 50 == 0 and serving.running:
            serving.scheduler.abort(rng.choice(serving.running))
    serving.check_clean()
    num_aborted = 0
    for i, request in enumerate(requests):
        whole = plain_output(tuple(request.input_ids), params[i % 2], i % 5)
        assert request.output_ids == whole[: len(request.output_ids)]
        num_aborted += len(request.output_ids) < len(whole)
    assert num_aborted < 8
    assert sum(r.num_retractions for r in requests) >= 3
    assert sum(r.cached_tokens for r in requests) > 50
    assert {steps for _, steps, _ in policy.heard} == set(TIERS)


def test_a_thousand_switches_compile_nothing() -> None:
    serving, policy = serving_with(random_steps(7), run_ahead=1)
    rng = random.Random(1)
    with counted_compilations() as compiled, jax.transfer_guard("disallow"):
        while len(policy.heard) < 1000:
            if serving.scheduler.num_waiting < 2:
                serving.add([rng.choice(PROMPTS)], rng.choice((GREEDY, SEEDED)))
            serving.step()
    serving.finish()
    assert not compiled
    assert serving.scheduler._controller is not None
    assert serving.scheduler._controller.switches > 990


def dispatched(runner: ModelRunner, steps: int) -> np.ndarray:
    runner.apply_runtime_state(runner.build_adaptive_runtime_state(steps, steps + 1))
    return runner.round([1]).read()[0, 0]


def start(runner: ModelRunner) -> int:
    """A request in slot 1; returns its first token."""
    runner.reset_rows()
    runner.set_slot(1, GREEDY, seed=0)
    runner.set_pages(1, range(1, 20))
    return int(runner.prefill(1, PROMPTS[0], 0, None).read()[0])


def test_drafting_begins_where_it_would_have_been() -> None:
    """Behind rounds without drafts the head knows all that it would know otherwise."""
    runner = tier_runner()
    expected = plain_output(tuple(PROMPTS[0]), GREEDY, 0)
    tokens = [start(runner)]
    for _ in range(6):
        *ids, drafts, count = dispatched(runner, 0).tolist()
        assert (len(ids), drafts, count) == (1, 0, 1)
        tokens += ids
    rested = np.asarray(runner.future.rows.hidden[1])
    assert dispatched(runner, 4).tolist()[1:] == [0, 1]  # one more plain round makes a draft
    tokens += [int(runner.future.rows.bonus_tokens[1])]
    after = jax.tree.map(lambda leaf: np.asarray(leaf[1]), runner.future.rows)
    rests = np.asarray(runner.pools.draft)[:, 4 : 4 + len(PROMPTS[0]) + 7]
    assert not np.array_equal(rested, after.hidden)

    # the same with the whole head in every round
    assert start(runner) == tokens[0]
    drafting = runner.build_adaptive_runtime_state(0, 1)
    for token in tokens[1:]:
        runner._resting, runner._rested = drafting, {1}
        runner.apply_runtime_state(runner.build_adaptive_runtime_state(4, 5))
        assert runner.round([1]).read()[0, 0].tolist() == [token, 0, 1]
    whole = jax.tree.map(lambda leaf: np.asarray(leaf[1]), runner.future.rows)
    for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    always = np.asarray(runner.pools.draft)[:, 4 : 4 + len(PROMPTS[0]) + 7]
    np.testing.assert_allclose(rests, always, atol=1e-5)
    assert tokens == expected[: len(tokens)]
    runner.clear_slot(1)
    runner.reset_rows()


def test_rows_that_did_not_rest_draft_at_once() -> None:
    runner = tier_runner()
    start(runner)
    assert dispatched(runner, 0).tolist()[1:] == [0, 1]
    start(runner)  # another request in the same slot
    runner.apply_runtime_state(runner.build_adaptive_runtime_state(4, 5))
    assert runner.round([1]).num_steps == 4
    runner.clear_slot(1)
    runner.reset_rows()


def test_a_resting_head_computes_no_more_than_its_keys_and_values() -> None:
    runner = tier_runner()

    def flops(name: str) -> float:
        return runner.compiled[name, 0, 1].cost_analysis()["flops"]

    plain = make_runner().compiled["round", 0, 1].cost_analysis()["flops"]
    head = flops("drafting_round") - plain
    assert 0 < flops("round") - plain < 0.6 * head


def test_measured_rounds_leave_nothing_behind() -> None:
    runner = tier_runner()
    before = runner.speculative_num_steps
    with counted_compilations() as compiled:
        seconds = measure_round_seconds(runner)
    assert not compiled
    assert set(seconds) == {(steps, batch) for steps in TIERS for batch in (1, 4)}
    assert all(0 < value < 1 for value in seconds.values())
    assert runner.speculative_num_steps == before
    assert not runner.tables.page_table.any()
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(runner.future))
    serving, _ = serving_with(random_steps(8))
    requests = serving.add(PROMPTS, SEEDED)
    serving.finish()
    assert [r.output_ids for r in requests] == plain_outputs(PROMPTS, SEEDED, range(6))


@pytest.mark.parametrize("tiers", [(3, 1), (1, 1), (4,), (5,), (-1, 2)])
def test_tiers_ascend(tiers) -> None:
    config = make_runner(EAGLE3, 4).config
    with pytest.raises(ValueError, match="must ascend"):
        replace(config, other_tiers=tiers)


def test_a_tier_that_is_not_compiled_is_refused() -> None:
    runner = tier_runner()
    for steps, rows in ((2, 3), (3, 3)):
        with pytest.raises(ValueError, match="not one of the compiled tiers"):
            runner.build_adaptive_runtime_state(steps, rows)


def test_config_of_one_tier() -> None:
    config: RunnerConfig = make_runner(EAGLE3, 4).config
    assert config.tiers == (4,)

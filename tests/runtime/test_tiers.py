"""Several step counts over one state: switching between any two rounds changes no token."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from specjax.adaptive import TierController
from specjax.adaptive.cost import CONTEXTS
from specjax.runtime.runner import ModelRunner
from specjax.runtime.timing import measure_round_seconds
from specjax.sampling.params import SamplingParams
from specjax.speculative.prefill import Chunk
from specjax.testing import EAGLE3
from specjax.types import NO_DRAFTS, DraftShape

from ..support.compilation import counted_compilations
from ..support.runners import (
    chains,
    copied_runner,
    make_request,
    make_runner,
    plain_output,
    plain_outputs,
)
from ..support.schedulers import Forced, Serving

pytestmark = pytest.mark.slow

TIERS = (0, 1, 4)
RNG = np.random.default_rng(21)
PROMPTS = [RNG.integers(6, 61, size=n).tolist() for n in (9, 5, 20, 3, 7, 30)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.95)


def tier_runner(rounds: int = 1) -> ModelRunner:
    """A compiled runner of all tiers."""
    return copied_runner(TIERS[-1], rounds, shapes=chains(*TIERS))


def serving_with(steps: Any, *, rounds: int = 1, **options: Any) -> tuple[Serving, Forced]:
    runner = tier_runner(rounds)
    policy = Forced(runner, map(DraftShape.chain, steps))
    runner.reset_rows()
    controller = TierController(policy)
    return Serving(runner=runner, controller=controller, **options), policy


def random_steps(seed: int) -> Any:
    rng, last = random.Random(seed), -1
    while True:
        last = rng.choice([steps for steps in TIERS if steps != last])
        yield last


def stretches(rng: random.Random) -> Any:
    """Random tiers, each for some rounds, often without drafts."""
    while True:
        yield from [rng.choice((*TIERS, 0))] * rng.randint(1, 6)


def test_ended_requests_are_not_reported_to_the_policy() -> None:
    """A round is in flight when one of its requests is aborted."""
    serving, policy = serving_with(random_steps(6), run_ahead=2)
    requests = serving.add(PROMPTS[:3], GREEDY)
    while len(policy.reported) < 8 and serving.scheduler.has_work:
        serving.step()
    serving.scheduler.abort(requests[1])
    heard = len(policy.reported)
    serving.step()
    serving.step()
    assert len(policy.reported) > heard
    for counts, _, batch_size in policy.reported[heard:]:
        assert len(counts) == 2
        assert batch_size == 4  # padded
    serving.finish()


@pytest.mark.long_after(1)
@pytest.mark.parametrize(("rounds", "run_ahead"), [(1, 0), (1, 2), (3, 1)])
def test_switches_during_all_that_a_scheduler_does(rounds, run_ahead) -> None:
    """Preemptions, cached prefixes, flushes and aborts, while tiers go up and down.

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
        if num_steps % 70 == 0 and serving.running:
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
    assert {steps for _, steps, _ in policy.reported} == set(TIERS)


def test_hundreds_of_switches_compile_nothing() -> None:
    serving, policy = serving_with(random_steps(7), run_ahead=1)
    serving.runner.compile(show_progress=False)
    rng = random.Random(1)
    with counted_compilations() as compiled, jax.transfer_guard("disallow"):
        while len(policy.reported) < 500:
            if serving.num_waiting < 2:
                serving.add([rng.choice(PROMPTS)], rng.choice((GREEDY, SEEDED)))
            serving.step()
    serving.finish()
    assert not compiled
    assert serving.scheduler._controller is not None
    assert serving.scheduler._controller.switches > 145


def test_rounds_without_proposals_are_ignored_without_a_plain_tier(caplog) -> None:
    """The first round after plain ones has nothing to draft from."""
    serving, policy = serving_with(iter([0, 0, *[4] * 100]))
    (request,) = serving.add(PROMPTS[:1], GREEDY)
    while len(policy.reported) < 2:
        serving.step()
    controller = serving.scheduler._controller
    controller.tiers = {tier: controller.tiers[tier] for tier in chains(1, 4)}
    serving.finish()
    assert [request.output_ids] == plain_outputs(PROMPTS[:1], GREEDY, range(1))
    assert [steps for _, steps, _ in policy.reported[:3]] == [0, 0, 4]
    assert "failed on the result of a round" not in caplog.text


def test_a_policy_that_refuses_a_round_ends_no_request(caplog) -> None:
    serving, policy = serving_with(random_steps(9))

    def refuse(counts: Sequence[int], **_: Any) -> bool:
        raise ValueError("num_accepted_drafts=[9]")

    policy.on_verify_complete = refuse  # type: ignore[method-assign,assignment]
    requests = serving.add(PROMPTS[:2], GREEDY)
    serving.finish()
    assert [r.output_ids for r in requests] == plain_outputs(PROMPTS[:2], GREEDY, range(2))
    assert "policy failed on the result of a round: num_accepted_drafts=[9]" in caplog.text


def dispatched(runner: ModelRunner, steps: int) -> tuple[list[int], list[int]]:
    """Tokens of a round of slot 1, and its numbers of proposed drafts, accepted ones and tokens."""
    result = runner.round([1], DraftShape.chain(steps))
    *tokens, proposed, accepted, count = result.read()[0, 0].tolist()
    return tokens[:count], [proposed, accepted, count]


def start(runner: ModelRunner, text: list[int]) -> int:
    """A request in slot 1; returns its first token."""
    runner.reset_rows()
    runner.set_slot(1, GREEDY, seed=0)
    runner.set_pages(1, range(1, 20))
    width = runner.config.prefill_buckets[-1]
    for at in range(0, len(text), width):
        result = runner.prefill([Chunk.of(1, text, at, at + width)])
    return int(result.read()[0])


def known(runner: ModelRunner, length: int) -> tuple[Any, np.ndarray]:
    """The state that slot 1 drafts from, and the draft's KV of its text."""
    rows = jax.tree.map(lambda leaf: np.asarray(leaf[1]), runner.on_device.future.rows)
    return rows, np.asarray(runner.on_device.pools.draft)[:, 4 : 4 + length]


def test_drafting_resumes_after_rounds_without_drafts() -> None:
    """The first round has nothing to propose; then the draft's state is as after a prefill."""
    runner, prompt = tier_runner(), PROMPTS[0]
    tokens = [start(runner, prompt)]
    for _ in range(6):
        found, figures = dispatched(runner, 0)
        assert figures == [0, 0, 1]
        tokens += found
    found, figures = dispatched(runner, 4)
    assert figures == [0, 0, 1]
    tokens += found
    assert tokens == plain_output(tuple(prompt), GREEDY, 0)[: len(tokens)]
    text = prompt + tokens[:-1]
    rows, kv = known(runner, len(text))
    assert dispatched(runner, 4)[1][0] == 4
    assert start(runner, text) == tokens[-1]
    fresh, fresh_kv = known(runner, len(text))
    for ours, theirs in zip(jax.tree.leaves(rows), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(kv, fresh_kv, rtol=1e-4, atol=1e-5)
    runner.clear_slot(1)
    runner.reset_rows()


def test_rows_that_come_from_a_prefill_draft_at_once() -> None:
    runner = tier_runner()
    start(runner, PROMPTS[0])
    assert dispatched(runner, 0)[1] == [0, 0, 1]
    start(runner, PROMPTS[0])  # another request in the same slot
    assert dispatched(runner, 4)[1][0] == 4
    runner.clear_slot(1)
    runner.reset_rows()


def test_a_resting_draft_computes_no_more_than_its_keys_and_values() -> None:
    runner, batch = tier_runner(), 4

    def flops(of: ModelRunner) -> float:
        return of.compiled["round", NO_DRAFTS, batch].cost_analysis()["flops"]

    draft = runner.networks.draft
    kernels = zip(draft.names, draft.abstract, strict=True)
    whole = sum(2 * batch * leaf.size for name, leaf in kernels if name.endswith("kernel"))
    assert 0 < flops(runner) - flops(make_runner()) < 0.7 * whole


def test_measured_rounds_leave_no_trace() -> None:
    runner = tier_runner()
    runner.compile(show_progress=False)
    with counted_compilations() as compiled:
        seconds = measure_round_seconds(runner, CONTEXTS)
    assert not compiled
    assert set(seconds) == {(tier, 4) for tier in chains(*TIERS)}
    assert all(0 < value < 1 for pair in seconds.values() for value in pair)
    assert not runner.tables.page_tables[0].any()
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(runner.on_device.future))
    serving, _ = serving_with(random_steps(8))
    requests = serving.add(PROMPTS, SEEDED)
    serving.finish()
    assert [r.output_ids for r in requests] == plain_outputs(PROMPTS, SEEDED, range(6))


@pytest.mark.parametrize("tiers", [(3, 1), (1, 1), (), (-1, 2)])
def test_tiers_ascend(tiers) -> None:
    config = make_runner(EAGLE3, 4).config
    with pytest.raises(ValueError, match="must ascend"):
        replace(config, shapes=chains(*tiers))


def test_a_tier_that_is_not_compiled_is_refused() -> None:
    for tier in (DraftShape.chain(2), DraftShape.chain(4, 4)):
        with pytest.raises(ValueError, match=r"tier=.* is not compiled"):
            tier_runner().round([1], tier)

"""DFLASH and DSPARK: texts, the context that rounds leave, tiers, and sizes of the block."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.runtime.runner import ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.testing import Job, dense_decode
from specjax.types import NO_DRAFTS, DraftShape, VerifyInput, VerifyOutput

from ..support.model_files import BLOCK, write_block_draft
from ..support.runners import make_request, run_requests
from .blocks import CONFIGS, block_runner
from .driver import serve, start

pytestmark = pytest.mark.slow

COUNT = 20


def tiers_of(block: int) -> tuple[DraftShape, ...]:
    return (NO_DRAFTS, DraftShape(2, 1, 3, block), DraftShape(4, 1, 5, block))


@pytest.fixture(scope="module", params=CONFIGS)
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    """A runner with random weights and the target's logits as a part of the Markov head."""
    return block_runner(request.param, tiers_of(CONFIGS[request.param].block))


RNG = np.random.default_rng(8)
PARAMS = [
    SamplingParams(max_new_tokens=COUNT, temperature=0.0),
    # with the target's noise, even random networks agree occasionally
    SamplingParams(max_new_tokens=COUNT, temperature=2.5),
    SamplingParams(max_new_tokens=COUNT, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=COUNT, temperature=0.9, top_p=0.9),
    # up to the last token that fits the pages with a whole block after it
    SamplingParams(max_new_tokens=8, temperature=1.0),
]
JOBS = [
    Job(prompt=tuple(RNG.integers(6, 60, size=size).tolist()), params=params, seed=i)
    for i, (params, size) in enumerate(zip(PARAMS, (5, 21, 1, 16, 115), strict=True))
]


@pytest.mark.long_after(3)
@pytest.mark.parametrize("steps", [0, 2, 4])
def test_tokens_equal_dense_decoding(runner: ModelRunner, steps: int) -> None:
    """With any number of verified drafts; prompts of several chunks."""
    tier = next(tier for tier in runner.config.shapes if tier.steps == steps)
    outputs = serve(runner, JOBS, tier)
    for job, output in zip(JOBS, outputs, strict=True):
        assert output.tokens == dense_decode(runner.weights[0], job).tokens
    assert (outputs[1].num_rounds < COUNT - 3) == (steps > 0)


def test_a_scheduler_that_runs_ahead_changes_nothing(runner: ModelRunner) -> None:
    requests = [
        make_request(list(job.prompt), replace(job.params, ignore_eos=True), seed=job.seed)
        for job in JOBS
    ]
    run_requests(runner, requests, run_ahead=1)
    for job, request in zip(JOBS, requests, strict=True):
        assert request.output_ids == dense_decode(runner.weights[0], job).tokens


Round = tuple[list[int], list[int]]


def rounds_of(runner: ModelRunner, tiers: list[DraftShape]) -> Iterator[Round]:
    """Drafts and accepted tokens of slot 1 in a round of each tier."""
    found: list[Round] = []

    def watch(slots: jax.Array, tree: VerifyInput, verified: VerifyOutput) -> None:
        count = int(verified.num_accepted_tokens[0])
        found.append(
            (tree.draft_tokens[0, 1:].tolist(), verified.accept_tokens[0][:count].tolist())
        )

    runner.watch_rounds(watch)
    for tier in tiers:
        runner.round([1], tier)
        yield found[-1]
    runner.watch_rounds(None)


def context_of(runner: ModelRunner, slot: int, count: int) -> np.ndarray:
    """Draft KV ``[L, N, 2, KV, H]`` of a slot's first tokens."""
    size = runner.config.page_size
    per_slot = (runner.config.num_pages - 1) // (runner.config.num_slots - 1)
    begin = (1 + (slot - 1) * per_slot) * size
    return np.asarray(runner.on_device.pools.draft[:, begin : begin + count])


@pytest.mark.long_after(1)
def test_rounds_leave_the_context_that_a_prefill_writes(runner: ModelRunner) -> None:
    """Rejected rows and the block leave no trace, in tiers that take turns, also without drafts."""
    job = replace(JOBS[1], params=replace(JOBS[1].params, max_new_tokens=60))
    text = [*job.prompt, int(start(runner, 1, job).read()[0])]
    accepted = 0
    for drafts, tokens in rounds_of(runner, [*reversed(runner.config.shapes)] * 4):
        accepted += len(tokens) - 1
        assert tokens[:-1] == drafts[: len(tokens) - 1]
        text += tokens
    assert 0 < accepted
    after_rounds = context_of(runner, 1, len(text) - 1)
    start(runner, 2, replace(job, prompt=tuple(text)))
    np.testing.assert_allclose(after_rounds, context_of(runner, 2, len(text) - 1), atol=1e-5)
    for slot in (1, 2):
        runner.clear_slot(slot)


def test_drafts_after_a_prefix_cache_hit_are_those_of_a_cold_start(runner: ModelRunner) -> None:
    job = replace(JOBS[1], prompt=JOBS[1].prompt[:20])
    found = []
    for cached in (0, 12):  # whole pages
        first = start(runner, 1, job, num_cached=cached).read()[0]
        found.append((first, list(rounds_of(runner, [runner.config.largest] * 4))))
        runner.clear_slot(1)
    assert found[0] == found[1]


def test_the_block_does_not_depend_on_the_rows_that_are_verified(runner: ModelRunner) -> None:
    found = {}
    for tier in runner.config.shapes[1:]:
        start(runner, 1, JOBS[0])
        ((found[tier.steps], _),) = rounds_of(runner, [tier])
        runner.clear_slot(1)
    assert found[4][:2] == found[2]


def planned(files: Any, draft: Path, **options: Any) -> tuple[DraftShape, ...]:
    arguments = files.arguments(speculative=False, draft=draft, **options)
    return plan_engine(EngineArgs(**arguments)).config.shapes


def test_sizes_of_the_block(files: Any, tmp_path: Path) -> None:
    dspark = write_block_draft(tmp_path / "dspark")
    dflash = write_block_draft(tmp_path / "dflash", markov_head=None)
    spark, flash = {"speculative_algorithm": "DSPARK"}, {"speculative_algorithm": "DFLASH"}
    most = BLOCK.num_drafts
    assert planned(files, dspark, **spark) == (DraftShape(most, 1, most + 1, most),)
    assert planned(files, dflash, **flash) == (DraftShape(most, 1, most + 1, most + 1),)
    steps, nodes = "speculative_num_steps", "speculative_num_draft_tokens"
    for given in ({steps: 2}, {nodes: 3}, {steps: 2, nodes: 3}):
        assert planned(files, dspark, **spark, **given) == (DraftShape(2, 1, 3, most),)
    adaptive = {"speculative_adaptive": True}
    tiers = {"speculative_adaptive_config": {"candidate_steps": [0, 2, 5]}}
    expected = (NO_DRAFTS, DraftShape(2, 1, 3, most), DraftShape(5, 1, 6, most))
    assert planned(files, dspark, **spark, **adaptive, **tiers) == expected
    assert [tier.steps for tier in planned(files, dspark, **spark, **adaptive)] == [1, 3, most]
    budget = {"speculative_adaptive_config": {"policy": "budget"}}
    found = {tier.steps for tier in planned(files, dspark, **spark, **adaptive, **budget)}
    assert found == {0, 1, 3, most}
    deep = {"speculative_adaptive_config": {"candidate_steps": [2, 7]}}
    for options, message in (
        ({steps: 6}, "speculative_num_steps=6 must be at most 5 for the 5 drafts of a block of 5"),
        (adaptive | {steps: 60}, "speculative_num_steps=60 must be at most 5"),
        ({nodes: 7}, "speculative_num_draft_tokens=7 must be at most 6"),
        ({nodes: 65}, "speculative_num_draft_tokens=65 must be from 2 to 64"),
        ({nodes: 1}, "speculative_num_draft_tokens=1 must be from 2 to 64"),
        (adaptive | deep, "candidate_steps=7 must be at most 5"),
        ({"simulate_accept_length": 7.0}, "simulate_accept_length=7.0 must be from 1 to 6"),
        ({steps: 3, nodes: 3}, r"draft_tokens=3 must be speculative_num_steps \+ 1 = 4"),
        ({steps: 0}, "speculative_num_steps=0 must be from 1 to 63"),
        ({"speculative_eagle_topk": 2}, "speculative_eagle_topk.* no effect"),
    ):
        with pytest.raises(ValueError, match=message):
            planned(files, dspark, **spark, **options)
    for draft, options, other in ((dspark, flash, "DSPARK"), (dflash, spark, "DFLASH")):
        with pytest.raises(ValueError, match=f"Markov head; set speculative_algorithm='{other}'"):
            planned(files, draft, **options)


def test_acceptance_by_probabilities_and_updates_of_weights(files: Any, tmp_path: Path) -> None:
    """Rejection sampling keeps greedy texts; a weight that repeats another needs both."""
    draft = write_block_draft(tmp_path / "dspark", markov_head="gated")
    options: dict[str, Any] = {"speculative_use_rejection_sampling": True, "dtype": "float32"}
    with files.small(draft=draft, speculative_algorithm="DSPARK", **options) as engine:
        prompt = [3, 4, 5, 6]
        greedy = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
        job = Job(prompt=tuple(prompt), params=greedy)
        expected = dense_decode(engine.runner.weights[0], job, engine.target.config).tokens
        first = engine.generate(input_ids=prompt, sampling_params=greedy)
        assert first["output_ids"] == expected
        assert first["meta_info"]["spec_num_correct_drafts"] > 8
        sampled = replace(greedy, temperature=0.8, sampling_seed=3)
        found = engine.generate(input_ids=prompt, sampling_params=sampled)
        assert found["meta_info"]["spec_num_correct_drafts"] > 0
        nets = engine.runner.networks.draft
        named = dict(zip(nets.names, map(np.asarray, engine.runner.weights[1]), strict=True))
        zeros = {name: np.zeros_like(x) for name, x in named.items() if "markov" in name}
        engine.update_weights_from_tensor(zeros, draft=True)
        again = engine.generate(input_ids=prompt, sampling_params=greedy)
        assert again["output_ids"] == expected
        assert again["meta_info"]["spec_num_correct_drafts"] < 8
        name = "layers.0.attention.qkv.kernel"
        with pytest.raises(ValueError, match=f"{name}' but not 'context.kernel', which contains"):
            engine.update_weights_from_tensor({name: named[name]}, draft=True)
        # the engine may also be running the same network from a file in another format
        (old,) = engine._plan.drafts
        other = replace(old, config=replace(old.config, checkpoint_format="DSpark of DeepSpec"))
        engine._plan = replace(engine._plan, drafts=(other,))
        engine.update_weights_from_disk(draft_path=draft)
        last = engine.generate(input_ids=prompt, sampling_params=greedy)
        assert last["output_ids"] == expected
        counts = (result["meta_info"]["spec_num_correct_drafts"] for result in (first, last))
        assert len(set(counts)) == 1

"""Multi-token prediction modules: tokens of plain decoding, and drafts of dense modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.engine.args import EngineArgs
from specjax.runtime.runner import ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.speculative.algorithm import Batch
from specjax.speculative.multi_layer_eagle import run_module
from specjax.types import DraftShape

from ..support.runners import plain_outputs
from ..support.schedulers import Serving, forced
from .identity import JOBS, check, expected
from .mtp import MODULES, dense_modules, mtp_runner

RNG = np.random.default_rng(8)
# shorter than the number of modules; with several chunks; with a common prefix
SHARED = RNG.integers(6, 61, size=23).tolist()
PROMPTS = [
    *(RNG.integers(6, 61, size=n).tolist() for n in (1, 2, 3, 9, 16, 17, 40)),
    *(SHARED[:n] + RNG.integers(6, 61, size=m).tolist() for n, m in ((23, 1), (21, 5), (23, 9))),
]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95)


@contextmanager
def watched(serving: Serving) -> Iterator[list]:
    """Request, tokens in the pool and drafts of every row in every round."""
    rounds: list = []
    runner: ModelRunner = serving.runner

    def watch(slots, tree, verified) -> None:
        requests = {row.slot: row.request for row in serving.rows}
        tokens, lengths = np.asarray(tree.draft_tokens), np.asarray(tree.positions)[:, 0]
        counts = np.asarray(verified.num_accepted_tokens)
        for i, slot in enumerate(np.asarray(slots).tolist()):
            if counts[i]:
                rounds.append((requests[slot], int(lengths[i]), tokens[i, 1:].tolist()))

    runner.watch_rounds(watch)
    yield rounds
    runner.watch_rounds(None)


def check_drafts(rounds: list) -> None:
    assert rounds
    for request, length, drafts in rounds:
        text = [*request.input_ids, *request.output_ids][: length + 1]
        assert drafts == dense_modules(text)[0][: len(drafts)], text


def check_kv(serving: Serving) -> int:
    """Check all final KV in the pool; return the number of rows that have their first token."""
    size = serving.runner.config.page_size
    pool = np.asarray(serving.runner.on_device.pools.draft)
    rows = [row for row in serving.rows if row.request.output_ids]
    for row in rows:
        text = row.request.known_ids
        positions = np.arange(len(text) - 1)
        slots = np.array(row.pages)[positions // size] * size + positions % size
        truth = dense_modules(text)[1]
        for k in range(MODULES.num_layers):
            final = positions[: max(0, len(text) - 1 - k)]
            found = pool[k, slots[final]]
            np.testing.assert_allclose(found, truth[k, final], atol=1e-4, err_msg=f"{k} {text}")
    return len(rows)


def served(runner: ModelRunner, params: SamplingParams, **options) -> list:
    serving = Serving(runner=runner, **options)
    requests = serving.add(PROMPTS, params)
    serving.finish()
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_modules_change_no_token(params, run_ahead):
    """Requests are preempted when pages run out, and prefixes come from the cache."""
    requests = served(mtp_runner(), params, run_ahead=run_ahead, num_pages=28, is_cached=True)
    assert sum(request.num_retractions for request in requests) > 0
    assert sum(request.cached_tokens for request in requests) > 0
    seeds = [request.seed for request in requests]
    assert [r.output_ids for r in requests] == plain_outputs(PROMPTS, params, seeds)


@pytest.mark.slow
def test_any_sampling_equals_dense_decoding():
    assert check(mtp_runner(), JOBS, expected(True)) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("is_cached", [False, True])
def test_drafts_and_kv_are_those_of_dense_modules(is_cached):
    """After any number of accepted drafts, chunks of any size and cached prefixes."""
    serving = Serving(runner=mtp_runner(), is_cached=is_cached)
    requests, checked = [], 0
    with watched(serving) as rounds:
        for i in range(0, len(PROMPTS), 3):  # later prompts find the prefixes of earlier ones
            requests += serving.add(PROMPTS[i : i + 3], GREEDY)
            while is_cached and serving.scheduler.has_work:
                serving.step()
                checked += check_kv(serving)
        while serving.scheduler.has_work:
            serving.step()
            checked += check_kv(serving)
    check_drafts(rounds)
    assert checked > len(rounds) / 2
    meta = [request.result()["meta_info"] for request in requests]
    assert min(np.sum([one["spec_correct_drafts_histogram"] for one in meta], axis=0)) > 0
    assert sum(request.cached_tokens > 0 for request in requests) == 2 * is_cached


@pytest.mark.slow
def test_a_prompt_that_ends_early_leaves_final_keys_and_values():
    """The last positions of a chunk wait for the next chunk, which an abort prevents."""
    serving = Serving(runner=mtp_runner(), is_cached=True)
    (first,) = serving.add([PROMPTS[6]], GREEDY)
    serving.step()
    assert not first.output_ids
    serving.scheduler.abort(first)
    (second,) = serving.add([PROMPTS[6]], GREEDY)
    checked = 0
    while serving.scheduler.has_work:
        serving.step()
        checked += check_kv(serving)
    assert checked
    assert 0 < second.cached_tokens < 16  # less than a chunk
    # a request without KV of its own returns the borrowed pages
    (third,) = serving.add([PROMPTS[6]], GREEDY)
    serving.add([PROMPTS[7]] * 4, GREEDY)
    row = serving.scheduler._row_to_prefill(serving.scheduler._budget.capacity(serving.rows))
    assert row.request is third
    serving.scheduler.abort(third)
    serving.check_pages()
    serving.finish()


@pytest.mark.slow
def test_tiers_keep_all_modules_up_to_date():
    """Rounds with 0, 1 and 3 drafts in turn; drafts equal those of dense modules in each."""
    runner = mtp_runner((0, 1, 3))
    tiers = [shape for shape in runner.config.shapes for _ in range(2)]
    serving = Serving(runner=runner, controller=forced(runner, tiers))
    requests = serving.add(PROMPTS, GREEDY)
    with watched(serving) as rounds:
        while serving.scheduler.has_work:
            serving.step()
            check_kv(serving)
    proposed = [one for one in rounds if one[2]]
    assert {len(drafts) for _, _, drafts in proposed} == {1, 3}
    seeds = [request.seed for request in requests]
    assert [r.output_ids for r in requests] == plain_outputs(PROMPTS, GREEDY, seeds)


def test_only_used_rows_of_requests_are_real() -> None:
    """Module 1 has no row before the start of a text, and a request of slot 0 is padding."""

    def module(embeds, hidden, positions, state, index, attend, by_token):
        return hidden, by_token.is_real

    draft = SimpleNamespace(modules={1: module})

    @jax.jit
    def run(lens, slots, counts):
        pages = SimpleNamespace(attend=lambda starts, width: None)
        unused: Any = dict.fromkeys(("target", "sampling", "bonus_tokens", "tokens", "draw"))
        made: Any = {"draft": draft, "pages": pages, "seq_lens": lens, "slots": slots}
        batch = Batch(**unused, **made)
        rows = jnp.zeros((3, 4, 2))
        return run_module(batch, None, 1, rows, rows, counts)[1]

    lens, slots = np.array([0, 5, 9], np.int32), np.array([3, 1, 0], np.int32)
    is_real = run(lens, slots, np.array([[3], [1], [4]], np.int32))
    assert is_real.astype(int).tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def arguments(**changes: Any) -> EngineArgs:
    good = {"speculative_algorithm": "Multi_Layer_Eagle", "speculative_num_steps": 2}
    return EngineArgs(**(good | changes))


def test_as_many_modules_as_the_largest_tier_has_steps():
    assert arguments().shape == DraftShape.chain(2)
    assert arguments().algorithm.num_modules == arguments().algorithm.lookahead == 2
    assert arguments(speculative_num_steps=None).shape == DraftShape.chain(1)
    adaptive = {"speculative_adaptive": True}
    adaptive["speculative_adaptive_config"] = {"candidate_steps": [0, 1, 3]}
    args = arguments(speculative_num_steps=1, **adaptive)
    assert args.algorithm.num_modules == 3
    assert [shape.steps for shape in args.shapes] == [0, 1, 3]
    del adaptive["speculative_adaptive_config"]  # default candidates need no more modules
    assert arguments(**adaptive).algorithm.num_modules == 2
    assert [shape.steps for shape in arguments(**adaptive).shapes] == [1]

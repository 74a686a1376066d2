"""Rounds of a model with recurrent layers: texts equal those of one whole pass per token."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specjax.kv.recurrent import check_networks
from specjax.runtime.runner_config import memory_needs
from specjax.testing.models import TARGET
from specjax.types import DraftShape

from ..support.recurrent import (
    CHAIN,
    CONFIG,
    COUNT,
    GREEDY,
    PACKED,
    PROMPTS,
    SEEDED,
    TREE,
    accepted,
    dense_text,
    family,
    runner_of,
)
from ..support.runners import algorithm_of, make_request, run_requests
from ..support.schedulers import Serving

__all__ = ["family"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "rounds"), [(None, 1), (None, 4), (CHAIN, 1), (CHAIN, 4), (TREE, 1), (PACKED, 1)]
)
def test_texts_equal_whole_passes(shape: DraftShape | None, rounds: int) -> None:
    """Prompts are cut into chunks, and six requests share four slots."""
    runner = runner_of(shape, rounds)
    steps = shape.steps if shape else 0
    requests = [make_request(prompt, GREEDY, width=steps) for prompt in PROMPTS]
    run_requests(runner, requests)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.output_ids == dense_text(tuple(prompt))
    if shape:
        assert accepted(requests) > 3 * COUNT


@pytest.mark.slow
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_seeded_texts_equal_plain_decoding(shape: DraftShape) -> None:
    """Most drafts are wrong, so rejected rows must leave no trace in states."""

    def texts(runner: Any, width: int) -> list[list[int]]:
        requests = [make_request(x, SEEDED, seed=i, width=width) for i, x in enumerate(PROMPTS)]
        run_requests(runner, requests)
        return [request.output_ids for request in requests]

    assert texts(runner_of(shape), shape.steps) == texts(runner_of(None), 0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, CHAIN])
def test_preempted_and_aborted_requests_leave_no_state(shape: DraftShape | None) -> None:
    """Prefixes are not shared without snapshots."""
    serving = Serving(runner=runner_of(shape), num_pages=40, is_cached=True)
    steps = shape.steps if shape else 0
    requests = [
        make_request(prompt, GREEDY, width=steps, rid=f"r{i}")
        for i, prompt in enumerate(PROMPTS * 3)
    ]
    serving.add_all(requests)
    while not requests[1].output_ids:
        serving.step()
    serving.scheduler.abort(requests[1])
    serving.finish()
    assert sum(request.num_retractions for request in requests) > 0
    for i, request in enumerate(requests):
        text = dense_text(tuple(PROMPTS[i % len(PROMPTS)]))
        is_aborted = request is requests[1]
        assert request.output_ids == (text[: len(request.output_ids)] if is_aborted else text)
        assert not request.result()["meta_info"].get("cached_tokens")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, CHAIN, TREE])
def test_rounds_in_three_calls_replay_the_accepted_rows(
    shape: DraftShape | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with grammars: rows of the target pass cross two calls, and late requests repeat it."""
    runner, calls = runner_of(shape), []
    dispatch = runner.dispatch

    def with_late_requests(name: str, *arguments: Any) -> Any:
        if name == "target":
            dispatch(name, *arguments)
        return dispatch(name, *arguments)

    monkeypatch.setattr(runner, "dispatch", with_late_requests)
    runner.watch_rounds(lambda slots, tree, verified: calls.append(slots))
    width = shape.steps if shape else 0
    requests = [make_request(prompt, GREEDY, width=width) for prompt in PROMPTS[:4]]
    try:
        run_requests(runner, requests)
    finally:
        runner.watch_rounds(None)
    assert calls
    for request, prompt in zip(requests, PROMPTS, strict=False):
        assert request.output_ids == dense_text(tuple(prompt))


@pytest.mark.slow
def test_the_pool_counts_in_the_memory_plan() -> None:
    """A slot has a state and a window in each of three layers, and slot 0 is one of five."""
    runner = runner_of(None)
    pool = runner.abstract_state.pools.requests
    channels = 2 * 16 + 2 * 16
    assert pool.states.shape == (3, 5, 2, 16, 16)
    assert pool.windows.shape == (3, 5, 3, channels)
    other = replace(runner.config, num_slots=6)
    before, after = (memory_needs(runner.networks, x) for x in (runner.config, other))
    assert after.weight_bytes - before.weight_bytes == 3 * 4 * (2 * 16 * 16 + 3 * channels)
    assert after.token_bytes == before.token_bytes


def check(model: Any, draft: Any, shape: DraftShape = CHAIN) -> None:
    args = SimpleNamespace(model="model", draft="draft")
    check_networks(algorithm_of(draft).networks(model, draft), args, (shape,))


def test_what_recurrent_layers_exclude() -> None:
    many = DraftShape.chain(16)
    check(TARGET, TARGET, many)
    check(CONFIG, TARGET)
    with pytest.raises(ValueError, match="draft='draft' has recurrent layers"):
        check(TARGET, CONFIG)
    with pytest.raises(ValueError, match="speculative_num_draft_tokens=17 must be at most 16"):
        check(CONFIG, None, many)

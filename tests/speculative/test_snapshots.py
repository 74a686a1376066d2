"""Texts of a model with recurrent layers that continue from snapshots equal whole passes."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from specjax.kernels.delta_scan import GROUP

from specjax.engine.args import EngineArgs
from specjax.engine.plan import num_snapshots
from specjax.runtime.runner_config import memory_needs
from specjax.testing.models import TARGET
from specjax.types import DraftShape

from ..support.recurrent import (
    CHAIN,
    COMMON,
    CONFIG,
    GREEDY,
    PLAIN,
    POOL,
    RNG,
    TEXTS,
    dense_text,
    family,
    runner_of,
    target,
)
from ..support.runners import (
    EAGLE,
    algorithm_of,
    head_weights,
    make_request,
    new_runner,
    runner_config,
)
from ..support.schedulers import Serving

__all__ = ["family"]
BRANCH = len(COMMON) // GROUP * GROUP
ENDS = [(len(text) - 1) // GROUP * GROUP for text in TEXTS]


@cache
def head_runner(**sizes: Any) -> Any:
    """A runner that drafts with a head, whose keys depend on the token after them."""
    options = {"algorithm": algorithm_of(EAGLE), "shapes": (CHAIN,)}
    networks = options["algorithm"].networks(CONFIG, EAGLE, implementation="xla")
    weights = target()[1], head_weights(EAGLE)
    return new_runner(networks, runner_config(**options, **sizes), *weights)


def serving_of(
    shape: DraftShape | None,
    num_snapshots: int = 8,
    width: int = 160,
    *,
    has_head: bool = False,
    **options: Any,
) -> Serving:
    """Prompts are computed in chunks of at most ``width`` tokens."""
    make = head_runner if has_head else partial(runner_of, shape)
    runner = make(prefill_buckets=(width,), **POOL)
    serving = Serving(runner=runner, is_cached=True, **options)
    follower = serving.scheduler._budget._followers[0]
    follower._free = follower._free[:num_snapshots]
    return serving


def serve(serving: Serving, *texts: list[int]) -> list[int]:
    """Serve texts at once; return the numbers of their cached tokens."""
    steps = serving.runner.config.largest.steps
    requests = [
        make_request(text, GREEDY, width=steps, rid=f"r{i}") for i, text in enumerate(texts)
    ]
    serving.add_all(requests)
    serving.finish()
    for request, text in zip(requests, texts, strict=True):
        assert request.output_ids == dense_text(tuple(text))
    return [request.cached_tokens for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "width", "has_head"),
    [(None, 160, False), (None, 37, False), (CHAIN, 160, False), (CHAIN, 160, True)],
)
def test_texts_continue_from_snapshots(
    shape: DraftShape | None, width: int, has_head: bool
) -> None:
    """At a branch, and at the end of a prompt whose text goes on."""
    serving = serving_of(shape, width=width, has_head=has_head)
    assert serve(serving, TEXTS[0]) == [0]
    assert serve(serving, TEXTS[1]) == [0]
    assert serve(serving, TEXTS[2]) == [BRANCH]
    longer = [*TEXTS[0], 7, 8, 9]
    assert serve(serving, longer, TEXTS[3], TEXTS[1]) == [ENDS[0], BRANCH, ENDS[1]]


@pytest.mark.slow
def test_requests_wait_for_states_that_the_next_call_keeps() -> None:
    """Of texts that come together, the first and the one that leaves it are computed at once."""
    serving = serving_of(None, width=320)
    texts = TEXTS[1], TEXTS[3], TEXTS[2], TEXTS[1]
    assert serve(serving, *texts) == [0, 0, BRANCH, ENDS[1]]


def states_after(serving: Serving, text: list[int]) -> tuple[int, list[np.ndarray]]:
    """The number of cached tokens of a prompt that is served alone, and the states after it."""
    slot = serving.scheduler._free_slots[-1]
    (request,) = serving.add([text], replace(GREEDY, max_new_tokens=1))
    serving.finish()
    pool = serving.runner.on_device.pools.requests
    return request.cached_tokens, [np.asarray(x[:, slot]) for x in pool]


@pytest.mark.slow
def test_states_do_not_depend_on_snapshots_and_chunks() -> None:
    """Groups of rows are the same, so only sums of other layers may be in another order."""
    once = serving_of(None)
    (_, expected), (cached, states) = (states_after(once, TEXTS[0]) for _ in range(2))
    assert cached == ENDS[0]
    for now, before in zip(states, expected, strict=True):
        np.testing.assert_array_equal(now, before)
    with_branch = serving_of(None)
    for text in TEXTS[1:3]:
        states_after(with_branch, text)
    for cached, serving in ((BRANCH, with_branch), (0, serving_of(None, width=37))):
        found, states = states_after(serving, TEXTS[0])
        assert found == cached
        for now, before in zip(states, expected, strict=True):
            np.testing.assert_allclose(now, before, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_evicted_snapshots_are_computed_again() -> None:
    """Cached pages are not used after the only snapshot, which another text took."""
    serving = serving_of(None, num_snapshots=1)
    assert serve(serving, TEXTS[0]) == [0]
    assert serve(serving, TEXTS[0]) == [ENDS[0]]
    assert serve(serving, TEXTS[1][::-1]) == [0]
    assert serve(serving, TEXTS[0]) == [0]
    serving.scheduler.flush_cache()
    assert serve(serving, TEXTS[0]) == [0]
    assert serve(serving, TEXTS[0]) == [ENDS[0]]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, CHAIN])
def test_preempted_requests_return_to_snapshots(shape: DraftShape | None) -> None:
    serving = serving_of(shape, num_pages=115)
    admitted: list[int] = []
    of_request = serving.scheduler._metrics.request_admitted

    def note(length: int, cached: int, seconds: float | None) -> None:
        if seconds is None:
            admitted.append(cached)
        of_request(length, cached, seconds)

    serving.scheduler._metrics.request_admitted = note  # type: ignore[method-assign]
    others = [RNG.integers(6, 61, size=n).tolist() for n in (140, 130, 150)]
    serve(serving, *others)
    assert len(admitted) > 0
    assert max(admitted) >= 128


@pytest.mark.slow
@pytest.mark.parametrize("is_idle", [True, False])
def test_a_slot_is_used_again_after_an_abort_in_a_prompt(is_idle: bool) -> None:
    """The states of its chunks so far do not reach the next text, which continues from a branch."""
    serving = serving_of(None)
    if not is_idle:
        serving.add([TEXTS[3][:30]], GREEDY)
        serving.step()
    serve(serving, TEXTS[1])
    (request,) = serving.add([TEXTS[0]], GREEDY)
    serving.step()
    assert 0 < serving.rows[-1].kv_len < len(TEXTS[0])
    serving.scheduler.abort(request)
    assert serve(serving, TEXTS[0], TEXTS[2]) == [BRANCH, BRANCH]


@pytest.mark.slow
def test_snapshots_count_in_the_memory_plan() -> None:
    runner = runner_of(None, prefill_buckets=(160,), **POOL)
    other = replace(runner.config, num_snapshots=9)
    before, after = (memory_needs(runner.networks, x) for x in (runner.config, other))
    state = sum(np.prod(x.shape) // x.shape[1] * 4 for x in runner.abstract_state.pools.requests)
    assert after.weight_bytes - before.weight_bytes == state


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 8), ({"max_state_snapshots": 3}, 3), ({"disable_radix_cache": True}, 0)],
)
def test_how_many_states_a_prefix_cache_keeps(options: dict[str, Any], count: int) -> None:
    recurrent, dense = (PLAIN.networks(config, None) for config in (CONFIG, TARGET))
    assert num_snapshots(EngineArgs(**options), recurrent, slots=4) == count
    assert num_snapshots(EngineArgs(**options), dense, slots=4) == 0

"""Prompts of a model with recurrent layers from another side: texts equal whole passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.disaggregation.decode import LocalPeer, RemotePrompts
from specjax.disaggregation.prefill import PrefillJobs
from specjax.disaggregation.rows import KVTransfer, check_facts, token_axes
from specjax.metrics import Totals
from specjax.scheduling.loop import Call, EngineLoop
from specjax.scheduling.scheduler import Scheduler
from specjax.types import DraftShape

from ..support.recurrent import CHAIN, GREEDY, POOL, TEXTS, dense_text, family, runner_of
from ..support.runners import make_request

__all__ = ["family"]
pytestmark = pytest.mark.slow
# the sides have other pages, buckets and numbers of slots
PREFILL: Any = {"page_size": 8, "prefill_buckets": (64,), "num_snapshots": 4, "num_slots": 4}
PREFILL |= {"pages_per_request": 32}
PROMPTS = [TEXTS[1][70:], TEXTS[2][::-1], [9, 8]]


def runners(shape: DraftShape | None) -> tuple[Any, Any]:
    """Runners of a prefill and a decode side with all functions for a transfer."""
    prefill, decode = runner_of(shape, **PREFILL), runner_of(shape, prefill_buckets=(160,), **POOL)
    for runner in (prefill, decode):
        KVTransfer(runner).compile(gives=runner is prefill, show_progress=False)
    return prefill, decode


@contextmanager
def loop_of(runner: Any, source: Any) -> Iterator[tuple[EngineLoop, Any]]:
    options = {"caches_prefixes": True, "metrics": Totals(), "prompt_source": source}
    scheduler = Scheduler(runner, run_ahead=1, **options)
    loop = EngineLoop(scheduler, 300.0)
    try:
        yield loop, source
    finally:
        loop.stop()


def serve(loop: EngineLoop, texts: list[list[int]], shape: DraftShape | None) -> list[int]:
    """Serve texts at once; return the numbers of their cached tokens."""
    width = shape.steps if shape else 0
    requests = [
        make_request(text, GREEDY, width=width, rid=f"r{i}") for i, text in enumerate(texts)
    ]
    loop.wait(Call(requests, is_batch=True))
    for request, text in zip(requests, texts, strict=True):
        assert request.output_ids == dense_text(tuple(text))
    return [request.cached_tokens for request in requests]


@pytest.mark.parametrize("shape", [None, CHAIN])
def test_texts_of_two_sides_equal_whole_passes(shape: DraftShape | None) -> None:
    """States travel after the last chunk, also those of texts that continue from a snapshot."""
    prefill, decode = runners(shape)
    jobs, prompts = PrefillJobs(prefill), RemotePrompts(decode)
    with loop_of(prefill, jobs) as giving, loop_of(decode, prompts) as taking:
        peer = LocalPeer(giving, taking)
        try:
            assert serve(taking[0], TEXTS[:1], shape) == [0]
            assert serve(taking[0], [TEXTS[0], *PROMPTS], shape) == [192, *[0] * len(PROMPTS)]
            metrics = (loop._scheduler._metrics for loop, _ in (giving, taking))
            tokens = [each.prefilled_tokens for each in metrics]
            assert tokens == [len(TEXTS[0]) + 28 + sum(map(len, PROMPTS)), 0]
        finally:
            peer.close()


def test_states_are_written_to_their_slot_alone() -> None:
    """In place, although they hold values that are not finite."""
    _, decode = runners(None)
    transfer = KVTransfer(decode)
    pool = decode.abstract_state.pools.requests
    assert token_axes(decode)[-2:] == (None, None)
    values = [np.full((x.shape[0], *x.shape[2:]), 2, x.dtype) for x in pool]
    values[0][:, 0] = np.nan
    decode.on_device = decode._empty_state()
    transfer.begin(3, [7, 8, 9], 5, tuple(values))
    for leaf, value in zip(decode.on_device.pools.requests, values, strict=True):
        np.testing.assert_array_equal(leaf[:, 3], np.nan_to_num(value))
        assert not jnp.delete(leaf, 3, axis=1).any()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(decode.abstract_state))
    (function,) = (x for key, x in decode.compiled.items() if key[0] == "begin")
    memory = function.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < pool.states.size * 4


def test_sides_with_other_states_are_refused() -> None:
    """Shapes and dtypes are facts that must be equal, and rows without states do not fit."""
    prefill, decode = (KVTransfer(runner) for runner in runners(None))
    check_facts(decode.facts["both"], prefill.facts["both"])
    # which count where the prefill side limits what it sends at once
    assert prefill.sent_bytes(0) == sum(x.size * x.dtype.itemsize for x in prefill._states)
    assert prefill.sent_bytes(64) == prefill.sent_bytes(0) + 64 * prefill.token_bytes
    assert decode.facts["both"]["states"][0] == [[3, 2, 16, 16], "float32"]
    for shape, dtype in (([3, 2, 16, 32], "float32"), ([3, 2, 16, 16], "bfloat16")):
        rows = [[shape, dtype], *decode.facts["rows"][1:]]
        with pytest.raises(ValueError, match=r"rows=.*of the peer differ"):
            decode.expect(decode.facts | {"rows": rows})
    with pytest.raises(ValueError, match="were not announced"):
        decode.check_rows(None)

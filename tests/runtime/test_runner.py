"""Compiled functions: no compilation while serving, no copies, no transfers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.runtime.runner import ModelRunner
from specjax.sampling.params import SamplingParams
from specjax.speculative.prefill import Chunk
from specjax.testing import EAGLE3

from ..support.compilation import counted_compilations
from ..support.runners import chains, make_request, make_runner, run_requests

pytestmark = pytest.mark.slow
KEYS = [("round", chains(4)[0], batch) for batch in (1, 4)] + [("prefill", 4), ("prefill", 16)]


@pytest.fixture
def runner() -> ModelRunner:
    runner = make_runner(EAGLE3, 4, batch_buckets=(1, 4), prefill_buckets=(4, 16))
    runner.compile(show_progress=False)
    return runner


def hlo_shape(array: jax.ShapeDtypeStruct) -> str:
    return f"f32[{','.join(map(str, array.shape))}]"


def pool_copies(runner: ModelRunner, text: str) -> list[str]:
    """Copies of a complete KV pool in the text of a compiled function."""
    pools = runner.abstract_state.pools
    copies = []
    for pool in (*pools.target, pools.draft):
        assert hlo_shape(pool) in text
        copies += re.findall(rf"= {re.escape(hlo_shape(pool))}\S* copy(?:-start)?\(", text)
    return copies


def history_copies(runner: ModelRunner, text: str) -> list[str]:
    """Copies of the token history in the text of a compiled function."""
    shape = f"s32[{runner.config.num_slots},{runner.config.context}]"
    assert shape in text
    return re.findall(rf"= {re.escape(shape)}\S* copy(?:-start)?\(", text)


def test_everything_that_serving_dispatches_is_compiled(runner) -> None:
    keys = [*KEYS, *(("prefill_logprobs", width) for width in (4, 16)), ("record_cached",)]
    assert len(runner.compiled) == len(keys)
    for key in keys:
        assert runner.compiled[key] is not None


def test_compilations_are_counted() -> None:
    """The next test relies on this counter."""
    with counted_compilations() as events:
        jax.jit(lambda x: x * 3 + 2)(np.float32(1))
    assert any("backend_compile" in event for event in events)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_serving_never_compiles(runner, run_ahead) -> None:
    rng = np.random.default_rng(run_ahead)
    requests = [
        make_request(
            rng.integers(6, 61, size=size).tolist(),
            SamplingParams(
                temperature=[0.0, 0.7, 1.3][i % 3],
                top_k=[-1, 5][i % 2],
                top_p=[1.0, 0.8, 0.9][i % 3],
                min_p=[0.0, 0.05][i % 2],
                repetition_penalty=[1.0, 1.2][i % 2],
                logit_bias=[None, {7: 2.0}][i // 2 % 2],
                max_new_tokens=int(rng.integers(1, 12)),
            ),
            seed=i,
            width=4,
        )
        for i, size in enumerate([1, 2, 4, 5, 15, 16, 17, 20, 33, 50, 64, 100])
    ]
    with counted_compilations() as events:
        run_requests(runner, requests, run_ahead=run_ahead)
    assert events == []
    assert all(request.is_finished for request in requests)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_pools_and_rows_are_donated(runner, key) -> None:
    state = jax.tree.leaves(runner.abstract_state)
    analysis = runner.compiled[key].memory_analysis()
    assert analysis.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in state)


def test_old_pools_are_gone_after_a_dispatch(runner) -> None:
    before = runner.on_device.pools
    runner.round([1])
    assert all(pool.is_deleted() for pool in jax.tree.leaves((before.target, before.draft)))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_no_function_copies_a_pool(runner, key) -> None:
    text = runner.compiled[key].as_text()
    assert pool_copies(runner, text) == []
    assert history_copies(runner, text) == []


def test_rounds_in_one_call_copy_no_pool() -> None:
    looping = make_runner(EAGLE3, 2, rounds=4)
    text = looping.compiled["round", chains(2)[0], 4].as_text()
    assert pool_copies(looping, text) == []
    assert history_copies(looping, text) == []


def test_dispatches_transfer_nothing_implicitly(runner) -> None:
    pages = list(range(1, 11))
    runner.set_slot(1, SamplingParams(temperature=0.7), seed=3)
    runner.set_pages(1, pages)
    with jax.transfer_guard("disallow"):
        # check the guard: a jitted function refuses a host array
        with pytest.raises(Exception, match=r"(?i)disallowed host-to-device"):
            jax.jit(jnp.negative)(np.ones(3, np.float32))
        runner.prefill([Chunk(1, list(range(6, 22)), 0, 30)])
        runner.prefill([Chunk(1, [30, 31], 16, None)])
        for _ in range(3):
            result = runner.round([1])
    packed = result.read()
    assert packed.shape == (1, 1, 5 + 3)
    assert int(packed[0, 0, -1]) >= 1
    runner.clear_slot(1)


def test_tables_go_to_the_device_with_the_first_dispatch_of_a_slot_that_changed(runner) -> None:
    def copies() -> tuple[jax.Array, jax.Array]:
        return runner._by_slot.pages.page_table, runner._by_slot.sampling

    for slot, page in ((1, 1), (2, 5)):
        runner.set_slot(slot, SamplingParams(temperature=0.5), seed=slot)
        runner.set_pages(slot, [page])
    runner.round([1])
    before = copies()
    runner.set_slot(2, SamplingParams(temperature=0.9), seed=7)
    runner.set_pages(2, [6, 7])
    runner.round([1])
    assert all(new is old for new, old in zip(copies(), before, strict=True))
    runner.round([1, 2])
    pages, sampling = copies()
    assert pages is not before[0]
    assert sampling is not before[1]
    np.testing.assert_array_equal(pages, runner.tables.page_tables[0])
    for slot in (1, 2):
        runner.clear_slot(slot)

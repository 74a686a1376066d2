"""Host tables: values written for a slot, rejected parameters, and plain batches."""

from dataclasses import fields, replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.runtime.runner_config import RunnerConfig
from specjax.sampling.params import SamplingParams
from specjax.sampling.table import (
    MAX_END_TOKENS,
    MAX_LOGIT_BIAS,
    SLOT,
    HostTables,
    check_slot_limits,
    pack_sampling,
    unpack_sampling,
)
from specjax.speculative.prefill import Chunk
from specjax.testing import TARGET
from specjax.types import NO_DRAFTS

from ..support.runners import make_runner, new_runner

V = TARGET.vocab_size
jit_unpack = jax.jit(unpack_sampling)
GREEDY = SamplingParams(temperature=0.0)
CHANGES = [
    {"temperature": 0.5},
    {"repetition_penalty": 1.1},
    {"frequency_penalty": 0.1},
    {"presence_penalty": -0.1},
    {"logit_bias": {0: 1.0}},
    {"min_new_tokens": 1},
]


def tables(params: SamplingParams, **changes) -> HostTables:
    """Tables of three slots, with ``params`` in the middle one."""
    made = HostTables(3, 4, V)
    defaults = {"seed": 9, "end_token_ids": (), "prompt_len": 0, "top_logprobs": None}
    made.set_sampling(1, params, **(defaults | changes))
    return made


def test_all_values_of_a_slot_are_written_and_cleared():
    params = SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.25,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={3: 1.5, "60": -2.0},
        min_new_tokens=4,
    )
    ends = (7, 5, V + 3, -1)
    made = tables(params, seed=2**32 * 3 + 1, end_token_ids=ends, prompt_len=6, top_logprobs=2)
    row = made.sampling[1]
    assert (row["temperatures"], row["top_ks"], row["top_ps"], row["min_ps"]) == pytest.approx(
        (0.7, 5, 0.9, 0.25)
    )
    assert row["seeds"].tolist() == [3, 1]
    assert row["end_token_ids"].tolist() == [5, 7] + [-1] * (MAX_END_TOKENS - 2)
    assert (row["wants_logprobs"], row["top_logprobs"]) == (1, 2)
    penalties = (row["repetition_penalties"], row["frequency_penalties"], row["presence_penalties"])
    assert penalties == (1.5, 0.5, -0.5)
    assert (row["min_new_tokens"], row["prompt_lens"]) == (4, 6)
    assert row["bias_ids"].tolist() == [3, 60] + [-1] * (MAX_LOGIT_BIAS - 2)
    assert row["bias_values"][:3].tolist() == [1.5, -2.0, 0.0]

    neutral = HostTables(3, 4, V).sampling
    np.testing.assert_array_equal(made.sampling[[0, 2]], neutral[[0, 2]])
    made.set_sampling(1, GREEDY, seed=0, end_token_ids=(), prompt_len=0, top_logprobs=None)
    np.testing.assert_array_equal(made.sampling, neutral)


def test_a_cleared_slot_is_neutral_and_not_uploaded():
    made = tables(SamplingParams(temperature=0.7, top_k=5, logit_bias={3: 1.5}), top_logprobs=2)
    made.set_pages(1, [2], 0)
    for slots in made.stale.values():
        slots.clear()
    made.clear(1)
    np.testing.assert_array_equal(made.sampling, HostTables(3, 4, V).sampling)
    assert not made.page_tables[0].any()
    assert made.is_greedy.all()
    # no dispatch uses a cleared slot, so there is nothing to upload
    assert dict(made.stale) == {"pages": set(), "sampling": set()}


INTEGERS = st.integers() | st.integers(-2, 2**33) | st.sampled_from([2**31 - 1, 2**31, 2**63])
NUMBERS = st.floats() | st.floats(-3, 3) | st.sampled_from([1e-300, 1e-38, 1e38, 1e300]) | INTEGERS


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(
        {"max_new_tokens": INTEGERS},
        optional={
            "min_new_tokens": INTEGERS,
            "temperature": NUMBERS,
            "top_k": INTEGERS,
            "top_p": NUMBERS,
            "min_p": NUMBERS,
            "repetition_penalty": NUMBERS,
            "frequency_penalty": NUMBERS,
            "presence_penalty": NUMBERS,
            "logit_bias": st.dictionaries(st.integers(0, V - 1) | INTEGERS, NUMBERS, max_size=3),
            "stop_token_ids": st.lists(st.integers(0, V - 1) | INTEGERS, max_size=12),
            "sampling_seed": INTEGERS,
        },
    )
)
def test_accepted_parameters_are_written_without_overflow(given_params):
    """An overflow of anything that :class:`SamplingParams` accepts would occur during serving."""
    accepted = {"max_new_tokens": 2**40}
    for name, value in given_params.items():
        try:
            accepted |= {name: SamplingParams(**(accepted | {name: value})) and value}
        except ValueError as refusal:
            assert name in str(refusal)  # noqa: PT017
    params = SamplingParams(**accepted)
    ends = params.stop_token_ids or ()
    try:
        check_slot_limits(params, ends, V)
    except ValueError as refusal:
        assert "logit_bias" in str(refusal) or "min_new_tokens" in str(refusal)  # noqa: PT017
        return
    with np.errstate(over="raise", invalid="raise"):
        made = tables(params, seed=params.sampling_seed or 0, end_token_ids=ends)
    row = made.sampling[1]
    for name in SLOT.names:
        assert np.isfinite(row[name]).all()
    assert row["min_new_tokens"] == params.min_new_tokens
    assert row["repetition_penalties"] > 0
    assert row["temperatures"] > 0 or params.is_greedy


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=3 * SLOT.itemsize, max_size=3 * SLOT.itemsize))
def test_a_packed_table_comes_back_bit_by_bit(words):
    table = np.frombuffer(words, SLOT)
    packed = pack_sampling(table)
    assert packed.dtype == np.int32
    assert packed.base is None or not np.shares_memory(packed, table)
    found = jit_unpack(packed, np.arange(len(packed)))
    for name in SLOT.names:
        got, want = np.asarray(getattr(found, name)), table[name]
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_plain_slot_asks_for_the_best_token_only(changes):
    assert tables(GREEDY).is_greedy.all()
    assert tables(replace(SamplingParams(), top_k=1)).is_greedy.all()
    made = tables(replace(GREEDY, **changes))
    assert made.is_greedy.tolist() == [True, False, True]
    assert made.sampling["is_adjusted"].tolist() == [0, int("temperature" not in changes), 0]
    asked = tables(GREEDY, top_logprobs=0)
    assert asked.is_greedy.tolist() == [True, False, True]
    assert asked.wants_logprobs([0, 1])
    assert not asked.wants_logprobs([0, 2])


def test_pages_are_written_from_an_entry_on():
    made = HostTables(2, 5, V)
    made.set_pages(1, [4, 5, 6], 0)
    made.set_pages(1, [9], 2)
    assert made.page_tables[0].tolist() == [[0] * 5, [4, 5, 9, 0, 0]]


@pytest.mark.parametrize(
    ("params", "ends", "top_logprobs", "message"),
    [
        ({"logit_bias": {V: 1.0, 3: 1.0}}, (), None, rf"logit_bias .*{V}\] must be .* {V - 1}"),
        ({"min_new_tokens": 2}, range(9), None, "min_new_tokens=2 .* at most 8 .* has 9"),
        ({}, (), 21, "top_logprobs_num=21 must be from 0 to 20"),
        ({}, (), -1, "top_logprobs_num=-1"),
    ],
)
def test_parameters_beyond_the_limits_are_refused(params, ends, top_logprobs, message):
    runner = make_runner()
    params = SamplingParams(**params)
    with pytest.raises(ValueError, match=message):
        runner.check(params, ends, top_logprobs)


def test_limits_themselves_are_accepted():
    runner = make_runner()
    many = dict.fromkeys(range(V), 0.5)
    runner.check(SamplingParams(logit_bias=many, min_new_tokens=2), range(8), 20)
    # end tokens that the model cannot produce use no capacity
    runner.check(SamplingParams(min_new_tokens=2), [*range(8), V, V + 1], 0)
    # without a minimum length, more end tokens than the device holds only cost rounds
    runner.check(SamplingParams(), range(30))
    too_many = SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.5))
    with pytest.raises(ValueError, match=rf"{MAX_LOGIT_BIAS + 1} tokens; .* {MAX_LOGIT_BIAS}"):
        check_slot_limits(too_many, (), 1000)


@pytest.mark.slow
class GpuConfig(RunnerConfig):
    on_gpu = True


@pytest.mark.slow
def test_plain_batches_have_a_separate_function_on_gpus():
    """It produces the same tokens, and is not used if a row needs more."""
    made = make_runner()
    given = {field.name: getattr(made.config, field.name) for field in fields(RunnerConfig)}
    config = GpuConfig(**given | {"batch_buckets": (4,), "prefill_buckets": (4,)})
    runner = new_runner(made.networks, config, *made.weights)
    called = []

    def spied(name: str):
        function = runner.compiled[name, NO_DRAFTS, 4]
        return lambda *args: called.append(name) or function(*args)

    for name in ("round", "greedy_round"):
        runner.compiled[name, NO_DRAFTS, 4] = spied(name)
    for one in (made, runner):
        one.set_slot(1, GREEDY, seed=0)
        one.set_slot(2, GREEDY, seed=0)
        for slot in (1, 2):
            one.set_pages(slot, [slot])
            one.prefill([Chunk(slot, [6, 7, 8], 0, None)])
    for _ in range(2):
        assert np.array_equal(runner.round([1, 2]).read(), made.round([1, 2]).read())
    runner.set_slot(2, GREEDY, seed=0, top_logprobs=3)
    assert runner.round([1]).logprobs is None
    assert runner.round([1, 2]).logprobs is not None
    assert called == ["greedy_round"] * 3 + ["round"]
    made.clear_slot(1)
    made.clear_slot(2)


def test_pages_of_other_pools_follow_those_of_the_first() -> None:
    tables = HostTables(3, 5, 64, num_pools=3)
    tables.set_pages(1, [4, 5, 9], 0)
    tables.set_pages(1, [6], 1, pool=1)
    tables.set_pages(1, [2, 3], 1, pool=2)
    rows = tables.page_tables[:, 1]
    assert rows.tolist() == [[4, 5, 9, 0, 0], [0, 6, 0, 0, 0], [0, 2, 3, 0, 0]]
    tables.set_pages(1, [7], 2)
    assert rows.tolist() == [[4, 5, 7, 0, 0], [0, 6, 0, 0, 0], [0, 2, 0, 0, 0]]
    tables.clear(1)
    assert not tables.page_tables.any()

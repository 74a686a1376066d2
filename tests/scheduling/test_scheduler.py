"""Concurrent requests: each gives the same output as alone, in order, and frees everything."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specjax.kernels.tree_attention import MAX_MASKED

from specjax.sampling.params import SamplingParams
from specjax.types import DraftShape

from ..support.runners import (
    copied_runner,
    dense_greedy,
    make_request,
    make_runner,
    plain_output,
    plain_outputs,
    run_requests,
)
from ..support.schedulers import STEPS, Serving, check_identities, forced

RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(6, 61, size=n).tolist() for n in (2, 17, 5, 40, 1, 16, 33, 9, 3, 64)]
SEEDS = range(len(PROMPTS))
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.6, top_p=0.95, max_new_tokens=24, ignore_eos=True)


@pytest.mark.parametrize(
    ("num_steps", "rounds", "run_ahead", "params"),
    [
        pytest.param(0, 1, 0, GREEDY, id="plain-greedy"),
        pytest.param(0, 1, 1, SEEDED, id="plain-seeded"),
        pytest.param(STEPS, 1, 0, SEEDED, id="chain-seeded"),
        pytest.param(STEPS, 1, 1, GREEDY, id="chain-greedy"),
        pytest.param(2, 4, 1, SEEDED, id="rounds-seeded"),
        pytest.param(2, 4, 2, GREEDY, id="rounds-greedy"),
    ],
)
def test_more_requests_than_slots_each_as_if_alone(num_steps, rounds, run_ahead, params) -> None:
    serving = Serving(num_steps=num_steps, rounds=rounds, run_ahead=run_ahead)
    requests = serving.add(PROMPTS, params)
    serving.finish()
    assert [r.output_ids for r in requests] == plain_outputs(PROMPTS, params, SEEDS)
    if num_steps:
        for request in requests:
            check_identities(request)
        histograms = np.array(
            [r.result()["meta_info"]["spec_correct_drafts_histogram"] for r in requests]
        ).sum(axis=0)
        # rounds accept nothing, parts, and all of the chain
        assert (histograms > 0).all()


@pytest.mark.slow
def test_the_largest_tree_on_a_small_pool() -> None:
    """The maximum of nodes and of drafting rows that kernels support; rounds preempt."""
    shape = DraftShape(steps=9, topk=16, nodes=64)
    assert shape.draft_rows == MAX_MASKED
    tail = -(-shape.tail // 4)
    runner = copied_runner(9, shapes=(shape,), pages_per_request=32 + tail)
    serving = Serving(runner=runner, run_ahead=1, is_cached=True, num_pages=1 + 27 + 2 * tail)
    requests = serving.add(PROMPTS, replace(GREEDY, max_new_tokens=60))
    serving.finish()
    expected = plain_outputs(PROMPTS, replace(GREEDY, max_new_tokens=60), SEEDS)
    assert [r.output_ids for r in requests] == expected
    assert sum(r.num_retractions for r in requests)


@pytest.mark.parametrize("num_steps", [0, STEPS])
def test_noise_belongs_to_positions(num_steps) -> None:
    """A request whose prompt includes a part of another's output produces the rest of it."""
    whole = plain_outputs(PROMPTS, SEEDED, [9] * len(PROMPTS))
    serving = Serving(num_steps=num_steps)
    requests = []
    for i, (prompt, output) in enumerate(zip(PROMPTS, whole, strict=True)):
        known = prompt + output[: 1 + i]
        requests.append(
            make_request(known, replace(SEEDED, max_new_tokens=23 - i), seed=9, width=4)
        )
        serving.scheduler.add(requests[-1])
    serving.finish()
    assert [r.output_ids for r in requests] == [out[1 + i :] for i, out in enumerate(whole)]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_admission_waits_for_pages_in_order(run_ahead) -> None:
    """The pool holds little more than the largest request, though slots are free."""
    largest = -(-(64 + 24 - 1) // 4)
    serving = Serving(run_ahead=run_ahead, num_pages=1 + largest + 2)
    requests = serving.add(PROMPTS, GREEDY)
    waited_with_free_slots = False
    while serving.scheduler.has_work:
        serving.step()
        started = [r.is_finished or r in serving.running for r in requests]
        waited_with_free_slots |= len(serving.rows) < 4 and not all(started)
        assert started == sorted(started, reverse=True)
    assert waited_with_free_slots
    serving.check_clean()
    assert [r.output_ids for r in requests] == plain_outputs(PROMPTS, GREEDY, SEEDS)


def test_a_request_that_never_fits_is_refused() -> None:
    serving = Serving(num_pages=5)
    fits = make_request(list(range(6, 14)), SamplingParams(max_new_tokens=9))
    serving.scheduler.check(fits)  # 8 + 9 - 1 tokens: the last one is never stored
    too_long = make_request(list(range(6, 14)), SamplingParams(max_new_tokens=10))
    with pytest.raises(ValueError, match=r"20 KV tokens, but the pool holds 16.*max_total_tokens"):
        serving.scheduler.check(too_long)
    long = make_request(list(range(6, 14)), SamplingParams(max_new_tokens=122))
    with pytest.raises(ValueError, match=r"132 KV tokens, but a request holds 128.*context_length"):
        Serving().scheduler.check(long)
    many = make_request([6], SamplingParams(), top_logprobs=21)
    with pytest.raises(ValueError, match="top_logprobs_num=21 must be from 0 to 20"):
        serving.scheduler.check(many)


def test_exactly_the_whole_pool() -> None:
    serving = Serving(num_pages=5)
    prompt = list(range(6, 14))
    params = SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True)
    requests = serving.add([prompt, prompt], params)
    serving.finish()
    expected = plain_output(tuple(prompt), params, 0)
    assert [r.output_ids for r in requests] == [expected, expected]


@pytest.mark.slow
@settings(max_examples=15)
@given(
    run_ahead=st.sampled_from([0, 1]),
    is_cached=st.booleans(),
    shape=st.sampled_from([(STEPS, 1), (2, 4)]),
    num_pages=st.sampled_from([30, 151]),
    aborts=st.dictionaries(st.integers(0, 25), st.integers(0, len(PROMPTS) - 1), max_size=5),
)
def test_aborts_leave_the_others_alone(run_ahead, is_cached, shape, num_pages, aborts) -> None:
    num_steps, rounds = shape
    serving = Serving(
        num_steps=num_steps,
        rounds=rounds,
        run_ahead=run_ahead,
        num_pages=num_pages,
        is_cached=is_cached,
    )
    requests = serving.add(PROMPTS, GREEDY)
    expected = plain_outputs(PROMPTS, GREEDY, SEEDS)
    aborted = set()
    step = 0
    while serving.scheduler.has_work:
        if step in aborts:
            request = requests[aborts[step]]
            if not request.is_finished:
                aborted.add(aborts[step])
            serving.scheduler.abort(request)
            serving.scheduler.abort(request)  # a second abort does nothing
            assert request.is_finished
            assert request not in serving.running
        serving.step()
        step += 1
    serving.check_clean()
    for i, request in enumerate(requests):
        if i in aborted:
            assert request.finish_reason == {"type": "abort"}
            assert request.output_ids == expected[i][: len(request.output_ids)]
        else:
            assert request.output_ids == expected[i]
            assert request.finish_reason == {"type": "length", "length": 24}


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_one_new_token_needs_no_verify(run_ahead) -> None:
    serving = Serving(run_ahead=run_ahead)
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    requests = serving.add(PROMPTS, params)
    serving.finish()
    expected = plain_outputs(PROMPTS, GREEDY, SEEDS)
    for request, whole in zip(requests, expected, strict=True):
        assert request.output_ids == whole[:1]
        assert request.result()["meta_info"]["spec_verify_ct"] == 0


@pytest.mark.parametrize(("num_steps", "rounds", "run_ahead"), [(STEPS, 1, 0), (2, 4, 1)])
def test_an_end_token_inside_an_accepted_run_cuts_its_tail(num_steps, rounds, run_ahead) -> None:
    outputs = zip(PROMPTS, plain_outputs(PROMPTS, GREEDY, SEEDS), strict=True)
    prompt = max(outputs, key=lambda pair: len(set(pair[1])))[0]
    whole = plain_output(tuple(prompt), GREEDY, 0)
    ended_on_a_draft = 0
    for token in dict.fromkeys(whole):
        serving = Serving(num_steps=num_steps, rounds=rounds, run_ahead=run_ahead)
        request = make_request(prompt, GREEDY, ends=[token], width=num_steps)
        serving.scheduler.add(request)
        serving.finish()
        assert request.output_ids == whole[: whole.index(token) + 1]
        assert request.finish_reason == {"type": "stop", "matched": token}
        check_identities(request)
        ended_on_a_draft += request.output_is_draft[-1]
    assert ended_on_a_draft >= 2


def test_end_tokens_outside_the_vocabulary_are_ignored() -> None:
    """They come from checkpoints; neither their values nor their number hide the real one."""
    whole = plain_output(tuple(PROMPTS[1]), GREEDY, 0)
    serving = Serving()
    ends = [*range(-9, 0), 2**40, whole[3]]
    request = make_request(PROMPTS[1], GREEDY, ends=ends, width=STEPS)
    serving.scheduler.add(request)
    serving.step()
    assert whole[3] in serving.runner.tables.sampling["end_token_ids"]
    serving.finish()
    assert request.output_ids == whole[: whole.index(whole[3]) + 1]


@pytest.mark.slow
@pytest.mark.parametrize("prompt_len", [100, 127])
@pytest.mark.parametrize("num_steps", [0, STEPS])
def test_prompt_and_completion_may_fill_the_page_table(num_steps, prompt_len) -> None:
    """The page tables hold 128 tokens; drafts of the last rounds exceed them."""
    prompt = np.random.default_rng(prompt_len).integers(6, 61, size=prompt_len).tolist()
    limit = 128 - prompt_len
    params = SamplingParams(temperature=0.0, max_new_tokens=limit, ignore_eos=True)
    request = make_request(prompt, params, width=num_steps)
    neighbour = make_request(PROMPTS[1], params, width=num_steps)
    serving = Serving(num_steps=num_steps, run_ahead=1)
    serving.scheduler.add(request)
    serving.scheduler.add(neighbour)
    serving.finish()
    assert len(request.output_ids) == limit
    # a model without pages, rounds or limits gives the same output
    runner = make_runner()
    dense = make_request(prompt, params)
    run_requests(runner, [dense])
    assert dense.output_ids == dense_greedy(prompt, limit)
    assert neighbour.output_ids == plain_output(tuple(PROMPTS[1]), params, 0)
    assert request.output_ids == plain_output(tuple(prompt), params, 0)


def test_prompts_are_computed_together_and_share_pages_at_once() -> None:
    """The second already reads the pages that the first stores in the same call."""
    serving = Serving(is_cached=True, num_steps=0)
    prompts = [[*range(10, 22), 30 + i] for i in range(4)]
    requests = serving.add(prompts, replace(GREEDY, max_new_tokens=3))
    serving.step()
    assert not serving.num_waiting
    # 13 tokens, and one per other prompt; two calls if a call takes fewer prompts
    limit = serving.runner.config.max_chunks(16)
    assert serving.watched.calls.count("prefill") == -(-4 // limit)
    serving.finish()
    assert [request.cached_tokens for request in requests] == [0, 12, 12, 12]
    expected = plain_outputs(prompts, GREEDY, range(4))
    assert [request.output_ids for request in requests] == [ids[:3] for ids in expected]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_only_rounds_that_waited_for_the_device_are_timed(run_ahead: int) -> None:
    """The time between two results is that of a round if it was dispatched before the first."""
    ticks = count(100)
    runner = copied_runner(STEPS)
    controller = forced(runner, [DraftShape.chain(STEPS)])
    serving = Serving(run_ahead=run_ahead, controller=controller, clock=lambda: float(next(ticks)))
    for _ in range(2):  # the second time, the first round again follows an idle device
        serving.add(PROMPTS[:1], GREEDY)
        serving.finish()
        seconds = controller.policy.seconds
        assert len(seconds) > 3
        assert seconds[0] == 0.0
        assert [one > 0.0 for one in seconds[1:]] == [run_ahead > 0] * (len(seconds) - 1)
        seconds.clear()

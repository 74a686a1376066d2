"""Preempted requests resume with unchanged output."""

from dataclasses import replace

import numpy as np
import pytest

from specjax.sampling.params import SamplingParams

from ..support.runners import make_request, plain_outputs
from ..support.schedulers import STEPS, Letters, Serving, check_identities

RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(6, 61, size=n).tolist() for n in (9, 17, 5, 40, 1, 16, 33, 9, 3, 20)]
SEEDS = range(len(PROMPTS))
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=50, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.95)
CHARGED = replace(
    SEEDED, repetition_penalty=1.3, frequency_penalty=0.4, min_new_tokens=30, ignore_eos=False
)
# the largest request needs 23 pages
FEW = 1 + 25


@pytest.mark.long_after(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "rounds", "run_ahead", "is_cached", "params"),
    [  # pairwise: shape, depth of the queue and parameters
        pytest.param(STEPS, 1, 0, False, SEEDED, id="chain-seeded"),
        pytest.param(STEPS, 1, 1, True, CHARGED, id="chain-charged"),
        pytest.param(STEPS, 1, 2, True, GREEDY, id="chain-greedy"),
        pytest.param(2, 4, 0, True, CHARGED, id="rounds-charged"),
        pytest.param(2, 4, 1, False, GREEDY, id="rounds-greedy"),
        pytest.param(2, 4, 2, True, SEEDED, id="rounds-seeded"),
        pytest.param(0, 1, 0, True, GREEDY, id="plain-greedy"),
        pytest.param(0, 1, 1, True, SEEDED, id="plain-seeded"),
        pytest.param(0, 1, 2, False, CHARGED, id="plain-charged"),
    ],
)
def test_output_does_not_tell(num_steps, rounds, run_ahead, is_cached, params) -> None:
    serving = Serving(
        num_steps=num_steps,
        rounds=rounds,
        run_ahead=run_ahead,
        num_pages=FEW,
        is_cached=is_cached,
    )
    requests = serving.add(PROMPTS, params, decoder=Letters())
    serving.finish()
    expected = plain_outputs(PROMPTS, params, SEEDS)
    assert [r.output_ids for r in requests] == expected
    assert sum(r.num_retractions for r in requests) >= 3
    for request in requests:
        ids = request.output_ids
        has_end = ids[-1] in request.end_token_ids
        assert request.text == Letters().push(ids[:-1] if has_end else ids)
        meta = request.result()["meta_info"]
        assert meta["num_retractions"] == request.num_retractions
        if num_steps:
            check_identities(request)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_the_oldest_always_advances(run_ahead) -> None:
    serving = Serving(run_ahead=run_ahead, num_pages=FEW)
    requests = serving.add(PROMPTS, GREEDY)
    while serving.scheduler.has_work:
        unfinished = [r for r in requests if not r.is_finished]
        oldest = unfinished[0]
        before = len(oldest.output_ids)
        # admission, at most two chunks of prefill, a round that is read late
        for _ in range(5):
            serving.step()
        assert oldest.is_finished or len(oldest.output_ids) > before
    assert requests[0].num_retractions == 0


def test_the_newest_goes_first_and_the_order_stays() -> None:
    serving = Serving(run_ahead=1, num_pages=FEW)
    requests = serving.add(PROMPTS, GREEDY)
    number = {id(request): i for i, request in enumerate(requests)}
    retracted = 0
    while serving.scheduler.has_work:
        before = serving.running
        counts = [r.num_retractions for r in before]
        serving.step()
        order = [number[id(r)] for r in (*serving.running, *serving.scheduler._waiting)]
        assert order == sorted(order)
        changed = [r.num_retractions > n for r, n in zip(before, counts, strict=True)]
        kept = [not lost for r, lost in zip(before, changed, strict=True) if not r.is_finished]
        assert kept == sorted(kept, reverse=True)
        retracted += sum(changed)
    assert retracted >= 3
    serving.check_clean()


@pytest.mark.slow
def test_log_probabilities_stay_with_their_tokens() -> None:
    def serve(num_pages: int):
        serving = Serving(run_ahead=1, num_pages=num_pages)
        requests = [
            make_request(
                prompt,
                [GREEDY, SEEDED][i % 2],
                seed=i,
                width=STEPS,
                top_logprobs=None if i == 3 else i % 4,
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        serving.add_all(requests)
        serving.finish()
        return requests

    undisturbed, retracted = serve(0), serve(FEW)
    assert sum(r.num_retractions for r in retracted) >= 3
    assert not any(r.num_retractions for r in undisturbed)
    for i, (one, other) in enumerate(zip(undisturbed, retracted, strict=True)):
        assert one.output_ids == other.output_ids
        if i == 3:
            assert "output_token_logprobs" not in other.result()["meta_info"]
            assert other.output_token_logprobs == []
            continue
        meta = other.result()["meta_info"]
        assert [token for _, token, _ in meta["output_token_logprobs"]] == other.output_ids
        values = [[entry[0] for entry in r.output_token_logprobs] for r in (one, other)]
        np.testing.assert_allclose(*values, atol=1e-4)
        tops = [
            np.array([[v for v, _, _ in top] for top in r.output_top_logprobs])
            for r in (one, other)
        ]
        np.testing.assert_allclose(*tops, atol=1e-4)


def test_a_retracted_request_can_be_aborted() -> None:
    serving = Serving(run_ahead=1, num_pages=FEW)
    requests = serving.add(PROMPTS, GREEDY)
    expected = plain_outputs(PROMPTS, GREEDY, SEEDS)
    num_aborted = 0
    while serving.scheduler.has_work:
        serving.step()
        for request in list(serving.scheduler._waiting):
            if request.num_retractions:
                serving.scheduler.abort(request)
                num_aborted += 1
    serving.check_clean()
    assert num_aborted
    for request, whole in zip(requests, expected, strict=True):
        assert request.output_ids == whole[: len(request.output_ids)]
        assert (request.finish_reason == {"type": "abort"}) == (len(request.output_ids) < 50)


@pytest.mark.slow
@pytest.mark.parametrize(("run_ahead", "is_cached"), [(0, False), (1, True)])
def test_a_flush_computes_everything_again(run_ahead, is_cached) -> None:
    serving = Serving(run_ahead=run_ahead, is_cached=is_cached)
    requests = serving.add(PROMPTS, SEEDED)
    for i in range(12):
        serving.step()
        if i % 3 == 2:
            serving.scheduler.flush_cache()
            assert serving.allocator.num_free == serving.allocator.num_pages - 1
            assert not serving.running
            assert not serving.scheduler._in_flight
    serving.finish()
    assert [r.output_ids for r in requests] == plain_outputs(PROMPTS, SEEDED, SEEDS)
    assert requests[0].num_retractions > 0


@pytest.mark.slow
def test_requests_that_leave_early_do_not_wait_for_the_whole_pool() -> None:
    """The pool holds two complete requests, but all four start, since they end early."""
    params = replace(SEEDED, max_new_tokens=80)
    prompts = [prompt[:4] for prompt in PROMPTS[:4]]
    written = [output[:20] for output in plain_outputs(prompts, params, range(4))]
    serving = Serving(num_pages=1 + 2 * 21)
    requests = [make_request(prompt, params, seed=i, width=4) for i, prompt in enumerate(prompts)]
    # each ends at its latest token that it has not produced before
    expected = [output[: max(map(output.index, output)) + 1] for output in written]
    for request, output in zip(requests, expected, strict=True):
        request.end_token_ids = frozenset(output[-1:])
    serving.add_all(requests)
    most = 0
    while serving.num_waiting:
        serving.step()
        most = max(most, len(serving.running))
    assert most >= 3
    serving.finish()
    assert [request.output_ids for request in requests] == expected
    assert not any(request.num_retractions for request in requests)

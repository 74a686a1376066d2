"""Timeouts, a full queue, faults, and unnecessary work."""

from dataclasses import replace

import numpy as np
import pytest

from specjax.kv import budget
from specjax.metrics import Totals
from specjax.sampling.params import SamplingParams
from specjax.scheduling import scheduler as scheduler_module
from specjax.scheduling.request import Deadlines
from specjax.scheduling.scheduler import QueueFullError

from ..support.runners import make_request, plain_output
from ..support.schedulers import STEPS, Clock, Serving

RNG = np.random.default_rng(12)
PROMPTS = [RNG.integers(6, 61, size=n).tolist() for n in (9, 5, 20, 3, 7, 8)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_timeout_ends_running_and_waiting_requests(run_ahead) -> None:
    clock = Clock()
    serving = Serving(run_ahead=run_ahead, clock=clock)
    timeouts = [None, 5.0, 50.0, None, 5.0, 50.0]  # the last two wait: there are four slots
    requests = [
        make_request(prompt, GREEDY, seed=i, width=STEPS, timeout=timeout, clock=clock)
        for i, (prompt, timeout) in enumerate(zip(PROMPTS, timeouts, strict=True))
    ]
    serving.add_all(requests)
    while serving.num_waiting > 2:
        serving.step()
    clock.now += 4.9
    serving.step()
    assert not any(r.is_finished for r in requests)
    clock.now += 0.1
    serving.step()
    late = [requests[1], requests[4]]
    assert [r for r in requests if r.is_finished] == late
    for request in late:
        assert request.finish_reason == {
            "type": "abort",
            "message": "the request timed out after 5.0 s",
        }
        assert request.ended_time == 105.0
    assert requests[4].output_ids == []
    assert len(requests[1].output_ids) > 0
    serving.finish()
    for i, request in enumerate(requests):
        whole = plain_output(tuple(request.input_ids), GREEDY, i)
        assert request.output_ids == whole[: len(request.output_ids)]
        assert request in late or len(request.output_ids) == 40


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1])
def test_a_full_queue_refuses_and_says_why(limit) -> None:
    """Free slots do not count, so four requests are taken even without a queue."""
    serving = Serving(max_waiting_requests=limit)
    requests = serving.add(PROMPTS[: 4 + limit], GREEDY)
    (other,) = [make_request(PROMPTS[5], GREEDY, width=STEPS)]
    for _ in range(2):
        with pytest.raises(QueueFullError, match=f"max_waiting_requests={limit}"):
            serving.scheduler.add(other)
        serving.step()
    while serving.num_waiting or len(serving.rows) == 4:
        serving.step()
    serving.scheduler.add(other)
    serving.finish()
    assert [len(r.output_ids) for r in (*requests, other)] == [40] * (5 + limit)


@pytest.mark.slow
def test_a_call_is_taken_whole_or_not_at_all() -> None:
    serving = Serving(max_waiting_requests=1)
    serving.add(PROMPTS[:3], GREEDY)  # leaves one free slot and one waiting position
    three = [make_request(prompt, GREEDY, width=STEPS) for prompt in PROMPTS[3:]]
    with pytest.raises(QueueFullError, match="3 more were sent"):
        serving.scheduler.add(*three)
    assert serving.num_waiting == 3
    serving.scheduler.add(*three[:2])
    serving.finish()
    assert [len(r.output_ids) for r in three] == [40, 40, 0]


@pytest.mark.slow
@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("call", ["prefill", "round"])
def test_a_fault_ends_all_requests_and_leaves_nothing(call, is_cached, monkeypatch) -> None:
    serving = Serving(run_ahead=1, is_cached=is_cached)
    requests = serving.add(PROMPTS, GREEDY)
    for _ in range(2):
        serving.step()

    def fail(*args, **kwargs):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(serving.watched, call, fail)
        with pytest.raises(MemoryError):
            serving.finish()
    serving.scheduler.fail_all("the step failed")
    assert not serving.scheduler.has_work
    reason = {"type": "abort", "message": "the step failed"}
    assert all(r.is_finished for r in requests)
    assert [r.finish_reason for r in requests].count(reason) > 2
    serving.check_clean()
    assert serving.allocator.num_free == serving.allocator.num_pages - 1
    # and the scheduler continues to serve
    again = serving.add(PROMPTS[:2], GREEDY)
    serving.finish()
    assert [r.output_ids for r in again] == [
        plain_output(tuple(p), GREEDY, i) for i, p in enumerate(PROMPTS[:2])
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("num_steps", "rounds"), [(0, 1), (2, 4)])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_no_unnecessary_rounds(num_steps, rounds, run_ahead) -> None:
    """Plain rounds give one token each, so their number is known in advance."""
    serving = Serving(num_steps=num_steps, rounds=rounds, run_ahead=run_ahead)
    serving.add([PROMPTS[0]], replace(GREEDY, max_new_tokens=8))
    serving.finish()
    most = 7 if num_steps == 0 else 2
    assert serving.watched.calls.count("round") <= most
    if num_steps == 0:
        assert serving.watched.calls.count("round") == 7


@pytest.mark.slow
def test_prefill_is_counted_by_chunks() -> None:
    totals = Totals()
    serving = Serving(metrics=totals)
    widest = serving.runner.config.prefill_buckets[-1]
    (request,) = serving.add([[7] * (2 * widest + 3)], GREEDY)
    serving.step()
    serving.scheduler.abort(request)
    serving.finish()
    assert (totals.prompt_tokens, totals.prefilled_tokens) == (2 * widest + 3, widest)
    serving.add([[8] * (2 * widest + 3)], GREEDY)
    serving.finish()
    assert totals.prefilled_tokens == 3 * widest + 3


def test_rows_are_counted_until_the_end_of_a_request() -> None:
    """A request without drafts verifies its root only, and an aborted one nothing more."""
    totals = Totals()
    serving = Serving(metrics=totals, run_ahead=1)
    plain, aborted = (
        *serving.add([PROMPTS[0]], replace(GREEDY, max_new_tokens=8, speculative=False)),
        *serving.add([PROMPTS[1]], GREEDY),
    )
    while not aborted.output_ids[1:]:
        serving.step()
    assert aborted.spec is not None
    assert len(serving.scheduler._in_flight) == 1
    serving.scheduler.abort(aborted)
    serving.finish()
    assert len(plain.output_ids) == 8
    rows = totals.rows_by_proposed
    num_verifies = aborted.spec.num_verifies
    assert (rows[0], rows[STEPS], sum(rows)) == (7, num_verifies, 7 + num_verifies)
    assert 0 < num_verifies < 4


def test_requests_that_ended_are_not_kept_until_their_deadline() -> None:
    deadlines, alive = Deadlines(), []
    for i in range(2000):
        request = make_request(PROMPTS[0], GREEDY, rid=str(i), timeout=3600.0)
        deadlines.watch(request)
        if i % 100 == 0:
            alive.append(request)
        else:
            request.finish({"type": "length"})
    assert len(deadlines._queue) <= 2 * len(alive) + 17
    assert deadlines.expired(alive[-1].created_time + 3600.0) == alive


@pytest.mark.slow
@pytest.mark.parametrize(("retry_steps", "decay"), [(4, 0.5), (1, 0.9)])
def test_a_blocked_queue_is_tried_again_and_again(monkeypatch, retry_steps, decay) -> None:
    """The reserve for running requests shrinks while none of them ends."""
    monkeypatch.setattr(budget, "RESERVE_START", 1.0)
    monkeypatch.setattr(budget, "RESERVE_DECAY", decay)
    monkeypatch.setattr(scheduler_module, "RETRY_STEPS", retry_steps)
    serving = Serving(num_pages=1 + 40, num_steps=0)
    first, second = serving.add(PROMPTS[:2], replace(GREEDY, max_new_tokens=100))
    serving.step()
    assert serving.num_waiting == 1
    for _ in range(8):
        serving.step()
    assert serving.num_waiting == 0
    assert not first.is_finished
    serving.finish()
    assert len(first.output_ids) == len(second.output_ids) == 100


def test_lost_results_are_a_fault_and_no_standstill() -> None:
    serving = Serving(run_ahead=1)
    serving.add(PROMPTS[:1], replace(GREEDY, max_new_tokens=2))
    serving.scheduler.step()
    serving.scheduler._in_flight.clear()
    serving.scheduler.step()  # the round
    serving.scheduler._in_flight.clear()
    with pytest.raises(RuntimeError, match="lost results"):
        serving.scheduler.step()
    serving.scheduler.fail_all("lost")
    serving.check_clean()

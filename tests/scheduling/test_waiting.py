"""Callers take turns in the queue of waiting requests."""

from collections import defaultdict, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.sampling.params import SamplingParams
from specjax.scheduling.request import Request
from specjax.scheduling.waiting import FairQueue

from ..support.runners import make_request

REQUESTS = [make_request([6], SamplingParams(), rid=str(i)) for i in range(40)]
# an operation, and a number that chooses the caller or the request
OPERATIONS = st.lists(st.tuples(st.sampled_from("aaapppbr"), st.integers(0, 4)), max_size=40)


@settings(max_examples=40)
@given(OPERATIONS)
def test_callers_take_turns_and_nothing_is_lost(operations) -> None:
    queue, new = FairQueue(), iter(REQUESTS)
    waiting: dict[int, list[Request]] = defaultdict(list)
    preempted: deque[Request] = deque()
    started: list[tuple[int, Request]] = []
    # for each caller, whose requests have started while its first one waits
    passed: dict[int, list[int]] = defaultdict(list)
    for operation, number in operations:
        if operation == "a":  # arrives
            request = next(new)
            queue.append(request, number)
            waiting[number].append(request)
        elif operation == "p" and len(queue):  # starts
            first = next(iter(queue))
            queue.take(first)
            assert first not in queue
            if preempted:
                assert first is preempted.popleft()
                continue
            (caller,) = [c for c, requests in waiting.items() if first in requests]
            assert waiting[caller].pop(0) is first
            started.append((caller, first))
            passed[caller] = []
            for other, requests in waiting.items():
                if other != caller and requests:
                    passed[other].append(caller)
                    assert len(set(passed[other])) == len(passed[other])
        elif operation == "b" and started:  # is preempted
            _, request = started.pop()
            queue.appendleft(request)
            preempted.appendleft(request)
        elif operation == "r" and len(queue):  # is aborted
            request = list(queue)[number % len(queue)]
            queue.remove(request)
            for requests in (preempted, *waiting.values()):
                if request in requests:
                    requests.remove(request)
            for other, requests in waiting.items():
                if not requests:
                    passed[other] = []
        expected = {*preempted, *(r for requests in waiting.values() for r in requests)}
        assert set(queue) == expected
        assert len(queue) == len(list(queue)) == len(expected)
        assert [request in queue for request in REQUESTS] == [r in expected for r in REQUESTS]


def start(queue: FairQueue) -> Request:
    request = next(iter(queue))
    queue.take(request)
    return request


def test_one_caller_is_served_in_order() -> None:
    queue = FairQueue()
    for request in REQUESTS:
        queue.append(request)
    assert list(queue) == REQUESTS
    assert [start(queue) for _ in REQUESTS] == REQUESTS


def test_preempted_requests_come_first() -> None:
    queue = FairQueue()
    for request in REQUESTS[2:6]:
        queue.append(request, request.rid)
    queue.appendleft(REQUESTS[1])
    queue.appendleft(REQUESTS[0])
    assert [start(queue) for _ in range(6)] == REQUESTS[:6]


def test_a_batch_counts_as_its_parts() -> None:
    queue = FairQueue()
    for request in REQUESTS[:30]:
        queue.append(request, "batch")
    for request in REQUESTS[30:33]:
        queue.append(request, request.rid)
    order = [int(start(queue).rid) for _ in range(6)]
    assert order == [0, 30, 31, 32, 1, 2]


def test_a_request_that_was_passed_over_keeps_its_turn() -> None:
    """Its caller's later request counts as a turn; then the others have theirs."""
    queue = FairQueue()
    for i, caller in enumerate("aaabbc"):
        queue.append(REQUESTS[i], caller)
    queue.appendleft(REQUESTS[6])
    assert [int(request.rid) for request in queue] == [6, 0, 3, 5, 1, 2, 4]
    queue.take(REQUESTS[1])
    assert [int(request.rid) for request in queue] == [6, 3, 5, 0, 4, 2]
    queue.take(REQUESTS[3])
    assert [int(start(queue).rid) for _ in range(5)] == [6, 5, 0, 4, 2]

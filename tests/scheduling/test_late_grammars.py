"""A waiting request whose grammar is not ready keeps no other from its start."""

from typing import Any

import pytest

from specjax.scheduling import scheduler as module
from specjax.scheduling.request import Request
from specjax.scheduling.scheduler import Scheduler

from .devices import Device, finish, requests_of, serve


class Grammar:
    """A grammar that is ready when a test says so, and limits nothing then."""

    mask, error, is_busy = None, "", False

    def __init__(self, request: Request) -> None:
        self._request, self.is_ready, self.num_asked = request, False, 0
        request.constraint = self  # type: ignore[assignment]

    def prepare(self, text: Any, seconds: float = 0.0) -> bool:
        self.num_asked += 1
        if self.is_ready:
            self._request.constraint = None
        return self.is_ready

    def close(self) -> None:
        pass


def run_until_finished(scheduler: Scheduler, request: Request) -> None:
    for _ in range(100):
        if not request.is_finished:
            scheduler.step()
    assert request.is_finished


def test_others_start_before_a_late_request() -> None:
    """The later request of its caller and another caller do; it starts as soon as it is ready."""
    device = Device(2)
    scheduler = serve(device)
    late, *others = requests_of(device, [11, 12, 13, 14, 15], 8)
    grammar = Grammar(late)
    scheduler.add(late, *others[:3], caller="a")
    scheduler.add(others[3], caller="b")
    run_until_finished(scheduler, others[0])
    assert late.admitted_time is None
    grammar.is_ready = True
    finish(scheduler)
    assert [len(chunk.tokens) for chunk in device.chunks] == [15, 12, 11, 13, 14]
    assert all(len(request.output_ids) == 8 for request in (late, *others))


def test_none_starts_before_a_preempted_request() -> None:
    """Else it would take the pages that the preempted one needs to go on."""
    device = Device(2)
    scheduler = serve(device)
    late, other = requests_of(device, [11, 12], 8)
    late.num_retractions, grammar = 1, Grammar(late)
    scheduler.add(late, other)
    scheduler.step()
    assert (late.admitted_time, other.admitted_time) == (None, None)
    grammar.is_ready = True
    finish(scheduler)
    assert [len(chunk.tokens) for chunk in device.chunks] == [11, 12]


def test_few_late_grammars_are_prepared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE_SECONDS", 0.0)
    device = Device(2)
    scheduler = serve(device)
    *late, free = requests_of(device, [5] * (module.MAX_LATE + 3), 4)
    grammars = [Grammar(request) for request in late]
    scheduler.add(*late)
    scheduler.step()
    asked = [grammar.num_asked > 0 for grammar in grammars]
    assert asked == [True] * module.MAX_LATE + [False] * 2
    scheduler.add(free)
    run_until_finished(scheduler, free)
    for grammar in grammars:
        grammar.is_ready = True
    finish(scheduler)
    assert all(len(request.output_ids) == 4 for request in late)

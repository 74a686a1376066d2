"""The engine loop with a scheduler whose requests count up."""

import asyncio
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from specjax.scheduling.loop import Call, EngineFault, EngineLoop, EventLoopDelivery, _watch

from ..support.waiting import wait_for

SECONDS = 10.0  # nothing here takes longer unless it hangs


class CountingRequest:
    """Ends after ``length`` tokens; ``None`` runs until it is aborted."""

    def __init__(self, rid: str, length: int | None = 3) -> None:
        self.rid = rid
        self.length = length
        self.output_ids: list[int] = []
        self.output_is_draft: list[bool] = []
        self.finish_reason: dict[str, Any] | None = None
        self.has_text = True
        self.fails_at: int | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def finish(self, reason: dict[str, Any]) -> None:
        self.finish_reason = self.finish_reason or reason

    def arrive(self) -> None:
        pass

    def close(self) -> None:
        pass

    def streamed_text(self) -> str:
        # a slow reader may miss the step that reaches it
        fails_at = sys.maxsize if self.fails_at is None else self.fails_at
        if self.has_text and len(self.output_ids) >= fails_at:
            raise UnicodeError("half a character")
        return " ".join(map(str, self.output_ids))

    def result(self) -> dict[str, Any]:
        return {"output_ids": list(self.output_ids), "meta_info": {"reason": self.finish_reason}}


class CountingScheduler:
    """Gives each request one token per step, in one thread only."""

    def __init__(self) -> None:
        self.running: list[CountingRequest] = []
        self.added: list[CountingRequest] = []
        self.num_steps = 0
        self.threads: set[str] = set()
        self.full = False
        self.error_at: int | None = None
        # a step waits here while a test holds it
        self.entered = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    idle_seconds = None

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, *requests: CountingRequest, caller: object) -> None:
        self.threads.add(threading.current_thread().name)
        if self.full:
            raise ValueError("the queue is full")
        self.running.extend(requests)
        self.added.extend(requests)

    def take_changed(self) -> list[CountingRequest]:
        changed, self.added = self.added, list(self.running)
        return changed

    def abort(self, request: CountingRequest) -> None:
        self.threads.add(threading.current_thread().name)
        request.finish({"type": "abort"})
        self.running.remove(request)

    def fail(self, request: CountingRequest, error: Exception) -> None:
        request.has_text = False
        request.finish({"type": "abort", "message": repr(error)})
        self.running.remove(request)

    def debug_state(self) -> dict[str, int]:
        return {"running": len(self.running)}

    def step(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.num_steps += 1
        self.entered.set()
        assert self.may_go_on.wait(SECONDS)
        if self.num_steps == self.error_at:
            raise OSError("the device fell off")
        for request in list(self.running):
            request.output_ids.append(len(request.output_ids))
            request.output_is_draft.append(False)
            if len(request.output_ids) == request.length:
                request.finish({"type": "length"})
                self.running.remove(request)
        time.sleep(0)

    def hold(self) -> None:
        """Make steps wait; returns when one waits."""
        self.may_go_on.clear()
        self.entered.clear()
        assert self.entered.wait(SECONDS)


class Caller:
    """A call and its mailbox."""

    def __init__(self, loop: EngineLoop, *requests: CountingRequest, **options: Any) -> None:
        self.items: SimpleQueue[Any] = SimpleQueue()
        self.call = Call(requests, **options)  # type: ignore[arg-type]
        self.call.deliver = self.items.put
        loop.submit(self.call)

    def take(self) -> Any:
        item = self.items.get(timeout=SECONDS)
        self.call.is_pending = False
        return item

    def rest(self) -> list[Any]:
        """All items up to the last, which ends the call."""
        items = [self.take()]
        while isinstance(items[-1], list):
            items.append(self.take())
        assert self.call.is_over
        return items


@pytest.fixture
def scheduler() -> CountingScheduler:
    return CountingScheduler()


@pytest.fixture
def loop(scheduler: CountingScheduler) -> Iterator[EngineLoop]:
    made = EngineLoop(scheduler, watchdog_timeout=300.0)  # type: ignore[arg-type]
    yield made
    scheduler.may_go_on.set()
    assert made.close(SECONDS)
    assert scheduler.threads <= {"specjax-engine"}


def test_a_call_hears_of_its_end_once(loop) -> None:
    short, long = CountingRequest("a", 2), CountingRequest("b", 9)
    caller = Caller(loop, short, long)
    assert caller.rest() == Caller(loop).rest() == [None]  # also without requests
    assert (len(short.output_ids), len(long.output_ids)) == (2, 9)
    loop.run(lambda: None)
    with pytest.raises(Empty):
        caller.items.get_nowait()


def test_a_stream_grows_and_ends_with_the_last_state(loop) -> None:
    caller = Caller(
        loop, CountingRequest("a", 4), CountingRequest("b", 7), is_stream=True, is_batch=True
    )
    *outputs, end = caller.rest()
    assert end is None
    for index, length in ((0, 4), (1, 7)):
        mine = [output for items in outputs for output in items if output["index"] == index]
        lengths = [len(output["output_ids"]) for output in mine]
        assert lengths == sorted(set(lengths))
        assert lengths[-1] == length
        assert mine[-1]["meta_info"]["reason"] == {"type": "length"}
        assert [output["text"] for output in mine] == [
            " ".join(map(str, range(n))) for n in lengths
        ]
        assert all(len(o["meta_info"]["output_is_draft"]) == len(o["output_ids"]) for o in mine)


def test_a_call_is_a_caller_unless_it_names_another(loop, scheduler, monkeypatch) -> None:
    callers, add = [], scheduler.add

    def record(*requests, caller):
        callers.append(caller)
        add(*requests, caller=caller)

    monkeypatch.setattr(scheduler, "add", record)
    own, other = (Call([CountingRequest(rid)]) for rid in "ab")
    other.caller = ("192.0.2.1", 4711)
    for call in (own, other):
        loop.wait(call)
    assert callers == [own, ("192.0.2.1", 4711)]


def test_a_slow_reader_gets_fewer_outputs(loop) -> None:
    caller = Caller(loop, CountingRequest("a", 500), is_stream=True)
    Caller(loop, CountingRequest("b", 500)).rest()
    outputs = caller.rest()
    # outputs that waited for the reader, and the last item
    assert len(outputs) == 3
    assert len(outputs[1][0]["output_ids"]) == 500


def test_the_thread_sleeps_without_work(loop, scheduler) -> None:
    Caller(loop, CountingRequest("a")).rest()
    steps = scheduler.num_steps
    started = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - started < 0.1
    assert scheduler.num_steps == steps == 3


def test_aborts_by_id_group_and_all(loop) -> None:
    requests = [CountingRequest(rid, None) for rid in ("x_0", "x_1", "y_0", "y_1", "z")]
    callers = [
        Caller(loop, *requests[:2], groups=["x", "x"]),
        Caller(loop, *requests[2:4], groups=["y", "y"]),
        Caller(loop, requests[4]),
    ]
    for rid in ("nobody", "y_1", "x"):
        loop.abort_rid(rid)
    assert callers[0].rest() == [None]
    ended = loop.run(lambda: [request.is_finished for request in requests])
    assert ended == [True, True, False, True, False]
    loop.abort_rid(None)
    assert [caller.rest() for caller in callers[1:]] == [[None]] * 2


def test_an_id_runs_once(loop, scheduler) -> None:
    first = Caller(loop, CountingRequest("a", None))
    (error,) = Caller(loop, CountingRequest("b", None), CountingRequest("a")).rest()
    assert isinstance(error, ValueError)
    assert "rid='a'" in str(error)
    # its first request has ended too
    assert [request.rid for request in loop.run(lambda: list(scheduler.running))] == ["a"]
    assert Caller(loop, CountingRequest("b")).rest() == [None]
    loop.abort(first.call)
    assert Caller(loop, CountingRequest("a")).rest() == [None]  # at once
    assert first.rest() == [None]
    assert loop.run(lambda: loop._by_rid) == {}


def test_an_id_is_free_when_its_own_request_has_ended(loop) -> None:
    first = Caller(loop, CountingRequest("a", 1), CountingRequest("b", None), is_stream=True)
    assert len(first.take()) == 2
    again = Caller(loop, CountingRequest("a", None))
    loop.abort(first.call)
    first.rest()
    loop.run(lambda: None)
    (error,) = Caller(loop, CountingRequest("a")).rest()  # the second of that name runs on
    assert "rid='a'" in str(error)
    loop.abort_rid("a")
    assert again.rest() == [None]
    assert loop.run(lambda: loop._by_rid) == {}


def test_a_refused_request_takes_its_call_along(loop, scheduler) -> None:
    other = Caller(loop, CountingRequest("a", None))
    loop.run(lambda: setattr(scheduler, "full", True))
    (error,) = Caller(loop, CountingRequest("b"), CountingRequest("c")).rest()
    assert str(error) == "the queue is full"
    loop.run(lambda: setattr(scheduler, "full", False))
    assert Caller(loop, CountingRequest("b")).rest() == [None]
    assert not other.call.is_over
    loop.abort(other.call)


def test_a_call_without_a_caller_is_aborted(loop, scheduler) -> None:
    deaf = Call([CountingRequest("a", None)], is_stream=True)  # type: ignore[list-item]
    deaf.deliver = lambda _: False
    loop.submit(deaf)
    wait_for(lambda: deaf.is_over)
    assert loop.run(lambda: scheduler.has_work) is False
    assert Caller(loop, CountingRequest("a")).rest() == [None]


def test_an_output_that_raises_ends_its_own_request(loop) -> None:
    broken, sibling = CountingRequest("a", None), CountingRequest("b", 6)
    broken.fails_at = 2
    other = Caller(loop, CountingRequest("c", 8))
    end = Caller(loop, broken, sibling, is_stream=True, is_batch=True).rest()[-1]
    assert end is None
    assert other.rest() == [None]

    assert broken.finish_reason == {
        "type": "abort",
        "message": repr(UnicodeError("half a character")),
    }
    assert sibling.finish_reason == {"type": "length"}


def test_other_processes_are_refused(loop, monkeypatch) -> None:
    """A forked child has no thread that could answer its calls."""
    requests = [CountingRequest("a", None)]
    stream = loop.stream(Call(requests, is_stream=True))  # type: ignore[arg-type]
    next(stream)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    late = loop.stream(Call(requests))  # type: ignore[arg-type]
    for call in (
        lambda: next(late),
        lambda: [next(stream) for _ in range(9)],
        lambda: loop.run(list),
        lambda: loop.abort_rid("a"),
        loop.debug_state,
    ):
        with pytest.raises(RuntimeError, match=r"the engine belongs to process .* fork -1"):
            call()
    monkeypatch.undo()
    stream.close()
    assert loop.debug_state()["running"] == 0


def test_functions_run_between_steps(loop, scheduler) -> None:
    Caller(loop, CountingRequest("a", None))
    name, steps = loop.run(lambda: (threading.current_thread().name, scheduler.num_steps))
    assert name == "specjax-engine"

    def divide() -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        loop.run(divide)
    wait_for(lambda: loop.run(lambda: scheduler.num_steps) >= steps + 2)  # it goes on


def test_a_fault_ends_all_calls(loop, scheduler) -> None:
    scheduler.error_at = 3
    callers = [
        Caller(loop, CountingRequest("a", None), CountingRequest("b", 1)),
        Caller(loop, CountingRequest("c", None), is_stream=True),
    ]
    errors = [caller.rest()[-1] for caller in callers]
    errors += [Caller(loop, CountingRequest("d"), is_stream=s).rest()[-1] for s in (False, True)]
    for error in errors:
        assert isinstance(error, EngineFault)
        assert isinstance(error.__cause__, OSError)
        assert "the device fell off" in str(error)
    assert len(set(map(id, errors))) == len(errors)
    reasons = [request.finish_reason["type"] for c in callers for request in c.call.requests]
    assert reasons == ["abort", "length", "abort"]
    with pytest.raises(EngineFault, match="make a new engine"):
        loop.run(lambda: None)
    loop.abort(callers[0].call)
    loop.abort_rid(None)
    assert loop.close(SECONDS)
    assert isinstance(Caller(loop, CountingRequest("e")).rest()[-1], EngineFault)
    assert scheduler.num_steps == 3


def test_a_step_that_does_not_return_fails_the_loop(scheduler) -> None:
    loop = EngineLoop(scheduler, watchdog_timeout=0.05)  # type: ignore[arg-type]
    callers = [Caller(loop, CountingRequest(f"{i}", None), is_stream=i > 0) for i in range(2)]
    scheduler.hold()
    errors: list[Any] = []

    def wait_for_the_thread() -> None:
        with pytest.raises(EngineFault) as caught:
            loop.run(list)
        errors.append(caught.value)

    waiting = threading.Thread(target=wait_for_the_thread)
    waiting.start()
    late = Caller(loop, CountingRequest("late"))
    errors += [caller.rest()[-1] for caller in (*callers, late)]
    waiting.join(SECONDS)
    errors += Caller(loop, CountingRequest("refused")).rest()
    with pytest.raises(EngineFault):
        loop.check_health()
    assert len(errors) == 5
    for error in errors:
        assert isinstance(error, EngineFault)
        assert isinstance(error.__cause__, TimeoutError)
        assert "0.05 s" in str(error)
        assert "watchdog_timeout" in str(error)
    # only the thread uses the scheduler, and it may still be inside the step
    assert [request.is_finished for request in scheduler.running] == [False, False]
    loop.abort_rid(None)
    assert not loop.close(0.01)
    scheduler.may_go_on.set()
    assert loop.close(SECONDS)
    assert scheduler.threads <= {"specjax-engine"}


def test_progress_and_idleness_are_no_failure(scheduler) -> None:
    loop = EngineLoop(scheduler, watchdog_timeout=0.05)  # type: ignore[arg-type]

    def replace_weights() -> None:
        for _ in range(8):
            time.sleep(0.02)
            loop.advance()

    loop.run(replace_weights)
    time.sleep(0.15)
    loop.check_health()
    assert Caller(loop, CountingRequest("a")).rest() == [None]
    assert loop.close(SECONDS)


def test_the_watchdog_counts_waits() -> None:
    """A process that was stopped for longer than the limit continues: that is one wait."""
    waits: list[float] = []
    beat = Mock(wait=lambda seconds: waits.append(seconds))
    has_ended = Mock(wait=lambda _: False, is_set=lambda: False)
    loop = Mock()
    _watch(lambda: loop, beat, has_ended, 300.0)  # type: ignore[arg-type]
    assert waits == [30.0] * 10
    loop.give_up.assert_called_once_with(300.0)


def test_waiting_calls_cost_nothing(loop, scheduler, monkeypatch) -> None:
    published: list[Call] = []
    whole = Call.publish

    def publish(call: Call, *arguments: Any) -> bool:
        published.append(call)
        return whole(call, *arguments)

    monkeypatch.setattr(Call, "publish", publish)
    scheduler.add = lambda *requests, caller: None  # they wait
    waiting = [Caller(loop, CountingRequest(f"{i}")) for i in range(40)]
    loop.run(lambda: vars(scheduler).pop("add"))
    Caller(loop, CountingRequest("a", 50)).rest()
    assert [published.count(caller.call) for caller in waiting] == [1] * 40
    loop.run(lambda: scheduler.running.extend(loop._calls))
    loop.abort_rid(None)
    assert [caller.rest() for caller in waiting] == [[None]] * 40


def test_a_vital_function_that_fails_is_a_fault(loop) -> None:
    caller = Caller(loop, CountingRequest("a", None))

    def fail() -> None:
        raise OSError("half done")

    with pytest.raises(OSError, match="half done"):
        loop.run(fail, is_vital=True)
    assert isinstance(caller.rest()[-1], EngineFault)


def test_closing_ends_everything(loop, scheduler) -> None:
    callers = [Caller(loop, CountingRequest(f"{i}", None), is_stream=i > 0) for i in range(2)]
    scheduler.hold()
    closing = threading.Thread(target=loop.close, args=(SECONDS,))
    closing.start()
    assert not loop.close(0.01)  # the step is in the way
    late = Caller(loop, CountingRequest("late"))
    scheduler.may_go_on.set()
    closing.join(SECONDS)
    assert not closing.is_alive()
    for caller in callers:
        assert caller.rest()[-1] is None
        assert caller.call.requests[0].finish_reason == {"type": "abort"}
    later = Caller(loop, CountingRequest("later"))
    for refused in (late, later):
        (error,) = refused.rest()
        assert isinstance(error, ValueError)
        assert "closed" in str(error)
    with pytest.raises(ValueError, match="closed"):
        loop.run(lambda: None)
    loop.abort(later.call)
    loop.abort_rid(None)
    assert loop.close(SECONDS)
    assert not scheduler.running


@pytest.mark.slow
@pytest.mark.parametrize("delay", range(20))
def test_submissions_race_with_the_end(scheduler, delay) -> None:
    """Whenever a loop ends, each submitted call gets its last item."""
    loop = EngineLoop(scheduler, watchdog_timeout=300.0)  # type: ignore[arg-type]
    callers: list[Caller] = []
    start, closed = threading.Barrier(2), threading.Event()

    def submit() -> None:
        start.wait()
        while not closed.is_set():
            callers.append(Caller(loop, CountingRequest(f"{len(callers)}", 1)))
        callers.append(Caller(loop, CountingRequest("late", 1)))

    thread = threading.Thread(target=submit)
    thread.start()
    start.wait()
    time.sleep(delay * 1e-4)
    assert loop.close(SECONDS)
    closed.set()
    thread.join(SECONDS)
    ends = [caller.rest()[-1] for caller in callers]
    assert all(end is None or "closed" in str(end) for end in ends)
    assert ends[-1] is not None


def test_a_stopped_loop_can_be_collected(scheduler) -> None:
    loop = EngineLoop(scheduler, watchdog_timeout=300.0)  # type: ignore[arg-type]
    Caller(loop, CountingRequest("a", 2)).rest()
    thread = loop._thread
    gone = weakref.ref(loop)
    loop.stop()
    thread.join(SECONDS)
    del loop
    gc.collect()
    assert gone() is None


def test_a_sleeping_thread_holds_nothing_of_its_callers(loop) -> None:
    request = CountingRequest("a", 2)
    caller = Caller(loop, request, is_stream=True)
    caller.rest()
    gone = weakref.ref(request), weakref.ref(caller.call)
    del request, caller
    wait_for(lambda: all(reference() is None for reference in gone))


def test_a_delivery_keeps_no_event_loop() -> None:
    """Also if an item was carried that no reader takes."""

    def closed() -> tuple[Any, EventLoopDelivery]:
        event_loop = asyncio.new_event_loop()
        delivery, mailbox = EventLoopDelivery(event_loop), asyncio.Queue()
        with pytest.raises(TimeoutError):
            event_loop.run_until_complete(asyncio.wait_for(mailbox.get(), 0.01))
        assert delivery.carry(mailbox, None)
        event_loop.close()
        assert not delivery.carry(mailbox, None)
        return weakref.ref(event_loop), delivery

    found, _ = closed()
    gc.collect()
    assert found() is None


def test_a_delivery_loses_nothing_and_keeps_the_order() -> None:
    count = 5000

    async def run() -> list[Any]:
        mailbox: asyncio.Queue[Any] = asyncio.Queue()
        delivery = EventLoopDelivery(asyncio.get_running_loop())
        carry = partial(delivery.carry, mailbox)
        thread = threading.Thread(target=lambda: list(map(carry, range(count))))
        thread.start()
        found = [await asyncio.wait_for(mailbox.get(), 10) for _ in range(count)]
        thread.join()
        return found

    assert asyncio.run(run()) == list(range(count))

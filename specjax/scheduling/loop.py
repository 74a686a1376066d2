"""The engine loop: one thread steps the scheduler, and calls from other threads wait for it."""

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary, ref

from specjax.checks import refused
from specjax.compiling.pool import on_progress
from specjax.models.routes import with_array
from specjax.scheduling.request import Request
from specjax.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")
# At exit, maximum wait until the threads that call JAX have ended. The process then ends with this
# status, because JAX's own cleanup would wait for the device too.
EXIT_SECONDS, EXIT_FAILED = 60.0, 1
# The seconds without progress of the engine's thread, until the engine fails, are counted in ticks.
WATCHDOG_TICKS = 10
POLL_SECONDS = 0.1  # interval at which threads that wait look for a failed or closed engine
# results with at least this many tokens are built outside the event loop's thread
MANY_TOKENS = 4096

Outputs = list[dict[str, Any]]
Item = Outputs | BaseException | None


@dataclass(eq=False, repr=False)
class Call:
    """Requests that one caller submits together. Outputs have the order of the requests.

    Only the loop's thread writes the attributes, except ``is_pending``.
    """

    requests: Sequence[Request]  # checked by `Scheduler.check`
    _: KW_ONLY
    is_stream: bool = False  # outputs are delivered as they grow
    text_only: bool = False  # outputs of running requests contain only the text and ids
    is_batch: bool = False  # the caller gets a list, and each output has its ``index`` in it
    groups: Sequence[str] = ()  # for each request, a second id for aborting it; may be shared
    caller: Hashable = None  # callers take turns; by default, a call is a caller of its own
    # Set before the call is submitted; the loop's thread passes items to it. A stream delivers
    # lists of outputs. The last item is an exception to raise, or ``None`` if all requests have
    # ended. Returns ``False`` if the caller is gone.
    deliver: Callable[[Item], bool | None] = field(init=False)
    is_over: bool = field(default=False, init=False)  # the last item has been delivered
    # delivered outputs have not been taken yet: later ones wait, so that a slow reader gets fewer
    is_pending: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.groups = self.groups or [request.rid for request in self.requests]
        self._unfinished = list(self.requests)
        self._reported = [(0, False)] * len(self.requests)

    @property
    def named(self) -> Iterator[tuple[Request, str]]:
        for request, group in zip(self.requests, self.groups, strict=True):
            yield from ((request, name) for name in {request.rid, group})

    def results(self) -> Any:
        """The final outputs: a list if ``is_batch``, else the output of the only request."""
        results = [with_array(request.result()) for request in self.requests]
        return results if self.is_batch else results[0]

    def publish(self, fail: Callable[[Request, Exception], None]) -> bool:
        """Deliver new outputs; return ``False`` if the caller is gone.

        If the output of a request raises an error, ``fail`` ends that request.
        """
        has_reader = True
        if self.is_stream and (self._has_ended() or not self.is_pending):
            if outputs := self._new_outputs(fail):
                self.is_pending = True
                has_reader = self.deliver(outputs) is not False
        if self._has_ended():
            self.end(None)
        return has_reader

    def end(self, item: BaseException | None) -> None:
        self.is_over = True
        self.deliver(item)

    def _has_ended(self) -> bool:
        while self._unfinished and self._unfinished[-1].is_finished:
            self._unfinished.pop()
        return not self._unfinished

    def _new_outputs(self, fail: Callable[[Request, Exception], None]) -> Outputs:
        outputs = []
        for i, request in enumerate(self.requests):
            if (len(request.output_ids), request.is_finished) == self._reported[i]:
                continue
            try:
                text = request.streamed_text()
            except Exception as error:
                fail(request, error)
                text = request.streamed_text()
            self._reported[i] = len(request.output_ids), request.is_finished
            # a text alone comes with a list that grows
            output: dict[str, Any] = {"text": text}
            if self.text_only and not request.is_finished:
                output["output_ids"] = request.output_ids
            else:
                output = request.result() | output
                output["meta_info"]["output_is_draft"] = list(request.output_is_draft)
            outputs.append(output | ({"index": i} if self.is_batch else {}))
        return outputs


class EngineFault(RuntimeError):
    """The engine loop has failed, and with it all requests; ``__cause__`` is the error."""


# maps running threads that call JAX to the functions that stop them; a forked process has none
_device_threads: dict[threading.Thread, Callable[[], None]] = {}
os.register_at_fork(after_in_child=_device_threads.clear)


def start_device_thread(
    run: Callable[[], None], name: str, stop: Callable[[], None]
) -> threading.Thread:
    """Start a daemon thread that calls JAX. The interpreter stops and joins it at exit.

    Otherwise, the thread could return from C++ code after the interpreter's end, which would abort
    the process. ``stop`` must make ``run`` return soon; any thread may call it, more than once.
    """

    def run_to_end() -> None:
        try:
            run()
        finally:
            del _device_threads[thread]

    thread = threading.Thread(target=run_to_end, name=name, daemon=True)
    # the hook that is registered last runs first, and the threads need JAX's devices until they end
    atexit.unregister(_end_device_threads)
    atexit.register(_end_device_threads)
    _device_threads[thread] = stop
    try:
        thread.start()
    except BaseException:
        del _device_threads[thread]
        raise
    return thread


def _end_device_threads() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    threads = dict(_device_threads)
    for stop in threads.values():
        with suppress(Exception):  # join the threads in any case
            stop()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if stuck := [thread.name for thread in threads if thread.is_alive()]:
        logger.critical("exiting without the threads %s, which wait for a device", stuck)
        exit_now(EXIT_FAILED)


def exit_now(status: int) -> NoReturn:
    """End the process without cleaning up, which could wait for a device that never answers."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed pipe, or no stream
            stream.flush()
    os._exit(status)


class EventLoopDelivery:
    """Delivers items from other threads to mailboxes in one event loop, in batches.

    Waking a loop takes a system call, during which the loop's thread takes the interpreter lock.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = ref(event_loop)
        # a weak reference, because the items' mailboxes would keep the event loop alive
        self._items: ref[deque[tuple[asyncio.Queue[Item], Item]]] | None = None
        self._is_awake = False

    def carry(self, mailbox: "asyncio.Queue[Item]", item: Item) -> bool:
        """Put an item into a mailbox; return ``False`` if the event loop is closed."""
        event_loop = self._event_loop()
        if event_loop is None or event_loop.is_closed():
            return False
        items = None if self._items is None else self._items()
        if items is None:
            items = deque()
            self._items = ref(items)
        items.append((mailbox, item))
        if not self._is_awake:
            self._is_awake = True
            try:
                event_loop.call_soon_threadsafe(self._put_all, items)
            except RuntimeError:  # the event loop was closed meanwhile
                return False
        return True

    def _put_all(self, items: "deque[tuple[asyncio.Queue[Item], Item]]") -> None:
        self._is_awake = False  # before reading: later items wake the loop again
        while items:
            mailbox, item = items.popleft()
            mailbox.put_nowait(item)


class EngineLoop:
    """Steps a scheduler in its own daemon thread, the only thread that uses the scheduler.

    Callers queue commands. The thread runs them between steps, or waits for them. Queueing never
    blocks and is reentrant: garbage collection may end a call, and so queue its abort, at any time.

    The thread keeps this object alive, but not the engine, whose finalizer stops the thread.

    Requests are submitted when their result is first requested, so that an unread stream uses no
    resources. If the caller leaves early (an exception, Ctrl-C, a cancelled task, or a stream that
    is closed or dropped), its running requests are aborted.

    A second thread watches the first. If no step or command ends within ``watchdog_timeout``
    seconds, the loop fails: callers get EngineFault, although the thread may never return.
    """

    def __init__(self, scheduler: Scheduler, watchdog_timeout: float) -> None:
        self._scheduler = scheduler
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._calls: dict[Request, Call] = {}  # of all unfinished calls
        self._due: dict[Call, None] = {}  # new calls, and those that a slow reader delays
        self._by_rid: dict[str, list[Request]] = {}  # requests by id and by group
        self._deliveries = WeakKeyDictionary[asyncio.AbstractEventLoop, EventLoopDelivery]()
        self._fault: BaseException | None = None
        self._is_stopping = False
        self._has_ended = threading.Event()
        self._beat = threading.Event()  # the thread has advanced since the watchdog last looked
        self._pid = os.getpid()
        self._thread = start_device_thread(self._run, "specjax-engine", self.stop)
        arguments = ref(self), self._beat, self._has_ended, watchdog_timeout
        threading.Thread(target=_watch, args=arguments, name="specjax-watch", daemon=True).start()

    def wait(self, call: Call) -> Any:
        for _ in self.stream(call):
            pass
        return call.results()

    async def wait_async(self, call: Call) -> Any:
        """Do the same as :meth:`wait`, as a coroutine."""
        async for _ in self.stream_async(call):
            pass
        # building a result takes 0.2 us per token
        is_short = sum(len(request.output_ids) for request in call.requests) < MANY_TOKENS
        is_short = is_short and all(request.routes is None for request in call.requests)
        return call.results() if is_short else await asyncio.to_thread(call.results)

    def stream(self, call: Call, *, owner: Any = None) -> Iterator[dict[str, Any]]:
        """Yield cumulative results as they grow; the iterator keeps ``owner`` alive."""
        mailbox: SimpleQueue[Item] = SimpleQueue()
        with self._submitted(call, mailbox.put):
            while (outputs := _raise_error(mailbox.get())) is not None:
                call.is_pending = False
                yield from map(with_array, outputs)
                self.check_process()

    async def stream_async(self, call: Call, *, owner: Any = None) -> AsyncIterator[dict[str, Any]]:
        """Do the same as :meth:`stream`, as an asynchronous generator."""
        event_loop = asyncio.get_running_loop()
        mailbox: asyncio.Queue[Item] = asyncio.Queue()
        delivery = self._deliveries.setdefault(event_loop, EventLoopDelivery(event_loop))
        with self._submitted(call, partial(delivery.carry, mailbox)):
            while (outputs := _raise_error(await mailbox.get())) is not None:
                call.is_pending = False
                for output in outputs:
                    has_routes = "routed_experts" in output.get("meta_info", {})
                    yield await asyncio.to_thread(with_array, output) if has_routes else output

    @contextmanager
    def _submitted(self, call: Call, deliver: Callable[[Item], bool | None]) -> Iterator[None]:
        """Submit a call; abort it if the block ends before the call is over."""
        call.deliver = deliver
        for request in call.requests:
            request.arrive()
        try:
            self.submit(call)
            yield
        finally:
            if not call.is_over:
                self.abort(call)
            else:
                for request in call.requests:
                    request.close()

    def check_process(self) -> None:
        """Raise RuntimeError in a forked process, which lacks the thread and would wait forever."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the engine belongs to process {self._pid}, not to its fork {os.getpid()}; make "
                "the engine in the process that uses it"
            )

    def check_health(self) -> None:
        """Raise the error with which a new call would end, if any; any thread may call this."""
        if (refusal := self._refusal()) is not None:
            raise refusal

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that can never be served; any thread may call this."""
        self._scheduler.check(request)

    def submit(self, call: Call) -> None:
        """Queue the requests of a call. Its last item will be delivered in any case."""
        self.check_process()
        self._put(partial(self._add, call))

    def abort(self, call: Call) -> None:
        """Abort the requests of a call; they keep the text generated so far."""
        self._put(partial(self._abort, call))

    def abort_rid(self, rid: str | None) -> None:
        """Abort the requests with this id or group, or all for ``None``; ignore unknown ids."""
        self.check_process()
        self._put(partial(self._abort_rid, rid))

    def run(self, function: Callable[[], T], *, is_vital: bool = False) -> T:
        """Call ``function`` in the loop's thread between two steps, and return its result.

        ``function`` may use the scheduler. Its exception is raised here; with ``is_vital``, the
        loop also fails. Raises EngineFault if the loop has failed, ValueError if it is closed.
        """
        self.check_process()
        reply: Future[T] = Future()

        def answer() -> None:
            if (refusal := self._refusal()) is not None:
                reply.set_exception(refusal)
                return
            try:
                reply.set_result(function())
            except BaseException as error:
                reply.set_exception(error)
                if is_vital:
                    raise

        self._put(answer)
        while not wait_for([reply], POLL_SECONDS).done:
            if self._fault is not None and not reply.done():  # the function may never return
                self.check_health()
        return reply.result()

    def post(self, function: Callable[[], None]) -> None:
        """Call ``function`` in the loop's thread later, unless the loop has ended or failed."""
        self._put(lambda: function() if self._refusal() is None else None)

    def advance(self) -> None:
        """Tell the watchdog that a long function in the loop's thread makes progress."""
        self._beat.set()

    def debug_state(self) -> dict[str, int]:
        """Return the numbers of requests, pages and calls once all earlier commands have run."""
        calls = self._calls.values()
        return self.run(lambda: self._scheduler.debug_state() | {"calls": len(set(calls))})

    def stop(self) -> None:
        """Make the thread abort all requests and end; any thread may call this."""
        self._put(self._stop)

    def close(self, timeout: float) -> bool:
        """Stop the thread and wait for it; return whether it ended within ``timeout`` seconds."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _put(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        # the thread may have read the queue for the last time
        if self._has_ended.is_set() or self._fault is not None:
            self._drain()

    def _drain(self) -> None:
        with suppress(Empty):
            while True:
                self._commands.get_nowait()()

    def give_up(self, seconds: float) -> None:
        """Fail although the thread does not return; any thread may call this.

        Requests and the scheduler stay as they are, because the thread may still use them.
        """
        message = f"no answer from the device for {seconds:g} s (watchdog_timeout)"
        logger.critical("the engine loop failed: %s", message)
        self._fault = TimeoutError(message)
        for call in {*self._calls.copy().values(), *self._due.copy()}:
            call.end(self._refusal())
        self._drain()

    # Only the loop's thread calls these methods. After its end or failure, commands are refused, in
    # any thread.

    def _run(self) -> None:
        on_progress.set(lambda *_: self.advance())  # functions may be compiled at their first use
        while not self._is_stopping:
            try:
                if not self._has_work:
                    # after a failure, another thread may have run the command that stops this one
                    has_failed = self._fault is not None
                    seconds = POLL_SECONDS if has_failed else self._scheduler.idle_seconds
                    # a variable would keep the objects of a caller alive while the thread sleeps
                    with suppress(Empty):
                        self._commands.get(timeout=seconds)()
                self._drain()
                if self._has_work and not self._is_stopping:
                    self._scheduler.step()
                self._publish()
            except BaseException as error:
                self._fail(error)
        self._has_ended.set()
        self._drain()

    @property
    def _has_work(self) -> bool:
        return self._fault is None and self._scheduler.has_work

    def _add(self, call: Call) -> None:
        try:
            self.check_health()
            for _, name in call.named:
                if not all(other.is_finished for other in self._by_rid.get(name, ())):
                    raise refused("rid", name, "is in use by a running request")
            self._scheduler.add(*call.requests, caller=call if call.caller is None else call.caller)
        except Exception as error:
            call.end(error)
            return
        self._due[call] = None
        self._calls |= dict.fromkeys(call.requests, call)
        if self._fault is not None:  # the watchdog may have ended all calls in the meantime
            call.end(self._refusal())
        for request, name in call.named:
            self._by_rid.setdefault(name, []).append(request)

    def _abort(self, call: Call) -> None:
        if not call.is_over:
            self._end(call.requests)

    def _abort_rid(self, rid: str | None) -> None:
        self._end(list(self._calls) if rid is None else self._by_rid.get(rid, ()))

    def _stop(self) -> None:
        self._is_stopping = True
        self._abort_rid(None)

    def _end(self, requests: Iterable[Request]) -> None:
        if self._fault is not None:  # the failure ends all requests
            return
        for request in requests:
            if not request.is_finished:
                self._scheduler.abort(request)

    def _publish(self) -> None:
        """Publish what is new; only requests that have run are looked at, as thousands may wait."""
        changed = self._scheduler.take_changed()
        calls = self._due | {call: None for call in map(self._calls.get, changed) if call}
        for call in calls:
            if not call.publish(self._scheduler.fail):  # the caller is gone
                self._end(call.requests)
                call.is_over = True
        self._due = {call: None for call in calls if call.is_pending and not call.is_over}
        for request, name in (pair for call in calls if call.is_over for pair in call.named):
            self._calls.pop(request, None)
            users = self._by_rid[name]
            users.remove(request)
            if not users:
                del self._by_rid[name]

    def _fail(self, error: BaseException) -> None:
        logger.error("the engine loop failed", exc_info=error)
        self._fault = error
        calls = {*self._calls.values(), *self._due}
        for collection in (self._calls, self._by_rid, self._due):
            collection.clear()
        message = f"the engine loop failed: {error!r}"
        # this may fail again, but no caller waits for it
        with suppress(Exception):
            self._scheduler.fail_all(message)
        for call in calls:
            for request in call.requests:
                request.finish({"type": "abort", "message": message})
            call.end(self._refusal())

    def _refusal(self) -> Exception | None:
        """The error for new calls, if any; a new object each time, because raising changes it."""
        if self._fault is not None:
            fault = EngineFault(f"the engine loop failed: {self._fault!r}; make a new engine")
            fault.__cause__ = self._fault
            return fault
        return ValueError("the engine is closed") if self._is_stopping else None


def _watch(
    loop: ref[EngineLoop], beat: threading.Event, has_ended: threading.Event, seconds: float
) -> None:
    """Make a loop fail if its thread runs no command for ``seconds`` and does not advance.

    It counts short waits, so that the time for which the process is stopped does not count.
    """
    tick = seconds / WATCHDOG_TICKS
    while not has_ended.wait(tick) and (owner := loop()) is not None:
        beat.clear()
        owner._put(beat.set)
        del owner  # the thread keeps the loop alive, and this one must not
        has_advanced = any(beat.wait(tick) for _ in range(WATCHDOG_TICKS)) or has_ended.is_set()
        if not has_advanced and (owner := loop()) is not None:
            return owner.give_up(seconds)


def _raise_error(item: Item) -> Outputs | None:
    if isinstance(item, BaseException):
        raise item
    return item

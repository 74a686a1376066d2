"""The engine loop: the one thread that owns the scheduler, and what its callers wait on."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from specjax.scheduling.request import Request
from specjax.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")
Outputs = list[dict[str, Any]]
Item = Outputs | BaseException | None


class EngineFault(RuntimeError):
    """The engine loop failed, and every request with it; ``__cause__`` is what happened."""


class Call:
    """Requests that one caller submits together, and where it is told of them.

    Everything but ``is_pending`` is written by the loop's thread only.

    Args:
        requests: passed by :meth:`Scheduler.check`.
        deliver: puts an item where the caller waits, from the loop's thread. With ``is_stream``
            lists of outputs come first; the last item is ``None`` when all requests have ended, or
            an exception to raise. It returns ``False`` where nobody can be waiting any more.
        is_stream: whether outputs are delivered as they grow.
        is_batch: whether outputs name the ``index`` of their request.
        groups: another id for each request, which may be shared, to abort it by.

    Attributes:
        is_over: the last item has been delivered.
        is_pending: outputs have been delivered and not been taken. While that is so, newer ones
            wait for a later step, so that a slow reader gets fewer outputs instead of a backlog.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        deliver: Callable[[Item], bool | None],
        *,
        is_stream: bool = False,
        is_batch: bool = False,
        groups: Sequence[str] = (),
    ) -> None:
        self.requests = requests
        self.groups = groups
        self.is_over = False
        self.is_pending = False
        self._deliver = deliver
        self._is_stream = is_stream
        self._is_batch = is_batch
        self._unfinished = list(requests)
        self._shown = [0] * len(requests)

    def publish(self) -> bool:
        """Deliver what is new; returns ``False`` where nobody can be waiting for it."""
        left = self._unfinished
        while left and left[-1].is_finished:
            left.pop()
        is_heard = True
        if self._is_stream and (not left or not self.is_pending):
            outputs = self._new_outputs()
            if outputs:
                self.is_pending = True
                is_heard = self._deliver(outputs) is not False
        if not left:
            self.is_over = True
            self._deliver(None)
        return is_heard

    def fail(self, error: BaseException) -> None:
        """Deliver an error as the last item."""
        self.is_over = True
        self._deliver(error)

    def _new_outputs(self) -> Outputs:
        outputs = []
        for i, request in enumerate(self.requests):
            state = 2 * len(request.output_ids) + request.is_finished
            if state == self._shown[i]:
                continue
            self._shown[i] = state
            output = request.result() | {"text": request.streamed_text()}
            output["meta_info"]["output_is_draft"] = list(request.output_is_draft)
            outputs.append(output | ({"index": i} if self._is_batch else {}))
        return outputs


class EngineLoop:
    """Steps a scheduler in a daemon thread of its own, the only one that touches it.

    Callers put commands in a queue that is emptied between steps; with nothing to do the thread
    sleeps in that queue. Putting a command does not block and may happen in the middle of another,
    so that a garbage collection, in whatever thread and moment, can abort a call.

    The thread keeps this object alive, and this object nothing of its owner: an owner that is
    collected calls :meth:`stop`.

    Args:
        scheduler: not to be used by anyone else from now on.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._calls: list[Call] = []
        self._by_rid: dict[str, list[Request]] = {}  # by id and by group
        self._fault: BaseException | None = None
        self._is_stopping = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="specjax-engine", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Queue the requests of a call; whatever happens to them, its last item is delivered."""
        self._put(partial(self._add, call))

    def abort(self, call: Call) -> None:
        """End the requests of a call with finish reason ``abort``; the text so far stays."""
        self._put(partial(self._abort, call.requests))

    def abort_rid(self, rid: str | None) -> None:
        """End the requests of an id or a group, or all with ``None``; unknown ids are ignored."""
        self._put(partial(self._abort_rid, rid))

    def run(self, function: Callable[[], T], *, is_vital: bool = False) -> T:
        """What ``function`` returns or raises when the loop's thread calls it between two steps.

        Args:
            function: may use the scheduler and what that uses.
            is_vital: an exception is also a fault of the loop.

        Raises:
            EngineFault: if the loop has failed before.
            ValueError: if the loop is closed.
        """
        reply: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._put(partial(self._answer, function, reply, is_vital))
        value, error = reply.get()
        if error is not None:
            raise error
        return value

    def stop(self) -> None:
        """Ask the thread to end all requests and itself; returns at once, in any thread."""
        self._put(self._stop)

    def close(self, timeout: float) -> bool:
        """:meth:`stop`, and wait for the thread; returns whether it has ended in time."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _put(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        if self._has_ended:  # the thread may have looked for the last time before
            self._drain()

    def _drain(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    # commands and steps: the thread's own; commands behind its end only refuse

    @property
    def _is_usable(self) -> bool:
        return self._fault is None and not self._is_stopping

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                if not self._has_work:
                    # a variable would keep the objects of a caller alive while the thread sleeps
                    self._commands.get()()
                self._drain()
                if self._has_work and not self._is_stopping:
                    self._scheduler.step()
                self._publish()
            except BaseException as error:
                self._fail(error)
        try:
            for call in self._calls:
                self._end(call.requests)
            self._publish()
        except BaseException as error:
            self._fail(error)
        self._has_ended = True
        self._drain()

    @property
    def _has_work(self) -> bool:
        return self._fault is None and self._scheduler.has_work

    def _add(self, call: Call) -> None:
        if not self._is_usable:
            call.fail(self._refusal())
            return
        try:
            for name in {*(request.rid for request in call.requests), *call.groups}:
                if not all(other.is_finished for other in self._by_rid.get(name, ())):
                    raise ValueError(f"rid={name!r} is that of a request that still runs")
            for request, names in _named(call):
                if not all(other.is_finished for other in self._by_rid.get(request.rid, ())):
                    raise ValueError(f"rid={request.rid!r} is given twice")
                for name in names:
                    self._by_rid.setdefault(name, []).append(request)
            self._scheduler.add(*call.requests)
        except Exception as error:
            self._forget(call)
            call.fail(error)
        else:
            self._calls.append(call)

    def _abort(self, requests: Iterable[Request]) -> None:
        if self._is_usable:
            self._end(requests)

    def _abort_rid(self, rid: str | None) -> None:
        if rid is not None:
            self._abort(self._by_rid.get(rid, ()))
            return
        for call in self._calls:
            self._abort(call.requests)

    def _answer(
        self,
        function: Callable[[], Any],
        reply: SimpleQueue[tuple[Any, BaseException | None]],
        is_vital: bool,
    ) -> None:
        if not self._is_usable:
            reply.put((None, self._refusal()))
            return
        try:
            value = function()
        except BaseException as error:
            reply.put((None, error))
            if is_vital:
                raise
        else:
            reply.put((value, None))

    def _stop(self) -> None:
        self._is_stopping = True

    def _end(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if not request.is_finished:
                self._scheduler.abort(request)

    def _forget(self, call: Call) -> None:
        for request, names in _named(call):
            for name in names:
                users = self._by_rid.get(name, [])
                if request in users:
                    users.remove(request)
                    if not users:
                        del self._by_rid[name]

    def _publish(self) -> None:
        unheard = [call for call in self._calls if not call.publish()]
        for call in unheard:
            self._end(call.requests)
            call.is_over = True
        over = [call for call in self._calls if call.is_over]
        if over:
            self._calls = [call for call in self._calls if not call.is_over]
            for call in over:
                self._forget(call)

    def _fail(self, error: BaseException) -> None:
        logger.error("the engine loop failed", exc_info=error)
        self._fault = error
        calls, self._calls = self._calls, []
        self._by_rid.clear()
        message = f"the engine loop failed: {error!r}"
        # what failed may fail again; no caller waits for that
        with suppress(Exception):
            self._scheduler.fail_all(message)
        for call in calls:
            for request in call.requests:
                request.finish({"type": "abort", "message": message})
            call.fail(self._refusal())

    def _refusal(self) -> Exception:
        """A new exception for one caller, since a raised one collects its caller's traceback."""
        if self._fault is None:
            return ValueError("the engine is closed")
        fault = EngineFault(f"the engine loop failed: {self._fault!r}; make a new engine")
        fault.__cause__ = self._fault
        return fault


def _named(call: Call) -> Iterable[tuple[Request, set[str]]]:
    """Each request of a call with the ids that it can be aborted by."""
    groups = call.groups or [request.rid for request in call.requests]
    for request, group in zip(call.requests, groups, strict=True):
        yield request, {request.rid, group}

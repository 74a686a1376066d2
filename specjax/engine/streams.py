"""How callers wait for the engine loop: in a thread or in asyncio, to the end or as texts grow.

Leaving early in any way (an exception, Ctrl-C, a cancelled task, a stream that is closed or
forgotten) aborts what still runs. Requests are submitted when their result is first asked for, so
that a stream that nobody reads holds nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from specjax.scheduling.loop import Call, EngineLoop, Item, Outputs
from specjax.scheduling.request import Request


@dataclass(frozen=True)
class Batch:
    """The requests of one ``generate``.

    Attributes:
        requests: in the order of their results.
        groups: the id of the input that each request is a sample of.
        is_batch: whether the caller gets a list.
    """

    requests: Sequence[Request]
    groups: Sequence[str]
    is_batch: bool

    def results(self) -> Any:
        """What the caller gets in the end."""
        results = [request.result() for request in self.requests]
        return results if self.is_batch else results[0]


class AsyncMailbox:
    """Takes items from the loop's thread to a coroutine of the running event loop."""

    def __init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self.get = self._queue.get

    def put(self, item: Item) -> bool:
        """Put an item, in any thread; returns ``False`` where the event loop is closed."""
        try:
            self._event_loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:
            return False
        return True


def wait(loop: EngineLoop, batch: Batch) -> Any:
    """Results of all requests, when the last has ended."""
    mailbox: SimpleQueue[Item] = SimpleQueue()
    with _submitted(loop, Call(batch.requests, mailbox.put, groups=batch.groups)):
        _raise_error(mailbox.get())
    return batch.results()


async def wait_async(loop: EngineLoop, batch: Batch) -> Any:
    """:func:`wait` as a coroutine."""
    mailbox = AsyncMailbox()
    with _submitted(loop, Call(batch.requests, mailbox.put, groups=batch.groups)):
        _raise_error(await mailbox.get())
    return batch.results()


def stream_batch(loop: EngineLoop, batch: Batch, *, owner: Any) -> Iterator[dict[str, Any]]:
    """Cumulative results as they grow; the iterator keeps the loop's ``owner`` alive."""
    mailbox: SimpleQueue[Item] = SimpleQueue()
    call = _streaming_call(batch, mailbox.put)
    with _submitted(loop, call):
        while (outputs := _raise_error(mailbox.get())) is not None:
            call.is_pending = False
            yield from outputs


async def stream_batch_async(
    loop: EngineLoop, batch: Batch, *, owner: Any
) -> AsyncIterator[dict[str, Any]]:
    """:func:`stream_batch` as an asynchronous generator."""
    mailbox = AsyncMailbox()
    call = _streaming_call(batch, mailbox.put)
    with _submitted(loop, call):
        while (outputs := _raise_error(await mailbox.get())) is not None:
            call.is_pending = False
            for output in outputs:
                yield output


def _streaming_call(batch: Batch, deliver: Any) -> Call:
    return Call(
        batch.requests, deliver, is_stream=True, is_batch=batch.is_batch, groups=batch.groups
    )


@contextmanager
def _submitted(loop: EngineLoop, call: Call) -> Iterator[None]:
    """Submit a call, and abort it where the block is left before it is over."""
    for request in call.requests:
        request.arrive()
    try:
        loop.submit(call)
        yield
    finally:
        if not call.is_over:
            loop.abort(call)


def _raise_error(item: Item) -> Outputs | None:
    if isinstance(item, BaseException):
        raise item
    return item

"""A call: the requests of one caller, and what the engine loop tells the caller of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from specjax.scheduling.request import Request

Outputs = list[dict[str, Any]]
Item = Outputs | BaseException | None


@dataclass(eq=False, repr=False)
class Call:
    """Requests that one caller submits together, and hears of in the same order.

    Everything but ``is_pending`` is written by the loop's thread only.

    Attributes:
        deliver: puts an item where the caller waits, from the loop's thread; set before the call is
            submitted. With ``is_stream`` lists of outputs come first; the last item is ``None``
            when all requests have ended, or an exception to raise. It returns ``False`` where
            nobody can be waiting any more.
        is_pending: outputs have been delivered and not been taken. While that is so, newer ones
            wait for a later step, so that a slow reader gets fewer outputs instead of a backlog.
    """

    requests: Sequence[Request]  # passed by `Scheduler.check`
    _: KW_ONLY
    is_stream: bool = False  # outputs are delivered as they grow
    is_brief: bool = False  # of requests that go on with their text alone
    is_batch: bool = False  # the caller gets a list, and outputs name their ``index`` in it
    groups: Sequence[str] = ()  # another id for each request to abort it by, which may be shared
    deliver: Callable[[Item], bool | None] = field(init=False)
    is_over: bool = field(default=False, init=False)  # the last item has been delivered
    is_pending: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.groups = self.groups or [request.rid for request in self.requests]
        self._unfinished = list(self.requests)
        self._shown = [(0, False)] * len(self.requests)

    @property
    def named(self) -> Iterator[tuple[Request, str]]:
        """Each request with each of the ids that it can be aborted by."""
        for request, group in zip(self.requests, self.groups, strict=True):
            yield from ((request, name) for name in {request.rid, group})

    def results(self) -> Any:
        """What the caller gets in the end."""
        results = [request.result() for request in self.requests]
        return results if self.is_batch else results[0]

    def publish(self, fail: Callable[[Request, Exception], None]) -> bool:
        """Deliver what is new; ``False`` where nobody can be waiting for it.

        ``fail`` ends a request whose output raised.
        """
        is_heard = True
        if self.is_stream and (self._has_ended() or not self.is_pending):
            outputs = self._new_outputs(fail)
            if outputs:
                self.is_pending = True
                is_heard = self.deliver(outputs) is not False
        if self._has_ended():
            self.end(None)
        return is_heard

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
            if (len(request.output_ids), request.is_finished) == self._shown[i]:
                continue
            try:
                text = request.streamed_text()
            except Exception as error:
                fail(request, error)
                text = request.streamed_text()
            self._shown[i] = len(request.output_ids), request.is_finished
            output: dict[str, Any] = {"text": text}
            if request.is_finished or not self.is_brief:
                output = request.result() | output
                output["meta_info"]["output_is_draft"] = list(request.output_is_draft)
            outputs.append(output | ({"index": i} if self.is_batch else {}))
        return outputs

"""One HTTP request and its answer, over the bare ASGI channels."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any, TypeVar

from specjax.server.fields import ApiError, Body, parse_object

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON = b"application/json"
RETRY_SECONDS = 1
# a body that takes longer to come is given up
READ_SECONDS = 60.0
# A body of more bytes counts against a budget, has to come at a rate in bytes per second after some
# seconds, and is read while at most one other such body is.
LARGE_BYTES, LARGE_AT_ONCE = 2**20, 2
MIN_RATE, RATE_GRACE_SECONDS = 2**20, 5.0
# of a body that is too long, read as well: so many times what it may have, and not less than this
DISCARDED, LEAST_DISCARDED = 4, 2**24
PIECE_BYTES = 2**18  # of a long answer
# a client that takes nothing of its answer for so long, or twice that, is given up
STALL_SECONDS = 60.0
# nginx would collect a stream
EVENT_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
ABORT = "specjax.abort"  # an extension of the scope: closes the connection at once
MAX_REQUEST_ID = 128  # characters of what a client calls its request
DONE = b"data: [DONE]\n\n"


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class ClientGoneError(Exception):
    """Nobody waits for the answer."""


class LargeBodies:
    """The budget of all connections for bodies of more than ``LARGE_BYTES``, in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.left = max_bytes
        self.turns = asyncio.Semaphore(LARGE_AT_ONCE)


class UnreadAnswers:
    """Answers that their clients have not taken; of too many bytes the oldest is given up."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._sizes: dict[Exchange, int] = {}

    @contextmanager
    def holding(self, exchange: "Exchange", size: int) -> Iterator[None]:
        """Count the bytes of an answer while it is being sent."""
        self._sizes[exchange] = size
        self._num_bytes += size
        while self._num_bytes > self._max_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self._forget(oldest)
            oldest.give_up()
        try:
            yield
        finally:
            self._forget(exchange)

    def _forget(self, exchange: "Exchange") -> None:
        self._num_bytes -= self._sizes.pop(exchange, 0)


class Exchange:
    """Reads the request, and sends one answer: a whole one or a stream of server-sent events."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive, self._send = receive, send
        self._is_streaming = self._has_answered = self._is_sending = False
        self._num_sent = 0
        self._watch: asyncio.Future[None] | None = None

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, whose name is in lower case."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    @asynccontextmanager
    async def body(self, limit: int, large: LargeBodies) -> AsyncIterator[bytearray]:
        """The body of at most ``limit`` bytes; a large one may be used inside the block only."""
        if self.header(b"content-encoding") not in (None, b"identity"):
            raise ApiError(415, "the body is compressed; send it as it is")
        total = min(limit, int(self.header(b"content-length") or limit))
        data, size, claimed, has_more, is_refused = bytearray(), 0, 0, True, False
        try:
            try:
                async with asyncio.timeout(READ_SECONDS) as timeout:
                    # many clients look for an answer only when they have sent all
                    while has_more and size <= max(DISCARDED * limit, LEAST_DISCARDED):
                        message = await self._receive()
                        if message["type"] == "http.disconnect":
                            raise ClientGoneError
                        piece = message.get("body", b"")
                        size += len(piece)
                        has_more = message.get("more_body", False)
                        if LARGE_BYTES < size <= limit and not (claimed or is_refused):
                            is_refused = total > large.left
                            if not is_refused:
                                claimed = total
                                large.left -= claimed
                                seconds = RATE_GRACE_SECONDS + (total - size) / MIN_RATE
                                timeout.reschedule(asyncio.get_running_loop().time() + seconds)
                        if size > limit or is_refused:
                            data.clear()
                        else:
                            data += piece
            except TimeoutError:
                raise ApiError(
                    408,
                    f"the body did not come within {READ_SECONDS:g} s or, above {LARGE_BYTES} "
                    f"bytes, at {MIN_RATE} bytes per second",
                ) from None
            if size > limit:
                too_long = (
                    f"the body is longer than {limit} bytes; send less or raise max_body_bytes"
                )
                raise ApiError(413, too_long)
            if is_refused:
                raise ApiError(
                    429,
                    f"bodies above {LARGE_BYTES} bytes of other requests are in hand; "
                    "try again later",
                    code="too_many_bytes",
                )
            async with large.turns if claimed else nullcontext():
                yield data
        finally:
            large.left += claimed

    async def read_object(self, limit: int, large: LargeBodies) -> Body:
        """A short body, a JSON object; no body at all is an empty one."""
        async with self.body(min(limit, LARGE_BYTES), large) as data:
            return Body(parse_object(data) if data else {})

    async def reply(
        self, body: bytes, status: int = 200, kind: bytes = JSON, headers: Iterable[Header] = ()
    ) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", kind), length, *headers])
        self._has_answered = True
        # in pieces, each of which waits until the client has taken most of those before
        for start in range(0, len(body) or 1, PIECE_BYTES):
            piece, has_more = body[start : start + PIECE_BYTES], start + PIECE_BYTES < len(body)
            message = {"type": "http.response.body", "body": piece, "more_body": has_more}
            await self._deliver(message)

    async def start_events(self) -> None:
        await self._start(200, EVENT_HEADERS)
        self._is_streaming = True

    async def push(self, events: bytes) -> None:
        """Send events, each a ``data:`` line and an empty one."""
        await self._deliver({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes = b"") -> None:
        """Send the last events and the mark behind them."""
        self._has_answered = True
        await self._deliver({"type": "http.response.body", "body": events + DONE})

    async def fail(self, error: ApiError) -> None:
        """Answer with an error, in a stream that has begun as its last event."""
        if self._has_answered:
            return
        if self._is_streaming:
            await self.end_events(b"data: " + error.json() + b"\n\n")
            return
        headers: list[Header] = []
        if error.status in (429, 503):  # the same request may succeed later
            headers = [(b"retry-after", str(RETRY_SECONDS).encode())]
        elif error.status == 401:
            headers = [(b"www-authenticate", b"Bearer")]
        elif error.status in (408, 413):  # what is left of the body would be read as a request
            headers = [(b"connection", b"close")]
        await self.reply(error.json(), error.status, headers=headers)

    async def while_connected(self, work: Awaitable[T]) -> T:
        """The result of ``work``, which is cancelled when the client goes or takes nothing."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self._watch = gone = asyncio.ensure_future(self._gone())
        timer = loop.call_later(STALL_SECONDS, lambda: look(-1))
        is_over = False

        def leave(_: object) -> None:
            if not is_over:
                task.cancel()

        def look(seen: int) -> None:
            nonlocal timer
            if self._is_sending and seen == self._num_sent:
                gone.cancel()
            timer = loop.call_later(STALL_SECONDS, look, self._num_sent)

        gone.add_done_callback(leave)
        try:
            return await work
        except asyncio.CancelledError:
            if not gone.done():
                raise
            task.uncancel()
            if (extension := self.scope.get("extensions", {}).get(ABORT)) is not None:
                extension["abort"]()
            raise ClientGoneError from None
        finally:
            is_over = True
            timer.cancel()
            gone.cancel()

    def give_up(self) -> None:
        """End :meth:`while_connected` as if the client had gone."""
        if self._watch is not None:
            self._watch.cancel()

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, headers: list[Header]) -> None:
        given = self.header(b"x-request-id") or b""
        if 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.decode().isprintable():
            headers = [*headers, (b"x-request-id", given)]
        await self._deliver({"type": "http.response.start", "status": status, "headers": headers})

    async def _deliver(self, message: MutableMapping[str, Any]) -> None:
        self._is_sending = True
        await self._send(message)
        self._is_sending = False
        self._num_sent += 1

"""One HTTP request and its response over raw ASGI channels."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any, TypeVar

from specjax.logs import ACCESS, request_id
from specjax.scheduling.request import new_id
from specjax.server.fields import ApiError, Body, parse_object

access = logging.getLogger(ACCESS)

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON = b"application/json"
RETRY_SECONDS = 1
# maximum time to receive a body
READ_SECONDS = 60.0
# Bodies above LARGE_BYTES count against a budget. They must arrive at MIN_RATE bytes per second
# after a grace time, and at most LARGE_AT_ONCE of them are parsed at once.
LARGE_BYTES, LARGE_AT_ONCE = 2**20, 2
MIN_RATE, RATE_GRACE_SECONDS = 2**20, 5.0
# Bytes of an overlong body to read and drop: a multiple of the body's limit, and a minimum.
DISCARDED, LEAST_DISCARDED = 4, 2**24
PIECE_BYTES = 2**18  # a long response is sent in pieces of this size
# A client that reads nothing of its response is dropped after one to two times this period.
STALL_SECONDS = 60.0
# x-accel-buffering: without this header, nginx buffers the stream
EVENT_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
ABORT = "specjax.abort"  # ASGI scope extension that closes the connection at once
MAX_REQUEST_ID = 128  # characters of X-Request-Id
MAX_SHOWN = 256  # characters of a path or rid in the access log


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class ClientGoneError(Exception):
    """The client has disconnected."""

    status = 499  # in the access log, as in nginx


class LargeBodies:
    """Byte budget that all connections share for bodies above ``LARGE_BYTES``."""

    def __init__(self, max_bytes: int) -> None:
        self.free_bytes = max_bytes
        self.turns = asyncio.Semaphore(LARGE_AT_ONCE)


class UnreadAnswers:
    """Tracks responses that clients have not read, and drops the oldest above a byte limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._sizes: dict[Exchange, int] = {}

    @contextmanager
    def holding(self, exchange: "Exchange", size: int) -> Iterator[None]:
        """Count the bytes of a response while it is being sent."""
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
    """Reads a request and sends one response, either whole or as server-sent events."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        # whose turn it is; access control may put a key in place of the connection
        self.caller: Any = tuple(scope.get("client") or ()) or None
        self._receive, self._send = receive, send
        self._has_answered = self._is_sending = False
        self._failed: Callable[[ApiError], bytes] | None = None  # set when a stream has begun
        self._num_sent = 0
        self._watch: asyncio.Future[None] | None = None
        sent_id = (self.header(b"x-request-id") or b"").decode("latin-1")
        is_safe = sent_id.isascii() and sent_id.isprintable() and len(sent_id) <= MAX_REQUEST_ID
        self.id = sent_id if is_safe and sent_id.strip() else new_id()
        self.rid = ""  # id of the engine's request, or of the first of several
        self.status = 0

    @contextmanager
    def logged(self, level: int) -> Iterator[None]:
        """Add the request's id to the log lines of the block, then write to the access log."""
        token, started = request_id.set(self.id), time.perf_counter()
        try:
            yield
        finally:
            fields = {
                "client": (self.scope.get("client") or ("-",))[0],
                "method": self.scope["method"],
                "path": self.scope["path"][:MAX_SHOWN],
                "status": self.status,
                "seconds": round(time.perf_counter() - started, 4),
                "rid": self.rid[:MAX_SHOWN] or "-",
            }
            access.log(level, "%s " * 4 + "%s s %s", *fields.values(), extra={"fields": fields})
            request_id.reset(token)

    def header(self, name: bytes) -> bytes | None:
        """Return the value of a header; ``name`` is in lower case."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    @asynccontextmanager
    async def body(self, limit: int, large: LargeBodies) -> AsyncIterator[bytearray]:
        """Read at most ``limit`` bytes; a large body uses a shared budget until the block ends."""
        if self.header(b"content-encoding") not in (None, b"identity"):
            raise ApiError(415, "compressed bodies are not supported; send the body uncompressed")
        total = min(limit, int(self.header(b"content-length") or limit))
        data, size, claimed, has_more, is_refused = bytearray(), 0, 0, True, False
        try:
            try:
                async with asyncio.timeout(READ_SECONDS) as timeout:
                    # many clients read a response only after they have sent the whole body
                    while has_more and size <= max(DISCARDED * limit, LEAST_DISCARDED):
                        message = await self._receive()
                        if message["type"] == "http.disconnect":
                            raise ClientGoneError
                        piece = message.get("body", b"")
                        size += len(piece)
                        has_more = message.get("more_body", False)
                        if LARGE_BYTES < size <= limit and not (claimed or is_refused):
                            is_refused = total > large.free_bytes
                            if not is_refused:
                                claimed = total
                                large.free_bytes -= claimed
                                seconds = RATE_GRACE_SECONDS + (total - size) / MIN_RATE
                                timeout.reschedule(asyncio.get_running_loop().time() + seconds)
                        if size > limit or is_refused:
                            data.clear()
                        else:
                            data += piece
            except TimeoutError:
                raise ApiError(
                    408,
                    f"the body must arrive within {READ_SECONDS:g} s; a body above {LARGE_BYTES} "
                    f"bytes must arrive at {MIN_RATE} bytes per second or faster",
                ) from None
            if size > limit:
                too_long = f"the body exceeds {limit} bytes; shorten it or raise max_body_bytes"
                raise ApiError(413, too_long)
            if is_refused:
                raise ApiError(
                    429,
                    f"too many request bodies above {LARGE_BYTES} bytes are in progress; "
                    "try again later",
                    code="too_many_bytes",
                )
            async with large.turns if claimed else nullcontext():
                yield data
        finally:
            large.free_bytes += claimed

    async def read_object(self, limit: int, large: LargeBodies) -> Body:
        """Read a short JSON object; a missing body is an empty object."""
        async with self.body(min(limit, LARGE_BYTES), large) as data:
            return Body(parse_object(data) if data else {})

    async def reply(
        self, body: bytes, status: int = 200, kind: bytes = JSON, headers: Iterable[Header] = ()
    ) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", kind), length, *headers])
        self._has_answered = True
        # each piece waits until the client has read most of the earlier ones
        for start in range(0, len(body) or 1, PIECE_BYTES):
            piece, has_more = body[start : start + PIECE_BYTES], start + PIECE_BYTES < len(body)
            message = {"type": "http.response.body", "body": piece, "more_body": has_more}
            await self._deliver(message)

    async def start_events(self, failed: Callable[[ApiError], bytes]) -> None:
        """Begin a stream; ``failed`` makes its last events if an error ends it."""
        await self._start(200, EVENT_HEADERS)
        self._failed = failed

    async def push(self, events: bytes) -> None:
        """Send events; each ends with an empty line."""
        await self._deliver({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes) -> None:
        """Send the last events."""
        self._has_answered = True
        await self._deliver({"type": "http.response.body", "body": events})

    async def fail(
        self, error: ApiError, body: Callable[[ApiError], bytes] = ApiError.json
    ) -> None:
        """Send an error response. If a stream has begun, send the error as its last event."""
        if self._has_answered:
            return
        if self._failed is not None:
            await self.end_events(self._failed(error))
            return
        headers: list[Header] = []
        if error.status in (429, 503):  # the same request may succeed later
            headers = [(b"retry-after", str(RETRY_SECONDS).encode())]
        elif error.status == 401:
            headers = [(b"www-authenticate", b"Bearer")]
        elif error.status in (408, 413):  # the rest of the body would be parsed as a request
            headers = [(b"connection", b"close")]
        await self.reply(body(error), error.status, headers=headers)

    async def while_connected(self, work: Awaitable[T]) -> T:
        """Await ``work``; cancel it if the client disconnects or stops reading."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self._watch = gone = asyncio.ensure_future(self._gone())
        timer = loop.call_later(STALL_SECONDS, lambda: look(-1))
        is_over = False

        def leave(_: object) -> None:
            if not is_over:
                task.cancel()

        def look(last_num_sent: int) -> None:
            nonlocal timer
            if self._is_sending and last_num_sent == self._num_sent:
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
        """End :meth:`while_connected` as if the client had disconnected."""
        if self._watch is not None:
            self._watch.cancel()

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        headers = [*headers, (b"x-request-id", self.id.encode())]
        await self._deliver({"type": "http.response.start", "status": status, "headers": headers})

    async def _deliver(self, message: MutableMapping[str, Any]) -> None:
        self._is_sending = True
        await self._send(message)
        self._is_sending = False
        self._num_sent += 1

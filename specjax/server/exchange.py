"""One HTTP request and its answer, over the bare ASGI channels."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeVar

from specjax.server.body import Body, parse_object
from specjax.server.errors import RETRY_SECONDS, ApiError

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON = b"application/json"
# a body that takes longer to come is given up
READ_SECONDS = 60.0
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
DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """Nobody waits for the answer."""


class Exchange:
    """Reads the request, and sends one answer: a whole one or a stream of server-sent events."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive, self._send = receive, send
        self._is_streaming = self._has_answered = self._is_sending = False
        self._num_sent = 0

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, whose name is in lower case."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    async def read(self, limit: int) -> bytes:
        """The body, of ``limit`` bytes at most."""
        if self.header(b"content-encoding") not in (None, b"identity"):
            raise ApiError(415, "the body is compressed; send it as it is")
        parts: list[bytes] = []
        size, has_more = 0, True
        try:
            async with asyncio.timeout(READ_SECONDS):
                # many clients look for an answer only when they have sent all
                while has_more and size <= max(DISCARDED * limit, LEAST_DISCARDED):
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body = message.get("body", b"")
                    size += len(body)
                    has_more = message.get("more_body", False)
                    if size <= limit:
                        parts.append(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {READ_SECONDS:g} s") from None
        if size > limit:
            raise ApiError(
                413, f"the body is longer than {limit} bytes; send less or raise max_body_bytes"
            )
        return b"".join(parts)

    async def read_object(self, limit: int) -> Body:
        """The body, a JSON object; no body at all is an empty one."""
        data = await self.read(limit)
        return Body(parse_object(data) if data else {})

    async def reply(
        self, body: bytes, status: int = 200, kind: bytes = JSON, headers: Iterable[Header] = ()
    ) -> None:
        """Send the whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", kind), length, *headers])
        self._has_answered = True
        # in pieces, each of which waits until the client has taken most of those before
        while len(body) > PIECE_BYTES:
            piece, body = body[:PIECE_BYTES], body[PIECE_BYTES:]
            await self._deliver({"type": "http.response.body", "body": piece, "more_body": True})
        await self._deliver({"type": "http.response.body", "body": body})

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
        if error.is_temporary:
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
        gone = asyncio.ensure_future(self._gone())
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
            raise ClientGoneError from None
        finally:
            is_over = True
            timer.cancel()
            gone.cancel()

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, headers: list[Header]) -> None:
        await self._deliver({"type": "http.response.start", "status": status, "headers": headers})

    async def _deliver(self, message: MutableMapping[str, Any]) -> None:
        self._is_sending = True
        await self._send(message)
        self._is_sending = False
        self._num_sent += 1

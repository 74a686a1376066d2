"""HTTP/1.1 connections with limits on what comes before a request's handler and its key.

uvicorn bounds neither the bytes nor the seconds of a request's head, and keeps connections that
never complete one.
"""

import asyncio
import logging
import os
import resource
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from specjax.server.errors import ApiError
from specjax.server.exchange import ABORT

logger = logging.getLogger(__name__)

# Request line and headers of one request; also what may come between two pieces of a body.
HEAD_BYTES = 2**16
HEAD_SECONDS = 15.0
# The rest of a body whose request was answered before, by a refusal.
DRAIN_SECONDS = 60.0
MAX_DESCRIPTORS = 65_536
# Connections that are accepted before the first of them is looked at.
ACCEPT_BATCH = 64
# Descriptors that connections leave for files and devices, and connections that there are anyway.
RESERVED_DESCRIPTORS, LEAST_CONNECTIONS = 64 + ACCEPT_BATCH, 16
LOG_SECONDS = 60.0
# Requests that may wait behind the one in hand; more on one connection close it.
MAX_PIPELINED = 16
# uvicorn warns of each request that is broken or asks for an upgrade: strangers could fill the log.
_errors = logging.getLogger("uvicorn.error.connection")
_errors.setLevel(logging.ERROR)


class LimitedProtocol(HttpToolsProtocol):
    """One connection, which is closed if a request's head is too long (431) or too slow (408).

    Beyond ``max_connections``, the one that has waited for a request for longest is closed.
    """

    max_connections = MAX_DESCRIPTORS
    _waiting: dict["LimitedProtocol", None] = {}  # noqa: RUF012 - of all connections, oldest first

    _timer: asyncio.TimerHandle | None = None
    _is_in_head = True
    _num_bytes = 0  # of the head, or since the last piece of a body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.logger = _errors
        self._wait(HEAD_SECONDS)
        while len(self.connections) > self.max_connections and self._waiting:
            oldest = next(iter(self._waiting))
            oldest._stop_waiting()
            self.connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self._is_answered:
            self._wait(HEAD_SECONDS if self._is_in_head else DRAIN_SECONDS)
        while data and not self.transport.is_closing():
            room = HEAD_BYTES - self._num_bytes if self._is_in_head else HEAD_BYTES
            piece, data = data[:room], data[room:]
            self._num_bytes += len(piece)
            super().data_received(piece)
            if self._num_bytes >= HEAD_BYTES:
                self._refuse(431, f"a request line with headers has {HEAD_BYTES} bytes at most")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # closing would wait for what a client does not read
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}

    def on_headers_complete(self) -> None:
        self._is_in_head, self._num_bytes = False, 0
        self._stop_waiting()
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.close()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head, self._num_bytes = True, 0
        super().on_message_complete()
        if self._is_answered:  # uvicorn has stopped its own timer
            self._stop_waiting()
            self._wait(HEAD_SECONDS)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answered:
            self._waiting[self] = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    @property
    def _is_answered(self) -> bool:
        """Whether no request is in hand."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        self._waiting[self] = None
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self._num_bytes:
            self._refuse(408, f"a request line with headers has to come in {HEAD_SECONDS:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        self._stop_waiting()
        if self._is_answered:
            body = ApiError(status, message).json()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + b"\r\n" + body)
        self.transport.close()


def raise_descriptor_limit() -> int:
    """Let the process open many files; returns how many connections that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    soft = min(soft if soft != resource.RLIM_INFINITY else most, MAX_DESCRIPTORS)
    open_now = len(os.listdir("/proc/self/fd"))
    return max(LEAST_CONNECTIONS, soft - open_now - RESERVED_DESCRIPTORS)


class AcceptFailures:
    """An exception handler of an event loop that logs failures to accept once a minute."""

    def __init__(self) -> None:
        self._last = -LOG_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "accept" in context["message"]:
            now = time.monotonic()
            if now - self._last < LOG_SECONDS:
                return
            self._last = now
        loop.default_exception_handler(context)

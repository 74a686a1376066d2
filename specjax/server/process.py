"""A process that serves: limits of its connections, its start with an engine, and its end.

uvicorn bounds neither the bytes nor the seconds of a request's head, and keeps connections that
never complete one.
"""

import asyncio
import gc
import logging
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from specjax.engine import Engine
from specjax.server.app import route
from specjax.server.exchange import ABORT
from specjax.server.fields import ApiError
from specjax.server.service import Access, Service, is_loopback

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75  # more than the minute that load balancers keep idle connections
BACKLOG = 2048  # connections that wait to be accepted
# what was aborted is answered at once; a client that does not read may keep its answer waiting
ANSWER_SECONDS = 5
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


def serve(
    make_engine: Callable[[], Engine],
    *,
    host: str,
    port: int,
    shutdown_timeout: float,
    access: Access,
    **options: Any,
) -> None:
    """Serve until SIGINT or SIGTERM; the engine is closed then.

    The port answers from the start on, with 503 until the engine is there. A signal stops new
    requests, which get 503, and lets those in hand end for ``shutdown_timeout`` seconds; what
    runs then is aborted, and its clients get what there is. A second signal aborts at once.

    Args:
        make_engine: called in a thread of its own.
        port: 0 chooses one.
        access: who may use which routes.
        **options: of :class:`~specjax.server.service.Service`.

    Raises:
        OSError: if the address cannot be bound.
        Exception: what ``make_engine`` raised.
    """
    future: Future[Engine] = Future()
    service = Service(future, access=access, **options)
    listener = bind(host, port)
    config = uvicorn.Config(
        route(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        # uvloop keeps the interpreter while it writes to a socket, and rounds need it too: of
        # 4,800 writes 2 let another thread in, and 145 to 240 of asyncio's
        loop="asyncio",
        http=LimitedProtocol,
        # connections accepted at once; the socket has its own queue
        backlog=ACCEPT_BATCH,
        server_header=False,
        proxy_headers=False,  # who is on the same host is told by the connection
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=ANSWER_SECONDS,
        ws="none",
    )
    LimitedProtocol.max_connections = raise_descriptor_limit()
    server = Server(config, service, shutdown_timeout)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    if not is_loopback(host) and access.api_key is None:
        logger.warning("%s is open to everybody who reaches it; set --api-key", address)

    def make() -> None:
        try:
            engine = make_engine()
        except BaseException as error:
            future.set_exception(error)
            server.has_begun.wait()
            server.should_exit = True
        else:
            # To look through the 300,000 objects that compiling leaves takes all threads 0.2 s.
            gc.collect()
            gc.freeze()
            future.set_result(engine)
            print(f"serving {service.name} at {address}", flush=True)

    maker = threading.Thread(target=make, name="specjax-make-engine", daemon=True)
    maker.start()
    try:
        server.run(sockets=[listener])
    finally:
        server.has_begun.set()
        listener.close()
        if maker.is_alive():
            # compiling cannot be interrupted, and would crash in the interpreter's end
            sys.stderr.flush()
            os._exit(0)
        if future.exception() is None:
            future.result().close()
    future.result()  # raises what ended it before it was ready


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 chooses one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # connections inherit it; asyncio sets it for sockets it opened itself only, and without it
        # an answer's second packet waits for the client's delayed acknowledgement, 40 ms
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen at {host}:{port}: {error}") from error
    return listener


class Server(uvicorn.Server):
    """Lets what is in hand end before it closes its sockets."""

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float) -> None:
        super().__init__(config)
        self._service, self._seconds = service, seconds
        self._deadline: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.has_begun = threading.Event()  # what ends it before that may leave its sockets open

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._deadline is not None:
            self._deadline = 0.0
            return
        self._deadline = time.monotonic() + self._seconds
        self._service.stop()
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._drain(), self._loop)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # uvicorn has shortened the queue
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(AcceptFailures())
        self.has_begun.set()
        if self._deadline is not None:
            await self._drain()

    async def _drain(self) -> None:
        assert self._deadline is not None
        while self._service.num_requests and time.monotonic() < self._deadline:
            await asyncio.sleep(0.05)
        last = time.monotonic() + ANSWER_SECONDS
        while self._service.num_requests and time.monotonic() < last:
            self._service.abort_all()  # again: one may have come to the engine meanwhile
            await asyncio.sleep(0.05)
        self.should_exit = True


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
    open_now = len(os.listdir("/proc/self/fd"))
    return max(LEAST_CONNECTIONS, most - open_now - RESERVED_DESCRIPTORS)


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

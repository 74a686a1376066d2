"""Server process: connection limits (uvicorn does not limit heads), start-up and shutdown."""

import asyncio
import faulthandler
import gc
import logging
import os
import resource
import signal
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

from specjax.compiling.pool import on_progress
from specjax.engine.engine import Engine
from specjax.logs import LOAD_SECONDS, discard_output
from specjax.metrics import Totals
from specjax.scheduling.loop import EXIT_FAILED, exit_now
from specjax.server.app import route
from specjax.server.exchange import ABORT
from specjax.server.fields import ApiError
from specjax.server.service import Access, Service, is_loopback

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75  # load balancers keep idle connections for 60 s
# Connections that wait to be accepted; the kernel lowers this to its own limit. A client that finds
# the queue full tries again after 1, 3, 7, 15 and 31 s.
BACKLOG = 65_535
# Maximum time at shutdown for clients to read the responses of aborted requests.
ANSWER_SECONDS = 5
# Seconds from the failure of the engine to the exit, in which clients read their errors.
FAILURE_SECONDS = 10.0
# The process is ended if it still runs this many seconds after its requests had to finish.
END_SECONDS = 3.0 * ANSWER_SECONDS
# Maximum size of the request line and headers, and of the bytes between two pieces of a body.
HEAD_BYTES = 2**16
HEAD_SECONDS = 15.0
# Maximum time for the rest of a body after its request was refused.
DRAIN_SECONDS = 60.0
MAX_DESCRIPTORS = 65_536
# Maximum connections to accept before any of them is handled.
ACCEPT_BATCH = 64
# Descriptors reserved for files and devices, and the minimum of the connection limit.
RESERVED_DESCRIPTORS, LEAST_CONNECTIONS = 64 + ACCEPT_BATCH, 16
LOG_SECONDS = 60.0
# Maximum requests that wait on a connection while one runs; one more closes the connection.
MAX_PIPELINED = 16
# uvicorn logs a warning for each malformed or upgrade request; clients could fill the log.
_errors = logging.getLogger("uvicorn.error.connection")
_errors.setLevel(logging.ERROR)


def serve(
    make_engine: Callable[[], Engine],
    *,
    host: str,
    port: int,
    shutdown_timeout: float,
    access: Access,
    stays_after_failure: bool = False,
    **options: Any,
) -> None:
    """Serve until SIGINT or SIGTERM, then close the engine.

    The port answers 503 until the engine is ready. After a signal new requests get 503, and those
    in progress have ``shutdown_timeout`` seconds to finish. Requests that still run then are
    aborted, and their clients get the partial results. A second signal aborts at once.

    The process ends with status 1 ``FAILURE_SECONDS`` after the engine has failed, and if threads
    still wait for the device ``END_SECONDS`` after requests had to finish.

    Args:
        make_engine: called in a separate thread.
        port: 0 picks a free port.
        stays_after_failure: after a failure of the engine, answer 503 until a signal.
        **options: arguments of :class:`~specjax.server.service.Service`.

    Raises:
        OSError: if the address cannot be bound.
        Exception: any exception from ``make_engine``.
    """
    future: Future[Engine] = Future()
    service = Service(future, access=access, **options)
    listener = bind(host, port)
    config = uvicorn.Config(
        route(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        # uvloop keeps the interpreter lock during socket writes, which delays rounds: other threads
        # got the lock in 2 of 4,800 writes; with asyncio they got it in 145 to 240
        loop="asyncio",
        http=LimitedProtocol,
        # connections per accept batch; the socket has its own queue
        backlog=ACCEPT_BATCH,
        server_header=False,
        proxy_headers=False,  # the connection's address tells if a caller is on the same host
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=ANSWER_SECONDS,
        ws="none",
    )
    LimitedProtocol.max_connections = raise_descriptor_limit()
    server = Server(config, service, shutdown_timeout)
    if stays_after_failure:
        server.failure_seconds = None
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    if not is_loopback(host) and not access.has_keys:
        logger.warning("%s accepts requests without an API key; set --api-key", address)

    is_over = threading.Event()

    def make() -> None:
        on_progress.set(service.report_progress)
        try:
            engine = make_engine()
        except BaseException as error:
            future.set_exception(error)
            server.has_begun.wait()
            server.should_exit = True
        else:
            # Compiling leaves 300,000 objects; each collection of them stops all threads for 0.2 s.
            gc.collect()
            gc.freeze()
            future.set_result(engine)
            arguments = engine.metrics.snapshot, is_over
            threading.Thread(target=log_load, args=arguments, name="specjax-load").start()
            try:
                print(f"serving {service.name} at {address}", flush=True)
            except OSError as error:
                logger.warning("standard output is closed (%s); serving at %s", error, address)
                discard_output()

    maker = threading.Thread(target=make, name="specjax-make-engine", daemon=True)
    maker.start()
    try:
        server.run(sockets=[listener])
    finally:
        server.has_begun.set()
        is_over.set()
        listener.close()
        if maker.is_alive():
            exit_now(0)  # compiling cannot be interrupted, and would crash at interpreter exit
        if service.has_failed:
            exit_now(EXIT_FAILED)
        if future.exception() is None:
            future.result().close()
        faulthandler.cancel_dump_traceback_later()
    future.result()  # raises the exception of make_engine


def log_load(
    snapshot: Callable[[], Totals], is_over: threading.Event, interval: float = LOAD_SECONDS
) -> None:
    """Log a line after each ``interval`` (in seconds) in which the engine had work."""
    past, then = snapshot(), time.monotonic()
    while not is_over.wait(interval):
        now, moment = snapshot(), time.monotonic()
        if load := describe_load(now, past, moment - then):
            measures = (f"{name.replace('_', ' ')} {value}" for name, value in load.items())
            logger.info("%s", ", ".join(measures), extra={"fields": load})
        past, then = now, moment


def describe_load(now: Totals, past: Totals, seconds: float) -> dict[str, float]:
    """Return requests, tokens/s, used share of the KV pool and accept length; {} if idle."""
    tokens = now.generated_tokens - past.generated_tokens
    prompts = now.prefilled_tokens - past.prefilled_tokens
    if not (now.num_running or now.num_waiting or tokens or prompts):
        return {}
    load = {
        "running": now.num_running,
        "waiting": now.num_waiting,
        "tokens_per_second": round(tokens / seconds, 1),
        "prefill_tokens_per_second": round(prompts / seconds, 1),
        "kv_use": round(now.token_usage, 4),
    }
    if verifies := now.num_verifies - past.num_verifies:
        accepted = now.num_accepted_drafts - past.num_accepted_drafts
        load["accept_length"] = round(1 + accepted / verifies, 2)
    return load


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 picks a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # Connections inherit this option; asyncio sets it only for sockets that it opened. Without
        # it, a response's second packet waits 40 ms for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    return listener


class Server(uvicorn.Server):
    """Lets requests in progress finish before it closes the sockets.

    It exits ``failure_seconds`` after the engine has failed, unless this is ``None``.
    """

    failure_seconds: float | None = FAILURE_SECONDS

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float) -> None:
        super().__init__(config)
        self._service, self._seconds = service, seconds
        self._deadline: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.has_begun = threading.Event()  # an exit before this event could leave the sockets open

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._deadline is not None:
            self._deadline = 0.0
            end_within(END_SECONDS)
            return
        end_within(self._seconds + END_SECONDS)
        self._deadline = time.monotonic() + self._seconds
        self._service.stop()
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._drain(), self._loop)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # uvicorn has shortened its queue
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(AcceptFailures())
        if (key_file := self._service.access.key_file) is not None:
            self._loop.add_signal_handler(signal.SIGHUP, key_file.reload)
        self.has_begun.set()
        if self._deadline is not None:
            await self._drain()

    async def on_tick(self, counter: int) -> bool:
        seconds = self.failure_seconds
        if seconds is not None and counter % 10 == 0 and self._service.has_failed:
            self.failure_seconds = None
            logger.critical("exiting with status %d in %g s", EXIT_FAILED, seconds)
            end_within(seconds + END_SECONDS)
            asyncio.get_running_loop().call_later(seconds, setattr, self, "should_exit", True)
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        assert self._deadline is not None
        while self._service.num_requests and time.monotonic() < self._deadline:
            await asyncio.sleep(0.05)
        last = time.monotonic() + ANSWER_SECONDS
        while self._service.num_requests and time.monotonic() < last:
            self._service.abort_all()  # repeated: a request may have reached the engine meanwhile
            await asyncio.sleep(0.05)
        self.should_exit = True


def end_within(seconds: float) -> None:
    """End the process after ``seconds`` with status 1 and a traceback of each thread.

    It works although threads wait for a device or hold the interpreter lock.
    """
    stream = sys.__stderr__ or open(os.devnull, "w")
    faulthandler.dump_traceback_later(min(seconds, 1e8), exit=True, file=stream)


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A request head that is too long (431) or too slow (408) closes it.

    Above ``max_connections``, the connection that has waited longest for a request is closed.
    """

    max_connections = MAX_DESCRIPTORS
    _waiting: dict["LimitedProtocol", None] = {}  # noqa: RUF012 - oldest first, process-wide

    _timer: asyncio.TimerHandle | None = None
    _is_in_head = True
    _num_bytes = 0  # bytes of the head, or bytes since the last piece of a body

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
                self._refuse(431, f"the request line and headers exceed {HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # close() would wait until the client has read everything
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
        if self._is_answered:  # uvicorn has stopped its timer
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
            self._refuse(408, f"the request line and headers must arrive in {HEAD_SECONDS:g} s")
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
    """Raise the limit on open files; return the number of connections that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    open_now = len(os.listdir("/proc/self/fd"))
    return max(LEAST_CONNECTIONS, most - open_now - RESERVED_DESCRIPTORS)


class AcceptFailures:
    """Event loop exception handler that logs accept failures at most once per minute."""

    def __init__(self) -> None:
        self._last = -LOG_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "accept" in context["message"]:
            now = time.monotonic()
            if now - self._last < LOG_SECONDS:
                return
            self._last = now
        loop.default_exception_handler(context)

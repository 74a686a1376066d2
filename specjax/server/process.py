"""A process that serves: its socket, the engine that is made meanwhile, and its end on a signal."""

import asyncio
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import uvicorn

from specjax.engine import Engine
from specjax.server.access import Access, is_loopback
from specjax.server.app import route
from specjax.server.protocol import (
    ACCEPT_BATCH,
    AcceptFailures,
    LimitedProtocol,
    raise_descriptor_limit,
)
from specjax.server.service import Service

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75  # more than the minute that load balancers keep idle connections
BACKLOG = 2048  # connections that wait to be accepted
# what was aborted is answered at once; a client that does not read may keep its answer waiting
ANSWER_SECONDS = 5


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
    if not is_loopback(host) and not access.has_key:
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

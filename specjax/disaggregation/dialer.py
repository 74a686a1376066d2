"""Dialer: keeps a channel to a listener open and reopens it after a loss."""

import logging
import os
import random
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from specjax.disaggregation import messages as wire
from specjax.disaggregation.address import check_secret, endpoints
from specjax.disaggregation.channel import LANES, WINDOW, Bell, Channel, ChannelClosed, Hook, Terms
from specjax.scheduling.loop import start_device_thread

logger = logging.getLogger(__name__)

EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
RETRY = 1e-3  # seconds until a frame is offered again after libzmq's queue was full


class Dialer:
    """Connects to one listener in a daemon thread until it is closed.

    Callbacks never overlap and come in this order: ``opened``, then ``deliver`` for each message
    and ``lost`` once, then ``opened`` for the next channel.

    The wait between attempts doubles each time, up to ``max_wait`` seconds. A random part, up to
    half, is taken off, so that many processes spread out. After a channel that lasted longer than
    ``max_wait``, the wait starts at ``first_wait`` again. After a refusal it is ``max_wait``.
    """

    def __init__(
        self, address: str, terms: Terms, *, first_wait: float = 0.1, max_wait: float = 5.0
    ) -> None:
        """Start to connect. Raises ValueError if the address is malformed or needs a secret."""
        check_secret(address, terms.secret)
        self.address = address
        self._terms = terms
        self._first_wait = first_wait
        self._max_wait = max_wait
        self._closing = threading.Event()
        self._bell = Bell()
        self._logged: set[str] = set()  # reasons logged since a channel was opened
        self._context: zmq.Context[Any] = zmq.Context(io_threads=LANES)
        self._thread = start_device_thread(self._run, "specjax-dial", self.close)

    def close(self) -> None:
        """Close the channel and stop dialing; returns before ``lost`` is called."""
        self._closing.set()
        self._bell.ring()

    def _run(self) -> None:
        wait, number = self._first_wait, 0
        while not self._closing.is_set():
            started = time.monotonic()
            try:
                addresses = endpoints(self.address)
                with ExitStack() as stack:
                    _Session(self, addresses[number % len(addresses)], stack).run()
            except Exception as error:
                self._log(error)
                if not isinstance(error, OSError):
                    wait = self._max_wait
            if time.monotonic() - started > self._max_wait:
                wait = self._first_wait
            self._closing.wait(wait * random.uniform(0.5, 1.0))
            wait, number = min(2 * wait, self._max_wait), number + 1
        self._context.destroy(linger=0)

    def _log(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if reason in self._logged or self._closing.is_set():
            return
        self._logged.add(reason)
        is_expected = isinstance(error, OSError | ValueError)
        logger.warning(
            "cannot connect to %s, retrying: %s",
            self.address,
            reason,
            exc_info=None if is_expected else error,
        )


class _Session:
    """One connection attempt: its lanes (parallel sockets) and the messages on them."""

    def __init__(self, dialer: Dialer, endpoint: str, stack: ExitStack) -> None:
        self._dialer = dialer
        self._endpoint = endpoint
        self._lanes: list[zmq.Socket[Any]] = []
        self._monitors: list[zmq.Socket[Any]] = []
        for lane in range(LANES):
            sock = stack.enter_context(dialer._context.socket(zmq.DEALER))
            dialer._terms.prepare(sock, listens=False)
            sock.affinity = 1 << lane  # one I/O thread per lane
            self._monitors.append(stack.enter_context(sock.get_monitor_socket(EVENTS)))
            stack.callback(sock.disable_monitor)
            self._lanes.append(sock)
        self._pollers = [zmq.Poller() for _ in range(LANES)]  # each waits for frames on its lane
        for sock, poller in zip(self._lanes, self._pollers, strict=True):
            for source in (sock, *self._monitors, dialer._bell.fd):
                poller.register(source, zmq.POLLIN)
        self._deadline = time.monotonic() + dialer._terms.pulse.handshake
        self._assembler = wire.Assembler(dialer._terms.max_bytes)
        self._frames: deque[wire.Frame] = deque()  # to be sent
        self._facts, self._token = dialer._terms.hello().facts, os.urandom(16)
        self._num_connected = 0  # number of connected lanes
        self._turn = 0  # lane of the next frame
        self._num_untold = 0  # received frames that are not acknowledged yet
        self._channel: Channel | None = None

    def run(self) -> None:
        """Run until the channel closes. If it could not be opened, raise the error."""
        try:
            self._connect()
            while True:
                self._step()
        except Exception as error:
            if self._channel is None:
                raise
            self._channel.fail(error)
            self._channel.tell_lost()

    def _step(self) -> None:
        bell = self._dialer._bell
        seconds = RETRY if self._frames else self._dialer._terms.pulse.interval
        ready = dict(self._pollers[self._turn].poll(round(1000 * seconds)))
        if bell.fd in ready:
            bell.silence()
        if self._dialer._closing.is_set():
            raise ChannelClosed("this side closed the connection")
        if self._channel is not None and self._channel.reason is not None:
            raise self._channel.reason
        self._receive()
        for monitor in self._monitors:
            if monitor in ready:
                self._watch(recv_monitor_message(monitor)["event"])
        if self._channel is None and time.monotonic() > self._deadline:
            raise TimeoutError("the handshake timed out")
        self._send()

    def _connect(self) -> None:
        """Connect the next lane. Lanes that connect simultaneously would share a libzmq thread."""
        sock = self._lanes[self._num_connected]
        sock.connect(self._endpoint)
        opening = wire.Open(token=self._token, lane=self._num_connected, facts=self._facts)
        [frame] = wire.encode(opening)
        sock.send(frame, zmq.DONTWAIT)
        self._num_connected += 1

    def _watch(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._num_connected < LANES:
                self._connect()
            return
        if self._channel is not None:
            raise ChannelClosed("the peer closed the connection or stopped responding")
        if event == zmq.EVENT_CLOSED:
            raise ConnectionRefusedError("nothing listens on this address")
        raise ConnectionError(
            "the peer closed the connection during the handshake; its disaggregation_secret or "
            "its version may differ"
        )

    def _send(self) -> None:
        if self._num_untold:
            self._frames.extend(wire.encode(wire.Taken(count=self._num_untold)))
            self._num_untold = 0
        with suppress(zmq.Again):  # retry in the next step
            while self._frames:
                self._lanes[0].send(self._frames[0], zmq.DONTWAIT, copy=False)
                self._frames.popleft()

    def _receive(self) -> None:
        for _ in range(WINDOW // 4):
            if self._channel is not None and not self._channel.is_open:
                return
            try:
                frame = self._lanes[self._turn].recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            if frame.more:
                reason = self._lanes[self._turn].recv()
                raise ChannelClosed(f"the peer closed the connection: {reason[:1000].decode()}")
            self._turn = (self._turn + 1) % LANES
            self._num_untold += 1
            message = self._assembler.feed(frame.buffer) if len(frame) else None
            if message is not None:
                self._take(message)

    def _take(self, message: wire.AnyMessage) -> None:
        if self._channel is None and isinstance(message, wire.Hello):
            channel = Channel(message, self._dialer._bell, self._queue)
            channel.open(self._dialer._terms)
            self._dialer._logged.clear()
            self._channel = channel
        elif self._channel is None or isinstance(message, wire.Hello | wire.Open | wire.Taken):
            raise wire.WireError(f"unexpected {type(message).__name__} message")
        else:
            self._channel.deliver(message)

    def _queue(self, channel: Channel, message: wire.Message, sent: Hook | None) -> None:
        assert sent is None, "not supported by the dialer"
        self._frames.extend(wire.encode(message))
        self._dialer._bell.ring()

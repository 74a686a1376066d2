"""A dialer: a channel to a listener that is opened again whenever it is lost."""

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

from specjax.disaggregation.address import check_secret
from specjax.disaggregation.channel import (
    LANES,
    WINDOW,
    Bell,
    Channel,
    ChannelClosed,
    Sent,
    Terms,
    places,
    prepare,
)
from specjax.disaggregation.frames import AnyMessage, Assembler, Frame, encode
from specjax.disaggregation.messages import Hello, Message, Open, Taken, WireError
from specjax.scheduling.loop import start_device_thread

logger = logging.getLogger(__name__)

EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
RETRY = 1e-3  # seconds until a frame is offered again that libzmq had no room for


class Dialer:
    """Connects to one listener for as long as it is not closed, in a daemon thread.

    What it calls comes in this order, never two at once: ``opened``, then ``deliver`` for each
    message and ``lost`` once, then the next channel's ``opened``.

    Between two attempts it waits, twice as long each time, less a random part by which many
    processes spread out. After a channel that has lasted longer than any wait it starts with the
    shortest one. A peer that is refused is asked at the slowest pace: only a new process can help.
    """

    def __init__(
        self, address: str, terms: Terms, *, first_wait: float = 0.1, max_wait: float = 5.0
    ) -> None:
        """Starts to connect at once.

        Args:
            first_wait: seconds after the first failure.
            max_wait: seconds that no wait exceeds.

        Raises:
            ValueError: the address is not one, or lacks a secret.
        """
        check_secret(address, terms.secret)
        self._address = address
        self._terms = terms
        self._first_wait = first_wait
        self._max_wait = max_wait
        self._closing = threading.Event()
        self._bell = Bell()
        self._logged: set[str] = set()  # since a channel was opened
        self._context: zmq.Context[Any] = zmq.Context(io_threads=LANES)
        self._thread = start_device_thread(self._run, "specjax-dial", self.close)

    def close(self) -> None:
        """Close the channel and open no more; returns at once, and ``lost`` follows."""
        self._closing.set()
        self._bell.ring()

    def _run(self) -> None:
        wait, number = self._first_wait, 0
        while not self._closing.is_set():
            started = time.monotonic()
            try:
                self._attempt(number)
            except Exception as error:
                self._log(error)
                if not isinstance(error, OSError):
                    wait = self._max_wait
            if time.monotonic() - started > self._max_wait:
                wait = self._first_wait
            self._closing.wait(wait * random.uniform(0.5, 1.0))
            wait, number = min(2 * wait, self._max_wait), number + 1
        self._context.destroy(linger=0)

    def _attempt(self, number: int) -> None:
        """One channel, from its connections to its end; raises if it was not opened."""
        found = places(self._address)
        with ExitStack() as stack:
            lanes, monitors = [], []
            for lane in range(LANES):
                sock = stack.enter_context(self._context.socket(zmq.DEALER))
                prepare(sock, self._terms, listens=False)
                sock.affinity = 1 << lane  # a thread of its own
                monitors.append(stack.enter_context(sock.get_monitor_socket(EVENTS)))
                stack.callback(sock.disable_monitor)
                lanes.append(sock)
            _Session(self, found[number % len(found)], lanes, monitors).run()

    def _log(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if reason in self._logged or self._closing.is_set():
            return
        self._logged.add(reason)
        is_expected = isinstance(error, OSError | ValueError)
        logger.warning(
            "no channel to %s, trying again: %s",
            self._address,
            reason,
            exc_info=None if is_expected else error,
        )


class _Session:
    """The lanes of one attempt, and what comes through them."""

    def __init__(
        self,
        dialer: Dialer,
        place: str,
        lanes: "list[zmq.Socket[Any]]",
        monitors: "list[zmq.Socket[Any]]",
    ) -> None:
        self._dialer = dialer
        self._place = place
        self._lanes = lanes
        self._monitors = monitors
        self._pollers = [zmq.Poller() for _ in lanes]  # for a frame of each lane
        for lane, poller in zip(lanes, self._pollers, strict=True):
            for source in (lane, *monitors, dialer._bell.fd):
                poller.register(source, zmq.POLLIN)
        self._deadline = time.monotonic() + dialer._terms.pulse.handshake
        self._assembler = Assembler(dialer._terms.max_bytes)
        self._frames: deque[Frame] = deque()  # to be sent
        self._facts, self._token = dialer._terms.hello().facts, os.urandom(16)
        self._num_connected = 0  # lanes
        self._turn = 0  # the lane of the next frame
        self._num_untold = 0  # frames that the listener does not know to be taken
        self._channel: Channel | None = None

    def run(self) -> None:
        """Until the channel ends; raises the reason if it was not opened."""
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
            raise TimeoutError("the peer was too slow in the handshake")
        self._send()

    def _connect(self) -> None:
        """Connect the next lane.

        libzmq gives a connection to its least busy thread, and would not yet know of another one
        that has just come: lanes that connect at once share one thread of the listener.
        """
        sock = self._lanes[self._num_connected]
        sock.connect(self._place)
        [frame] = encode(Open(token=self._token, lane=self._num_connected, facts=self._facts))
        sock.send(frame, zmq.DONTWAIT)
        self._num_connected += 1

    def _watch(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._num_connected < LANES:
                self._connect()
            return
        if self._channel is not None:
            raise ChannelClosed("the peer closed the connection, or was silent")
        if event == zmq.EVENT_CLOSED:
            raise ConnectionRefusedError("nobody listens there")
        raise ConnectionError(
            "the peer closed the connection in the handshake: it may have another "
            "disaggregation_secret, or another version"
        )

    def _send(self) -> None:
        if self._num_untold:
            self._frames.extend(encode(Taken(count=self._num_untold)))
            self._num_untold = 0
        with suppress(zmq.Again):  # in the next step
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

    def _take(self, message: AnyMessage) -> None:
        if self._channel is not None and not isinstance(message, Hello | Open | Taken):
            self._channel.deliver(message)
        elif self._channel is None and isinstance(message, Hello):
            channel = Channel(message, self._dialer._bell, self._queue)
            channel.open(self._dialer._terms)
            self._dialer._logged.clear()
            self._channel = channel
        else:
            raise WireError(f"a {type(message).__name__} came where none was due")

    def _queue(self, channel: Channel, message: Message, sent: Sent | None) -> None:
        assert sent is None, "nobody asks for it here"
        self._frames.extend(encode(message))
        self._dialer._bell.ring()

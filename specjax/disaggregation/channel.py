"""A channel: messages both ways over one connection, with a thread for each way."""

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from specjax.disaggregation.fields import Heartbeat
from specjax.disaggregation.handshake import Keys
from specjax.disaggregation.messages import Hello, Message
from specjax.disaggregation.values import WireError
from specjax.disaggregation.wire import Packed, Reader, check, pack, seal
from specjax.scheduling.loop import start_device_thread

logger = logging.getLogger(__name__)

Deliver = Callable[[Message], None]
Lost = Callable[[Exception], None]

# what is to be done with a new channel's messages and its end; raises where it is not wanted
Accept = Callable[["Channel"], tuple[Deliver, Lost]]

MAX_BUFFERS = 64  # of one call of the system, which takes up to 1024


class ChannelClosed(ConnectionError):
    """The connection has ended; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """How two ends know of each other's life.

    Attributes:
        interval: seconds between two heartbeats where nothing else is sent.
        silence: seconds without a single byte after which the peer is lost.
    """

    interval: float = 1.0
    silence: float = 5.0


PULSE = Pulse()


class Channel:
    """One connection between a decode and a prefill process.

    A receiving thread calls ``deliver`` for each message in order and, when the connection has
    ended for whatever reason, ``lost`` once with that reason. A sending thread waits for arrays
    that a device still computes. Either of them sends heartbeats, so that neither a long
    computation nor a slow ``deliver`` makes this side look dead.

    Attributes:
        hello: what the peer said of itself.
    """

    def __init__(
        self, sock: socket.socket, *, keys: Keys, hello: Hello, max_bytes: int, pulse: Pulse
    ) -> None:
        self.hello = hello
        self._sock = sock
        self._key = keys.sending
        self._pulse = pulse
        # the hellos were the frames 0
        self._reader = Reader(
            self._receive_into, key=keys.receiving, max_bytes=max_bytes, sequence=1
        )
        self._sequence = 1
        self._sent_at = time.monotonic()
        self._queue: SimpleQueue[tuple[Message, int] | None] = SimpleQueue()
        self._num_queued_bytes = 0
        self._end_reason: Exception | None = None
        self._lock = threading.Lock()  # of the end and of the count
        self._writing = threading.Lock()  # of the socket's sending half, and of `_sequence`
        sock.settimeout(pulse.interval)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    @property
    def is_open(self) -> bool:
        return self._end_reason is None

    @property
    def num_queued_bytes(self) -> int:
        """Bytes of arrays in messages that the system has not taken to their end."""
        return self._num_queued_bytes

    def send(self, message: Message) -> None:
        """Queue a message, which nobody may change any more; never waits for the network.

        Raises:
            ChannelClosed: if the connection has ended.
            WireError: if the message has values of wrong types; the connection goes on.
        """
        size = check(message)
        with self._lock:
            if self._end_reason is not None:
                raise ChannelClosed(str(self._end_reason)) from self._end_reason
            self._num_queued_bytes += size
            self._queue.put((message, size))

    def close(self) -> None:
        """End the connection and drop what is queued; returns at once, and ``lost`` follows."""
        self._end(ChannelClosed("this side closed the connection"))

    def admit(self, accept: Accept) -> None:
        """Start the threads with what ``accept`` returns.

        Where it raises, the channel is closed, and its socket left to the caller.
        """
        try:
            deliver, lost = accept(self)
        except BaseException:
            self.close()
            raise
        sender = start_device_thread(self._send_all, "specjax-send", self.close)
        receiver = partial(self._receive_all, deliver, lost, sender)
        threading.Thread(target=receiver, name="specjax-receive", daemon=True).start()

    def _end(self, reason: Exception) -> None:
        with self._lock:
            if self._end_reason is None:
                self._end_reason = reason
                self._queue.put(None)
        with suppress(OSError):  # wakes the threads; the socket may not be connected any more
            self._sock.shutdown(socket.SHUT_RDWR)

    def _check_open(self) -> None:
        if self._end_reason is not None:
            raise ChannelClosed(str(self._end_reason))

    # The receiving thread.

    def _receive_all(self, deliver: Deliver, lost: Lost, sender: threading.Thread) -> None:
        try:
            while True:
                message = self._reader.read()
                self._check_open()
                if isinstance(message, Hello):
                    raise WireError("the peer said hello twice")
                if not isinstance(message, Heartbeat):
                    deliver(message)
                del message  # it may be large, and the next one may be long in coming
        except Exception as error:
            if self.is_open and not isinstance(error, OSError | WireError):
                logger.exception("a message could not be delivered")
            self._end(error.with_traceback(None))  # whose frames hold arrays
        assert self._end_reason is not None
        try:
            lost(self._end_reason)
        except Exception:
            logger.exception("the end of a connection could not be told")
        sender.join()
        self._sock.close()

    def _receive_into(self, view: memoryview) -> None:
        num_waits = 0
        while view:
            self._check_open()
            try:
                count = self._sock.recv_into(view)
            except TimeoutError:
                # waits are counted, not the clock: a process that was stopped has missed nothing
                num_waits += 1
                if num_waits * self._pulse.interval >= self._pulse.silence:
                    raise ChannelClosed(
                        f"the peer was silent for {self._pulse.silence} s"
                    ) from None
            else:
                if not count:
                    raise ChannelClosed("the peer closed the connection")
                view, num_waits = view[count:], 0
            self._beat()

    # The sending thread.

    def _send_all(self) -> None:
        try:
            while (item := self._next()) is not None:
                message, size = item
                packed = pack(message)
                with self._writing:
                    self._write(packed)
                del item, message, packed  # a device's memory may hang on it
                with self._lock:
                    self._num_queued_bytes -= size
        except Exception as error:
            if self.is_open and not isinstance(error, OSError):
                logger.exception("a message could not be sent")
            self._end(error.with_traceback(None))
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        self._num_queued_bytes = 0

    def _next(self) -> tuple[Message, int] | None:
        while self.is_open:
            try:
                return self._queue.get(timeout=self._pulse.interval)
            except Empty:
                self._beat()
        return None

    def _beat(self) -> None:
        """Send a heartbeat where one is due and the socket takes it at once."""
        if time.monotonic() - self._sent_at < self._pulse.interval:
            return
        if not self._writing.acquire(blocking=False):
            return
        try:
            if self._writable.poll(0):
                self._write(pack(Heartbeat()))
        finally:
            self._writing.release()

    def _write(self, packed: Packed) -> None:
        buffers = [memoryview(buffer) for buffer in seal(packed, self._sequence, self._key)]
        self._sequence += 1
        while buffers:
            self._check_open()
            try:
                count = self._sock.sendmsg(buffers[:MAX_BUFFERS])
            except TimeoutError:  # the receiving thread knows whether the peer lives
                continue
            self._sent_at = time.monotonic()
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if count:
                buffers[0] = buffers[0][count:]

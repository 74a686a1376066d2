"""Channels: two-way messages between a decode and a prefill process over libzmq.

A decode side opens ``LANES`` parallel connections (lanes) to the prefill side, because libzmq
encrypts each connection in one thread. Frames to the decode side use the lanes in turn, so their
order is known without sequence numbers. All other frames use lane 0. Each connection uses CurveZMQ
with a server key derived from the secret. A peer without the secret fails libzmq's handshake, and
nobody can read, alter, replay or insert frames.
"""

import hmac
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from specjax.disaggregation.messages import FRAME_BYTES, SCHEMA, Hello, Message, WireError

logger = logging.getLogger(__name__)

# CurveZMQ encrypts 1.4 to 1.9 GB/s per thread, as fast as SHA-256 alone; KV needs 3 GB/s
LANES = 4
WINDOW = 32  # maximum frames that a decode side has not acknowledged yet
OVERHEAD_BYTES = 1024  # bytes per frame that CurveZMQ may add

Deliver = Callable[[Message], None]
Lost = Callable[[Exception], None]
Hook = Callable[[], None]


class ChannelClosed(ConnectionError):
    """The connection has ended; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """Timing of heartbeats and handshakes, in seconds."""

    interval: float = 1.0  # time between two heartbeats
    silence: float = 5.0  # time without an answer until the peer counts as lost
    handshake: float = 5.0  # maximum time for the handshake of a connection


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Settings of one side for all of its channels."""

    hello: Callable[[], Hello]  # makes this side's hello; called for each channel
    secret: str = field(repr=False)  # shared by both sides; may be empty on loopback addresses only
    max_bytes: int  # maximum bytes of all arrays in a received message
    # Called with each new channel, before any message. Returns two functions: ``deliver`` is called
    # with each message in order, and ``lost`` once at the end, with the reason. Raises ValueError
    # to refuse the peer. All calls come from the same thread.
    opened: Callable[["Channel"], tuple[Deliver, Lost]]
    pulse: Pulse = Pulse()

    def prepare(self, sock: "zmq.Socket[Any]", *, listens: bool) -> None:
        """Set the options of a socket that do not depend on its address."""
        secret, pulse = self.secret.encode(), self.pulse
        private = z85.encode(hmac.digest(secret, b"specjax split prefill %d" % SCHEMA, "sha256"))
        if listens:
            sock.curve_server = True
            sock.curve_secretkey = private
        else:
            sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
            sock.curve_serverkey = zmq.curve_public(private)
        sock.ipv6 = True
        sock.linger = 0
        sock.maxmsgsize = FRAME_BYTES + OVERHEAD_BYTES
        sock.sndhwm = sock.rcvhwm = 2 * WINDOW
        sock.handshake_ivl = sock.connect_timeout = round(1000 * pulse.handshake)
        sock.heartbeat_ivl = round(1000 * pulse.interval)
        sock.heartbeat_timeout = round(1000 * (pulse.silence - pulse.interval))
        sock.reconnect_ivl = -1


class Bell:
    """Wakes a thread that polls ``fd``."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # close only when unreferenced: another thread may be about to ring
        weakref.finalize(self, os.close, self.fd).atexit = False

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def silence(self) -> None:
        os.eventfd_read(self.fd)


class Channel:
    """One side's end of a connection; thread-safe."""

    def __init__(
        self, hello: Hello, bell: Bell, queue: Callable[["Channel", Message, Hook | None], None]
    ) -> None:
        self.hello = hello  # the peer's
        self.reason: Exception | None = None  # why the connection has ended
        self._bell = bell
        self._queue = queue
        self._lost: Lost | None = None
        self.deliver: Deliver

    def open(self, terms: Terms) -> None:
        """Start delivering messages; raises what ``terms.opened`` raises."""
        self.deliver, self._lost = terms.opened(self)

    @property
    def is_open(self) -> bool:
        return self.reason is None

    def send(self, message: Message, sent: Hook | None = None) -> None:
        """Queue a message, which must not change afterwards; ChannelClosed if the channel ended.

        ``sent`` is called when libzmq has taken the whole message, in the thread of ``deliver``.
        """
        if self.reason is not None:
            raise ChannelClosed(str(self.reason)) from self.reason
        self._queue(self, message, sent)

    def close(self) -> None:
        """End the connection and drop queued messages; returns before ``lost`` is called."""
        self.end(ChannelClosed("this side closed the connection"))

    def fail(self, error: Exception) -> None:
        """End the connection after a message that could not be handled."""
        if self.is_open and not isinstance(error, OSError | WireError):
            logger.exception("a message from the peer could not be handled")
        self.end(error)

    def tell_lost(self) -> None:
        assert self.reason is not None
        if self._lost is not None:
            try:
                self._lost(self.reason)
            except Exception:
                logger.exception("error while handling a lost connection")

    def end(self, reason: Exception) -> None:
        if self.reason is None:
            self.reason = reason.with_traceback(None)  # the traceback's frames hold arrays
            self._bell.ring()

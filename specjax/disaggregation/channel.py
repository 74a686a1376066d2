"""Channels: messages both ways between a decode and a prefill process, over libzmq.

A decode side has ``LANES`` connections to the prefill side, since libzmq encrypts each connection
in one thread. Frames to the decode side go round them, so that their order is known without a
number; all else is sent through lane 0. Each connection is CurveZMQ with a server key that follows
from the secret. Whoever does not know the secret does not get through libzmq's handshake, and
frames cannot be read, altered, replayed or inserted. libzmq also sends the heartbeats.
"""

import hmac
import logging
import os
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from specjax.disaggregation.address import parse_address
from specjax.disaggregation.frames import FRAME_BYTES, SCHEMA
from specjax.disaggregation.messages import Hello, Message, WireError

logger = logging.getLogger(__name__)

# CurveZMQ encrypts 1.4 to 1.9 GB/s per thread: as fast as SHA-256 alone, and a prompt's KV takes 3
LANES = 4
WINDOW = 32  # frames on their way to a decode side that it has not said to have taken
OVERHEAD_BYTES = 1024  # of a frame, for what CurveZMQ adds

Deliver = Callable[[Message], None]
Lost = Callable[[Exception], None]
Sent = Callable[[], None]


class ChannelClosed(ConnectionError):
    """The connection has ended; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """How two ends know that the other one lives.

    Attributes:
        interval: seconds between two heartbeats.
        silence: seconds without an answer after which the peer is lost.
        handshake: seconds from a connection to the end of its handshake.
    """

    interval: float = 1.0
    silence: float = 5.0
    handshake: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How one side talks to all of its peers.

    Attributes:
        hello: what it says of itself; called for each channel.
        secret: what both sides know; empty on one machine only.
        max_bytes: of the arrays of one received message.
        opened: called with each new channel before it receives anything; returns ``deliver``, for
            each message in order, and ``lost``, once at the end with the reason. Raises ValueError
            if the peer does not fit. All of them are called in the same thread.
    """

    hello: Callable[[], Hello]
    secret: str = field(repr=False)
    max_bytes: int
    opened: Callable[["Channel"], tuple[Deliver, Lost]]
    pulse: Pulse = Pulse()


class Bell:
    """Wakes a thread that polls ``fd``."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # not earlier: another thread may be about to ring
        weakref.finalize(self, os.close, self.fd).atexit = False

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def silence(self) -> None:
        os.eventfd_read(self.fd)


class Channel:
    """One connection, as either side sees it; for any thread.

    Attributes:
        hello: what the peer said of itself.
        reason: why the connection has ended; ``None`` while it is open.
    """

    def __init__(
        self, hello: Hello, bell: Bell, queue: Callable[["Channel", Message, Sent | None], None]
    ) -> None:
        self.hello = hello
        self.reason: Exception | None = None
        self._bell = bell
        self._queue = queue
        self._lost: Lost | None = None
        self.deliver: Deliver

    def open(self, terms: Terms) -> None:
        """Have what comes delivered from now on; raises what ``terms.opened`` raises."""
        self.deliver, self._lost = terms.opened(self)

    @property
    def is_open(self) -> bool:
        return self.reason is None

    def send(self, message: Message, sent: Sent | None = None) -> None:
        """Queue a message, which nobody may change any more; never waits for the network.

        Args:
            sent: called by the thread that delivers, once libzmq has all of a message.

        Raises:
            ChannelClosed: if the connection has ended.
        """
        if self.reason is not None:
            raise ChannelClosed(str(self.reason)) from self.reason
        self._queue(self, message, sent)

    def close(self) -> None:
        """End the connection and drop what is queued; returns at once, and ``lost`` follows."""
        self.end(ChannelClosed("this side closed the connection"))

    def fail(self, error: Exception) -> None:
        """End the connection, which brought what could not be taken."""
        if self.is_open and not isinstance(error, OSError | WireError):
            logger.exception("a message could not be delivered")
        self.end(error)

    def tell_lost(self) -> None:
        """Call ``lost``, if the channel was opened."""
        assert self.reason is not None
        if self._lost is not None:
            try:
                self._lost(self.reason)
            except Exception:
                logger.exception("the end of a connection could not be told")

    def end(self, reason: Exception) -> None:
        if self.reason is None:
            self.reason = reason.with_traceback(None)  # its frames hold arrays
            self._bell.ring()


def places(address: str) -> list[str]:
    """Endpoints of an address, as libzmq takes them."""
    host, port = parse_address(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    numeric = [(family, socket.getnameinfo(place, flags)) for family, _, _, _, place in found]
    return [
        f"tcp://[{host}]:{port}" if family == socket.AF_INET6 else f"tcp://{host}:{port}"
        for family, (host, port) in numeric
    ]


def prepare(sock: "zmq.Socket[Any]", terms: Terms, *, listens: bool) -> None:
    """Set the options of a socket that do not depend on its address."""
    secret, pulse = terms.secret.encode(), terms.pulse
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

"""A listener: the side of a channel that others connect to."""

import logging
import socket
import threading
import time

from specjax.disaggregation.address import check_secret, format_address, parse_address
from specjax.disaggregation.channel import PULSE, Accept, Pulse
from specjax.disaggregation.connecting import SayHello, greet
from specjax.disaggregation.handshake import LISTENING
from specjax.disaggregation.sockets import Sockets

logger = logging.getLogger(__name__)

BACKLOG = 64
PAUSE = 0.1  # seconds after a failure to accept: out of descriptors, for instance


class Listener:
    """Takes connections until it is closed, and makes a channel of each that shakes hands.

    Handshakes run in threads of their own, of which there are few: whoever comes while all are
    busy is hung up on. Strangers can do no more than that.

    Attributes:
        address: where it listens, with the port that was chosen for port 0.
    """

    def __init__(
        self,
        address: str,
        *,
        hello: SayHello,
        secret: str,
        max_bytes: int,
        accept: Accept,
        timeout: float = 5.0,
        pulse: Pulse = PULSE,
        max_handshakes: int = 16,
    ) -> None:
        """Listens when it returns.

        Args:
            hello: called for each connection.
            max_bytes: of the arrays of one received message.
            accept: called from a thread of its own with each new channel, before the channel
                receives anything; returns what ``deliver`` and ``lost`` are to
                :func:`~specjax.disaggregation.connecting.connect`, or raises to refuse it.
            timeout: seconds for a handshake.

        Raises:
            ValueError: the address is none, or lacks a secret.
            OSError: it cannot be listened at.
        """
        self._key = check_secret(address, secret)
        self._hello = hello
        self._max_bytes = max_bytes
        self._accept = accept
        self._timeout = timeout
        self._pulse = pulse
        self._free = threading.BoundedSemaphore(max_handshakes)
        self._sockets = Sockets()
        self._sock = _listening(*parse_address(address))
        self.address = format_address(*self._sock.getsockname()[:2])
        self._thread = threading.Thread(target=self._run, name="specjax-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more and end handshakes under way; open channels stay open."""
        self._sockets.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._timeout)

    def _run(self) -> None:
        try:
            with self._sock, self._sockets.held(self._sock):
                while not self._sockets.is_closed:
                    self._take()
        except ConnectionAbortedError:  # closed before it could run
            pass

    def _take(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            if not self._sockets.is_closed:
                logger.warning("%s cannot take a connection: %s", self.address, error)
                time.sleep(PAUSE)
            return
        if not self._free.acquire(blocking=False):
            logger.warning("%s has too many handshakes under way", self.address)
            sock.close()
            return
        name = "specjax-handshake"
        try:
            threading.Thread(target=self._greet, args=(sock,), name=name, daemon=True).start()
        except RuntimeError as error:  # no more threads
            logger.warning("%s cannot take a connection: %s", self.address, error)
            self._free.release()
            sock.close()

    def _greet(self, sock: socket.socket) -> None:
        try:
            try:
                with self._sockets.held(sock):
                    channel = greet(
                        sock,
                        LISTENING,
                        self._key,
                        self._hello,
                        max_bytes=self._max_bytes,
                        deadline=time.monotonic() + self._timeout,
                        pulse=self._pulse,
                    )
            finally:
                self._free.release()
            self._sockets.check_open()
            channel.admit(self._accept)
        except Exception as error:
            sock.close()
            if not self._sockets.is_closed:
                logger.warning("%s refused a connection: %s", self.address, error)


def _listening(host: str, port: int) -> socket.socket:
    family, *_, place = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family, backlog=BACKLOG)

"""Sockets that threads wait in, and that another thread ends all at once."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Sockets:
    """The sockets of one owner while its threads open connections with them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[socket.socket] = set()
        self.is_closed = False

    @contextmanager
    def held(self, sock: socket.socket) -> Iterator[None]:
        """Within the block :meth:`close` ends whatever waits in ``sock``."""
        with self._lock:
            self._held.add(sock)
        try:
            self.check_open()
            yield
        finally:
            with self._lock:
                self._held.remove(sock)

    def check_open(self) -> None:
        if self.is_closed:
            raise ConnectionAbortedError("this side was closed")

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            for sock in self._held:
                with suppress(OSError):  # not connected yet, or not any more
                    sock.shutdown(socket.SHUT_RDWR)

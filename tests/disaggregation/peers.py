"""Ends of channels for tests, and a check that nothing of them is left."""

import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

from specjax.disaggregation.channel import Accept, Channel, Deliver, Lost, Pulse
from specjax.disaggregation.connecting import connect
from specjax.disaggregation.handshake import MAGIC, PREAMBLE, Keys
from specjax.disaggregation.listener import Listener
from specjax.disaggregation.messages import Hello, Message
from specjax.disaggregation.wire import SCHEMA, encode

SECONDS = 10.0  # nothing here takes longer unless it hangs
SECRET = "between us"
MAX_BYTES = 2**26
HELLO = Hello(facts={"weights": "w", "page_size": 16})
QUICK = Pulse(interval=0.05, silence=0.4)


class End:
    """One end of a channel: what arrives there, and how it ends."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.messages: SimpleQueue[Message] = SimpleQueue()
        self.ends: SimpleQueue[Exception] = SimpleQueue()
        self.on_message: Callable[[Message], None] = self.messages.put

    def accept(self, channel: Channel) -> tuple[Deliver, Lost]:
        self.channel = channel
        return self.deliver, self.ends.put

    def deliver(self, message: Message) -> None:
        self.on_message(message)

    def take(self, count: int) -> list[Message]:
        return [self.messages.get(timeout=SECONDS) for _ in range(count)]

    def ended(self) -> Exception:
        """Why the channel has ended; it must not end twice."""
        error = self.ends.get(timeout=SECONDS)
        assert self.channel is not None
        assert not self.channel.is_open
        assert self.ends.empty()
        return error


def listen(accept: Accept, **options: Any) -> Listener:
    options = {"secret": SECRET, "max_bytes": MAX_BYTES, "hello": lambda: HELLO} | options
    return Listener("127.0.0.1:0", accept=accept, **options)


def join(end: End, address: str, **options: Any) -> Channel:
    options = {"secret": SECRET, "max_bytes": MAX_BYTES, "hello": HELLO} | options
    end.channel = connect(address, deliver=end.deliver, lost=end.ends.put, **options)
    return end.channel


@contextmanager
def pair(**options: Any) -> Iterator[tuple[End, End]]:
    """A connecting and a listening end."""
    left, right = End(), End()
    listener = listen(right.accept, **options)
    try:
        join(left, listener.address, **options)
        wait_for(lambda: right.channel is not None)
        yield left, right
    finally:
        listener.close()
        for end in (left, right):
            if end.channel is not None:
                end.channel.close()


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


@contextmanager
def nothing_left() -> Iterator[None]:
    """What the block starts and opens has ended soon after it."""

    def threads() -> set[str]:
        # those of checksums are the process's, and stay
        found = {f"{t.name} {t.ident}" for t in threading.enumerate() if "specjax" in t.name}
        return {name for name in found if not name.startswith("specjax-checksum")}

    def sockets() -> set[str]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{name}"))
        return {target for target in found if target.startswith("socket:")}

    before = threads(), sockets()
    yield
    wait_for(lambda: threads() <= before[0] and sockets() <= before[1])


# A peer in the raw, to do what channels do not.


def reach(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), SECONDS)


def receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, "closed"
        data += piece
    return data


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the other side closes the connection, whatever it says before."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def preamble(role: int, schema: int = SCHEMA) -> bytes:
    return PREAMBLE.pack(MAGIC, schema, role, secrets.token_bytes(32))


def intrude(sock: socket.socket, secret: str = SECRET) -> Keys:
    """The handshake as the connecting side, with hellos."""
    own = preamble(1)
    sock.sendall(own)
    both = own + receive(sock, PREAMBLE.size)

    def derive(purpose: bytes, role: bytes) -> bytes:
        return hmac.digest(secret.encode(), purpose + role + both, "sha256")

    sock.sendall(derive(b"proof", b"\1"))
    assert receive(sock, 32) == derive(b"proof", b"\2")
    keys = Keys(derive(b"key", b"\1"), derive(b"key", b"\2"))
    sock.sendall(b"".join(encode(HELLO, 0, keys.sending)))
    receive(sock, len(b"".join(encode(HELLO, 0, keys.receiving))))
    return keys

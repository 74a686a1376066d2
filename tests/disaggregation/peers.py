"""Ends of channels for tests, and a check that they leave no threads or files open."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import zmq

from specjax.disaggregation.channel import LANES, Channel, Deliver, Lost, Pulse, Terms
from specjax.disaggregation.dialer import Dialer
from specjax.disaggregation.listener import Listener
from specjax.disaggregation.messages import Hello, Message, Open, Taken, encode

from ..support.waiting import wait_for

SECONDS = 60.0  # no step takes longer unless it hangs
SECRET = "between us"
MAX_BYTES = 2**26
HELLO = Hello(facts={"weights": "w", "page_size": 16})
QUICK = Pulse(interval=0.1, silence=1.0, handshake=1.0)


class End:
    """One end of a channel: its received messages and the reason of its end."""

    def __init__(self) -> None:
        self.opened: SimpleQueue[Channel] = SimpleQueue()
        self.messages: SimpleQueue[Message] = SimpleQueue()
        self.ends: SimpleQueue[Exception] = SimpleQueue()
        self.on_message: Callable[[Message], Any] = self.messages.put
        self.channel: Channel

    def accept(self, channel: Channel) -> tuple[Deliver, Lost]:
        self.channel = channel
        self.opened.put(channel)
        return self.deliver, self.ends.put

    def deliver(self, message: Message) -> None:
        self.on_message(message)

    def wait(self) -> Channel:
        return self.opened.get(timeout=SECONDS)

    def take(self, count: int) -> list[Message]:
        return [self.messages.get(timeout=SECONDS) for _ in range(count)]

    def ended(self) -> str:
        """Return why the channel has ended; it must not end twice."""
        error = self.ends.get(timeout=SECONDS)
        assert not self.channel.is_open
        assert self.ends.empty()
        return str(error)


def terms(end: End, **options: Any) -> Terms:
    defaults = {"secret": SECRET, "max_bytes": MAX_BYTES, "hello": lambda: HELLO}
    return Terms(**(defaults | {"opened": end.accept} | options))


@contextmanager
def listening(end: End, address: str = "127.0.0.1:0", **options: Any) -> Iterator[Listener]:
    own = {name: options.pop(name) for name in ("max_connections",) if name in options}
    listener = Listener(address, terms(end, **options), **own)
    try:
        yield listener
    finally:
        listener.close()


@contextmanager
def dialing(end: End, address: str, **options: Any) -> Iterator[Dialer]:
    own = {name: options.pop(name) for name in ("first_wait", "max_wait") if name in options}
    dialer = Dialer(address, terms(end, **options), **({"first_wait": 0.01} | own))
    try:
        yield dialer
    finally:
        dialer.close()


@contextmanager
def pair(**options: Any) -> Iterator[tuple[End, End]]:
    """A connecting and a listening end; after a disconnect they stay disconnected."""
    left, right = End(), End()
    with listening(right, **options) as listener:
        again = {"first_wait": SECONDS, "max_wait": SECONDS}
        with dialing(left, listener.address, **again, **options):
            left.wait(), right.wait()
            yield left, right


@contextmanager
def nothing_left() -> Iterator[None]:
    """Threads and files that the block starts and opens end soon after it."""

    def threads() -> set[str]:
        return {f"{t.name} {t.ident}" for t in threading.enumerate() if "specjax" in t.name}

    def files() -> int:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{name}"))
        return sum(target.startswith("socket:") for target in found)

    before = threads(), files()
    yield
    wait_for(lambda: threads() <= before[0] and files() <= before[1])


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


def reach(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), SECONDS)


def read_until_closed(sock: socket.socket) -> bytes:
    """Receive everything until the other side closes the connection."""
    heard = b""
    with suppress(ConnectionResetError):
        while data := sock.recv(65536):
            heard += data
    return heard


@contextmanager
def raw_lanes(address: str, hello: Hello = HELLO) -> Iterator[list[Any]]:
    """Raw sockets of a decode side that knows the secret, for behaviour that channels prevent."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        token, lanes = os.urandom(16), []
        for number in range(LANES):
            lane = stack.enter_context(context.socket(zmq.DEALER))
            terms(End()).prepare(lane, listens=False)
            lane.maxmsgsize, lane.rcvtimeo = -1, round(1000 * SECONDS)
            lane.connect(f"tcp://{address}")
            [frame] = encode(Open(token=token, lane=number, facts=hello.facts))
            lane.send(frame)
            lanes.append(lane)
        lanes[0].recv()  # the listener's hello
        lanes[0].send(encode(Taken(count=1))[0])
        yield lanes

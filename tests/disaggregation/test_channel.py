"""Channels over sockets of this machine."""

import gc
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.disaggregation.address import check_secret, is_loopback, parse_address
from specjax.disaggregation.channel import Channel, ChannelClosed, Pulse
from specjax.disaggregation.connecting import connect
from specjax.disaggregation.handshake import HandshakeError
from specjax.disaggregation.listener import Listener
from specjax.disaggregation.messages import Cancel, Hello, Piece, Refused, Weights
from specjax.disaggregation.values import WireError
from specjax.disaggregation.wire import HEADER, MAGIC, SCHEMA, encode

from .peers import (
    HELLO,
    QUICK,
    SECONDS,
    SECRET,
    End,
    intrude,
    is_hung_up,
    join,
    listen,
    nothing_left,
    pair,
    preamble,
    reach,
    receive,
    wait_for,
)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture
def end() -> End:
    return End()


@pytest.fixture
def listener(end: End) -> Iterator[Listener]:
    listener = listen(end.accept, timeout=0.5, pulse=QUICK)
    yield listener
    listener.close()
    if end.channel is not None:
        end.channel.close()


def piece(array: Any) -> Piece:
    return Piece(id=1, start=0, count=1, kv=(array,))


def raw_listener() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.settimeout(SECONDS)
    return sock


def address_of(sock: socket.socket) -> str:
    return f"127.0.0.1:{sock.getsockname()[1]}"


class Held:
    """An array that a device has yet to compute."""

    def __init__(self, size: int) -> None:
        self.array = np.zeros(size, np.uint8)
        self.nbytes = size
        self.is_ready = threading.Event()

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        assert self.is_ready.wait(SECONDS)
        return self.array


# Traffic.


def test_both_ways_in_order() -> None:
    with pair() as (left, right):
        assert left.channel is not None
        assert right.channel is not None
        assert left.channel.hello == right.channel.hello == HELLO
        for i in range(100):
            left.channel.send(Cancel(id=i))
            right.channel.send(Refused(id=i, reason="no"))
        assert right.take(100) == [Cancel(id=i) for i in range(100)]
        assert left.take(100) == [Refused(id=i, reason="no") for i in range(100)]
        assert left.channel.is_open


def test_a_large_array_and_those_of_jax() -> None:
    large = np.random.default_rng(0).integers(0, 255, 50_000_000, np.uint8)
    with pair() as (left, right):
        assert left.channel is not None
        left.channel.send(Piece(id=1, start=0, count=1, kv=(large, jnp.ones((2, 3), jnp.bfloat16))))
        (message,) = right.take(1)
        assert isinstance(message, Piece)
        assert np.array_equal(message.kv[0], large)
        assert message.kv[1].dtype == jnp.bfloat16
        wait_for(lambda: left.channel.num_queued_bytes == 0)


def test_a_frame_that_takes_longer_than_silence_may_last() -> None:
    with pair(pulse=QUICK) as (left, right):
        assert left.channel is not None
        left.channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        start, count = time.monotonic(), 0
        while time.monotonic() - start < 2 * QUICK.silence:
            left.channel.send(piece(np.zeros(2_000_000, np.uint8)))
            count += 1
            right.take(1)
        assert count < 10  # so that one takes long


def test_many_threads() -> None:
    def send(channel: Channel, first: int) -> None:
        for i in range(200):
            channel.send(Cancel(id=first + i))

    with pair() as (left, right):
        args = [(left.channel, 1000 * i) for i in range(8)]
        threads = [threading.Thread(target=send, args=a) for a in args]
        for thread in threads:
            thread.start()
        found: list[int] = [message.id for message in right.take(1600)]  # type: ignore[union-attr]
        for thread in threads:
            thread.join()
    for i in range(8):  # each thread's messages are in its order
        assert [n for n in found if n // 1000 == i] == [1000 * i + k for k in range(200)]


def test_send_waits_for_nobody_and_counts() -> None:
    with pair(pulse=QUICK) as (left, right):
        assert left.channel is not None
        held = [Held(1000) for _ in range(3)]
        for array in held:
            left.channel.send(piece(array))
        left.channel.send(Cancel(id=9))
        assert left.channel.num_queued_bytes == 3000
        time.sleep(2 * QUICK.silence)  # heartbeats go on while the sending thread waits
        assert right.messages.empty()
        held[0].is_ready.set()
        right.take(1)
        wait_for(lambda: left.channel.num_queued_bytes == 2000)
        for array in held:
            array.is_ready.set()
        assert right.take(3)[-1] == Cancel(id=9)


def test_what_was_sent_is_let_go() -> None:
    with pair(pulse=Pulse(interval=60, silence=600)) as (left, right):
        assert left.channel is not None
        array = np.zeros(1000, np.uint8)
        alive = weakref.ref(array)
        left.channel.send(piece(array))
        del array
        (message,) = right.take(1)
        got = weakref.ref(message.kv[0])  # type: ignore[union-attr]
        del message
        wait_for(lambda: gc.collect() >= 0 and alive() is None and got() is None)


def test_wrong_values_leave_the_channel_open() -> None:
    with pair() as (left, right):
        assert left.channel is not None
        with pytest.raises(WireError, match="id=True"):
            left.channel.send(Cancel(id=True))
        left.channel.send(Cancel(id=1))
        assert right.take(1) == [Cancel(id=1)]


def test_an_array_that_fails_ends_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __array__(self, *args: Any, **options: Any) -> np.ndarray:
            raise RuntimeError("out of device memory")

    with pair() as (left, right):
        assert left.channel is not None
        left.channel.send(piece(Broken()))
        assert "out of device memory" in str(left.ended())
        assert "closed" in str(right.ended())
    assert "could not be sent" in caplog.text


# Ends.


def test_close() -> None:
    with pair() as (left, right):
        assert left.channel is not None
        left.channel.send(piece(held := Held(10)))
        left.channel.close()
        left.channel.close()
        assert "this side closed" in str(left.ended())
        assert "the peer closed" in str(right.ended())
        for end in (left, right):
            with pytest.raises(ChannelClosed, match="closed the connection"):
                end.channel.send(Cancel(id=1))  # type: ignore[union-attr]
        held.is_ready.set()
        wait_for(lambda: left.channel.num_queued_bytes == 0)


def test_close_from_within_deliver() -> None:
    with pair() as (left, right):
        assert left.channel is not None
        assert right.channel is not None
        taken = []

        def on_message(message: Any) -> None:
            taken.append(message)
            right.channel.close()  # type: ignore[union-attr]

        right.on_message = on_message
        for i in range(10):
            left.channel.send(Cancel(id=i))
        assert "this side closed" in str(right.ended())
        assert taken == [Cancel(id=0)]


def test_deliver_that_raises_ends_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    with pair() as (left, right):
        assert left.channel is not None
        right.on_message = lambda message: 1 // 0  # type: ignore[assignment, return-value]
        left.channel.send(Cancel(id=1))
        assert isinstance(right.ended(), ZeroDivisionError)
        left.ended()
    assert "could not be delivered" in caplog.text


def test_a_slow_deliver_is_not_silence() -> None:
    with pair(pulse=QUICK) as (left, right):
        assert left.channel is not None
        right.on_message = lambda message: (
            time.sleep(2 * QUICK.silence),
            right.messages.put(message),
        )
        for i in range(2):
            left.channel.send(Cancel(id=i))
        assert right.take(2) == [Cancel(id=0), Cancel(id=1)]
        assert left.channel.is_open


def test_a_peer_that_stops_answering(end: End, listener: Listener) -> None:
    with reach(listener.address) as sock:
        intrude(sock)
        start = time.monotonic()
        assert "silent for 0.4 s" in str(end.ended())
        assert time.monotonic() - start > 0.2


def test_a_peer_that_dies_in_the_middle_of_a_frame(end: End, listener: Listener) -> None:
    with reach(listener.address) as sock:
        keys = intrude(sock)
        sock.sendall(b"".join(encode(Cancel(id=1), 1, keys.sending)))
        assert end.take(1) == [Cancel(id=1)]
        sock.sendall(b"".join(encode(piece(np.zeros(1000)), 2, keys.sending))[:500])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert isinstance(end.ended(), ConnectionError)
    assert end.messages.empty()


def test_garbage_behind_the_handshake(end: End, listener: Listener) -> None:
    with reach(listener.address) as sock:
        intrude(sock)
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert is_hung_up(sock)
    assert isinstance(end.ended(), WireError)


@pytest.mark.parametrize("kind", ["replayed", "reflected", "hello", "too large"])
def test_frames_out_of_place(end: End, listener: Listener, kind: str) -> None:
    with reach(listener.address) as sock:
        keys = intrude(sock)
        sock.sendall(b"".join(encode(Cancel(id=1), 1, keys.sending)))
        end.take(1)
        sock.sendall(
            {
                "replayed": b"".join(encode(Cancel(id=1), 1, keys.sending)),
                "reflected": b"".join(encode(Cancel(id=1), 2, keys.receiving)),
                "hello": b"".join(encode(HELLO, 2, keys.sending)),
                "too large": HEADER.pack(MAGIC, SCHEMA, 2, 2**60, 2),
            }[kind].ljust(200, b"x")
        )
        assert is_hung_up(sock)
    assert isinstance(end.ended(), WireError)


# Strangers.


def test_wrong_secret(end: End, listener: Listener) -> None:
    with pytest.raises(HandshakeError, match="another disaggregation_secret"):
        join(End(), listener.address, secret="something else")
    assert end.channel is None


def test_a_listener_with_another_secret() -> None:
    """Who connects is no more trusting than who listens."""
    with raw_listener() as server:
        connecting = run(lambda: join(End(), address_of(server)))
        with server.accept()[0] as sock:
            sock.sendall(preamble(2))
            receive(sock, 39 + 32)
            sock.sendall(b"x" * 32)
            assert "another disaggregation_secret" in str(connecting.get(timeout=SECONDS))


@pytest.mark.parametrize("role", [1, 2])
def test_reflected_proof(role: int) -> None:
    """A listener that sends back what it hears, with its preamble's role put right or not."""
    with raw_listener() as server:
        connecting = run(lambda: join(End(), address_of(server)))
        with server.accept()[0] as sock:
            heard = bytearray(receive(sock, 39))
            assert heard[6] == 1
            heard[6] = role
            sock.sendall(heard)
            if role == 2:
                sock.sendall(receive(sock, 32))
            error = connecting.get(timeout=SECONDS)
    assert isinstance(error, HandshakeError)
    assert ("another disaggregation_secret" if role == 2 else "the role 1") in str(error)


def run(function: Any) -> SimpleQueue[Exception]:
    """What a function raises, in another thread."""
    raised: SimpleQueue[Exception] = SimpleQueue()

    def call() -> None:
        try:
            function()
        except Exception as error:
            raised.put(error)

    threading.Thread(target=call, daemon=True).start()
    return raised


def test_silent_listener() -> None:
    with raw_listener() as server:
        start = time.monotonic()
        with pytest.raises(OSError, match=r"timed out|too slow"):
            join(End(), address_of(server), timeout=0.2)
        assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"SJXH",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
        preamble(1, SCHEMA + 1),
        preamble(2),
        preamble(1) + b"x" * 32,
        bytes(1000),
    ],
    ids=["silence", "half", "http", "schema", "role", "proof", "zeros"],
)
def test_strangers_get_nothing(end: End, listener: Listener, said: bytes) -> None:
    with reach(listener.address) as sock:
        sock.sendall(said)
        heard = b""
        try:
            while data := sock.recv(1000):
                heard += data
        except ConnectionResetError:
            pass
        assert len(heard) <= 39  # the preamble at most: no proof
    join(End(), listener.address, pulse=QUICK).close()
    wait_for(lambda: end.channel is not None)
    end.ended()


def test_one_who_drips(listener: Listener) -> None:
    """The handshake's time is that of all its bytes."""
    with reach(listener.address) as sock:
        start = time.monotonic()
        for byte in preamble(1):
            try:
                sock.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.03)
        assert 0.4 < time.monotonic() - start < SECONDS
        assert is_hung_up(sock)


def test_handshakes_are_few(end: End) -> None:
    listener = listen(end.accept, max_handshakes=2, timeout=SECONDS)
    try:
        silent = [reach(listener.address) for _ in range(2)]
        for sock in silent:
            receive(sock, 39)  # their handshakes are under way
        with reach(listener.address) as third:
            assert third.recv(1) == b""
        for sock in silent:
            sock.close()

        def is_free() -> bool:
            try:
                join(End(), listener.address).close()
            except OSError:
                return False
            return True

        wait_for(is_free)
        wait_for(lambda: end.channel is not None)
        end.ended()
        with reach(listener.address) as sock:
            receive(sock, 39)
            start = time.monotonic()
            listener.close()  # ends a handshake under way
            assert is_hung_up(sock)
            assert time.monotonic() - start < 2
    finally:
        listener.close()


def test_accept_that_refuses() -> None:
    def accept(channel: Channel) -> Any:
        raise ValueError(f"no peer of {channel.hello.facts}")

    listener = listen(accept)
    try:
        left = End()
        join(left, listener.address)
        assert "closed" in str(left.ended())
    finally:
        listener.close()


def test_a_hello_that_is_none(end: End, listener: Listener) -> None:
    with pytest.raises(WireError, match="facts"):
        join(End(), listener.address, hello=Hello(facts=[]))  # type: ignore[arg-type]
    with pytest.raises(WireError, match="message"):
        join(End(), listener.address, hello="hello")
    assert end.channel is None
    with pytest.raises(OSError, match="closed"):
        join(End(), listener.address, hello=Weights(weights="w"))


def test_nobody_listens() -> None:
    with raw_listener() as server:
        address = address_of(server)
    with pytest.raises(ConnectionRefusedError):
        join(End(), address)


def test_a_closed_listener_leaves_its_port_and_its_channels() -> None:
    end, left = End(), End()
    listener = listen(end.accept)
    channel = join(left, listener.address)
    wait_for(lambda: end.channel is not None)
    listener.close()
    channel.send(Cancel(id=1))
    assert end.take(1) == [Cancel(id=1)]
    again = Listener(
        listener.address, hello=lambda: HELLO, secret=SECRET, max_bytes=0, accept=end.accept
    )
    again.close()
    channel.close()
    end.ended()


# Addresses.


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("127.0.0.1:8998", ("127.0.0.1", 8998)),
        ("prefill-0.local:1", ("prefill-0.local", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_addresses(address: str, place: tuple[str, int]) -> None:
    assert parse_address(address) == place


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "host:9999999999", "::1:1"),
        *("[::1]", "[host]:1", "[]:1", "[::1:1", "a b:1", "http://host:1", "host:1/", "host:²"),
    ],
)
def test_no_addresses(address: str) -> None:
    with pytest.raises(ValueError, match=r"no address|must be an integer from 0 to 65535"):
        parse_address(address)


def test_an_empty_secret_is_for_this_machine_only(end: End) -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "localhost.org", "127.1")))
    assert check_secret("10.0.0.1:1", "x") == b"x"
    options: dict[str, Any] = {"secret": "", "max_bytes": 0}
    with pytest.raises(ValueError, match="disaggregation_secret"):
        Listener("0.0.0.0:0", hello=lambda: HELLO, accept=end.accept, **options)
    with pytest.raises(ValueError, match="disaggregation_secret"):
        connect("10.0.0.1:1", hello=HELLO, deliver=end.deliver, lost=end.ends.put, **options)
    with pair(secret="") as (left, right):
        left.channel.send(Cancel(id=1))  # type: ignore[union-attr]
        assert right.take(1) == [Cancel(id=1)]

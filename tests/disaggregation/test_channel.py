"""Channels over local sockets: traffic, disconnects, strangers and reconnects."""

import gc
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.disaggregation import listener as listening_module
from specjax.disaggregation.address import check_secret, is_loopback, parse_address
from specjax.disaggregation.channel import LANES, WINDOW, Channel, ChannelClosed, Pulse
from specjax.disaggregation.dialer import Dialer
from specjax.disaggregation.listener import Listener
from specjax.disaggregation.messages import (
    FRAME_BYTES,
    Cancel,
    Hello,
    Open,
    Piece,
    Refused,
    Taken,
    WireError,
    encode,
)

from ..support.waiting import wait_for
from .peers import (
    HELLO,
    QUICK,
    SECONDS,
    End,
    dialing,
    free_address,
    listening,
    nothing_left,
    pair,
    raw_lanes,
    reach,
    read_until_closed,
    terms,
)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


def piece(*arrays: Any) -> Piece:
    return Piece(id=1, start=0, count=1, kv=arrays)


class Held:
    """An array that a device has not computed yet."""

    def __init__(self, size: int) -> None:
        self.array = np.zeros(size, np.uint8)
        self.is_ready = threading.Event()

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        assert self.is_ready.wait(SECONDS)
        return self.array


# Traffic. ``right`` listens, like a prefill side.


def test_both_ways_in_order() -> None:
    with pair() as (left, right):
        assert left.channel.hello == right.channel.hello == HELLO
        for i in range(100):
            left.channel.send(Cancel(id=i))
            right.channel.send(Refused(id=i, reason="no"))
        assert right.take(100) == [Cancel(id=i) for i in range(100)]
        assert left.take(100) == [Refused(id=i, reason="no") for i in range(100)]
        assert left.channel.is_open


@pytest.mark.slow
def test_large_arrays_and_those_of_jax() -> None:
    rng = np.random.default_rng(0)
    large = rng.integers(0, 255, (WINDOW + 9) * FRAME_BYTES + 5, np.uint8)
    with pair() as (left, right):
        for _ in range(2):
            right.channel.send(piece(large, jnp.ones((2, 3), jnp.bfloat16)))
        for message in left.take(2):
            assert isinstance(message, Piece)
            assert np.array_equal(message.kv[0], large)
            assert message.kv[1].dtype == jnp.bfloat16
        left.channel.send(piece(large[:FRAME_BYTES]))
        right.take(1)


def test_many_threads() -> None:
    def send(channel: Channel, first: int) -> None:
        for i in range(200):
            channel.send(Cancel(id=first + i))

    for sender in (0, 1):
        with pair() as ends:
            threads = [
                threading.Thread(target=send, args=(ends[sender].channel, 1000 * i))
                for i in range(8)
            ]
            for thread in threads:
                thread.start()
            found = [message.id for message in ends[1 - sender].take(1600)]  # type: ignore[union-attr]
        for i in range(8):  # messages of each thread arrive in order
            assert [n for n in found if n // 1000 == i] == [1000 * i + k for k in range(200)]


def test_send_waits_for_nobody_and_tells_when_it_is_sent() -> None:
    with pair(pulse=QUICK) as (left, right):
        held = [Held(1000) for _ in range(3)]
        sent: list[int] = []
        for number, array in enumerate(held):
            right.channel.send(piece(array), lambda number=number: sent.append(number))
        right.channel.send(Cancel(id=9))
        time.sleep(2 * QUICK.silence)  # heartbeats continue while a device computes
        assert left.messages.empty()
        held[0].is_ready.set()
        left.take(1)
        wait_for(lambda: sent == [0])
        for array in held:
            array.is_ready.set()
        assert left.take(3)[-1] == Cancel(id=9)
        wait_for(lambda: sent == [0, 1, 2])


def test_sent_messages_are_released() -> None:
    with pair(pulse=Pulse(interval=60, silence=600)) as (left, right):
        array = np.zeros(100_000, np.uint8)
        alive = weakref.ref(array)
        right.channel.send(piece(array))
        del array
        (message,) = left.take(1)
        got = weakref.ref(message.kv[0])  # type: ignore[union-attr]
        del message
        wait_for(lambda: gc.collect() >= 0 and alive() is None and got() is None)


def test_wrong_values_leave_the_channel_open() -> None:
    with pair() as (left, right):
        with pytest.raises(WireError, match="`int`, got `bool`"):
            left.channel.send(Cancel(id=True))
        left.channel.send(Cancel(id=1))
        assert right.take(1) == [Cancel(id=1)]


def test_an_array_that_fails_ends_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __array__(self, *args: Any, **options: Any) -> np.ndarray:
            raise RuntimeError("out of device memory")

    with pair() as (left, right):
        right.channel.send(piece(Broken()))
        assert "out of device memory" in right.ended()
        assert "closed" in left.ended()
    assert "could not be sent" in caplog.text


# Disconnects.


@pytest.mark.parametrize("closing", [0, 1], ids=["dialer", "listener"])
def test_close(closing: int) -> None:
    with pair(pulse=QUICK) as ends:
        ours, theirs = ends[closing], ends[1 - closing]
        ours.channel.close()
        ours.channel.close()
        assert "this side closed" in ours.ended()
        assert "the peer closed" in theirs.ended()
        for end in ends:
            with pytest.raises(ChannelClosed, match="closed the connection"):
                end.channel.send(Cancel(id=1))


@pytest.mark.parametrize("receiving", [0, 1], ids=["dialer", "listener"])
@pytest.mark.parametrize("does", ["closes", "raises"])
def test_deliver_that_closes_or_raises(
    receiving: int, does: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(pulse=QUICK) as ends:
        ours, taken = ends[receiving], []

        def on_message(message: Any) -> None:
            taken.append(message)
            ours.channel.close() if does == "closes" else 1 // 0

        ours.on_message = on_message
        for i in range(10):
            with suppress(ChannelClosed):
                ends[1 - receiving].channel.send(Cancel(id=i))
        assert ("this side closed" if does == "closes" else "division") in ours.ended()
        assert taken == [Cancel(id=0)]
    assert ("could not be handled" in caplog.text) == (does == "raises")


@pytest.mark.slow
def test_a_slow_deliver_is_not_silence() -> None:
    with pair(pulse=QUICK) as ends:
        for ours, theirs in (ends, ends[::-1]):
            ours.on_message = lambda message, ours=ours: (
                time.sleep(2 * QUICK.silence),
                ours.messages.put(message),
            )
            for i in range(2):
                theirs.channel.send(Cancel(id=i))
            assert ours.take(2) == [Cancel(id=0), Cancel(id=1)]
            assert theirs.channel.is_open


# the folder of the tests comes last, so that an installed package takes precedence
WITH_TESTS = f"import sys\nsys.path.append({os.fspath(Path(__file__).parents[2])!r})\n"
SAFE = {"PYTHONSAFEPATH": "1"}
PEER = """
import sys, time
from specjax.disaggregation.{module} import {kind}
from tests.disaggregation.peers import QUICK, End, terms
one = {kind}(sys.argv[1], terms(End(), pulse=QUICK))
print(getattr(one, "address", ""), flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["dialer", "listener"])
def process(request: pytest.FixtureRequest) -> Iterator[tuple[End, subprocess.Popen[str]]]:
    """A peer in a process, and this process's end."""
    end, kind = End(), request.param
    code = PEER.format(module=kind, kind=kind.title())
    with ExitStack() as stack:
        address = "127.0.0.1:0"
        if kind == "dialer":
            address = stack.enter_context(listening(end, pulse=QUICK)).address
        running = subprocess.Popen(
            [sys.executable, "-c", WITH_TESTS + code, address],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | SAFE,
        )
        with running:
            try:
                assert running.stdout is not None
                said = running.stdout.readline().strip()
                if kind == "listener":
                    stack.enter_context(dialing(end, said, pulse=QUICK))
                end.wait()
                yield end, running
            finally:
                running.kill()


@pytest.mark.slow
def test_a_peer_that_is_stopped_or_killed(process) -> None:
    """Both are detected, and a peer that continues after a stop connects again."""
    end, running = process
    running.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    assert "closed" in end.ended()
    assert 0.3 < time.monotonic() - start < 5
    running.send_signal(signal.SIGCONT)
    end.wait()
    running.kill()
    assert "closed" in end.ended()


# Decode sides that know the secret and misbehave.


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
        [*encode(HELLO)],
        [*encode(Open(token=b"0" * 16, lane=0, facts={}))],
        [*encode(Taken(count=1000))],
        [*encode(piece(np.zeros(1000)))[:1], b"too short"],
        [*encode(piece(np.zeros(2**26, np.int8)))[:1], b"too long" * 1000],
        [*encode(Piece(id=1, start=0, count=1, kv=(np.zeros(2**27, np.int8),)))[:1]],
    ],
    ids=["nothing", "http", "hello", "open", "taken", "short", "long", "large"],
)
def test_frames_out_of_place_end_their_own_channel(frames: list[bytes]) -> None:
    end, other = End(), End()
    with listening(end, pulse=QUICK) as listener, dialing(other, listener.address, pulse=QUICK):
        honest = end.wait()
        with raw_lanes(listener.address) as lanes:
            end.wait()
            lanes[0].send(encode(Cancel(id=1))[0])
            assert end.take(1) == [Cancel(id=1)]
            for frame in frames:
                lanes[0].send(frame)
            error = end.ends.get(timeout=SECONDS)
            assert isinstance(error, WireError)
            lanes[0].send(encode(Cancel(id=2))[0])  # messages from here on belong to no channel
        honest.send(Refused(id=3, reason=""))
        assert other.take(1) == [Refused(id=3, reason="")]
        assert end.messages.empty()


@pytest.mark.parametrize("kind", ["another lane", "several frames", "an endless frame"])
def test_frames_in_the_wrong_form(kind: str) -> None:
    end = End()
    with listening(end, pulse=QUICK) as listener, raw_lanes(listener.address) as lanes:
        end.wait()
        [frame] = encode(Cancel(id=1))
        if kind == "another lane":
            lanes[1].send(frame)
        elif kind == "several frames":
            lanes[0].send_multipart([frame] * 3)
        else:
            lanes[0].send(bytes(2 * FRAME_BYTES))
        assert isinstance(end.ends.get(timeout=SECONDS), WireError | ChannelClosed)
        assert end.messages.empty()


@pytest.mark.parametrize("takes", [0, 1], ids=["nothing", "too little"])
def test_a_too_slow_decode_side_is_disconnected(takes, monkeypatch, caplog) -> None:
    """Another decode side is served meanwhile, and only the window is sent."""
    monkeypatch.setattr(listening_module, "MAX_STALL", 20)
    end, other = End(), End()
    with listening(end, pulse=QUICK) as listener, dialing(other, listener.address):
        honest = end.wait()
        with raw_lanes(listener.address) as lanes:
            slow, sent = end.wait(), []
            for number in range(4 * WINDOW):
                slow.send(piece(np.zeros(8)), lambda number=number: sent.append(number))
                honest.send(Cancel(id=number))
            assert other.take(4 * WINDOW) == [Cancel(id=i) for i in range(4 * WINDOW)]
            assert len(sent) <= WINDOW
            while takes and slow.is_open and end.ends.empty():
                lanes[0].send(encode(Taken(count=1))[0])
                time.sleep(2 * QUICK.interval)
            assert "reads its KV too slowly" in str(end.ends.get(timeout=SECONDS))
        assert honest.is_open
    assert "reads its KV too slowly" in caplog.text


def test_a_slow_decode_side_stays_connected(monkeypatch) -> None:
    monkeypatch.setattr(listening_module, "MAX_STALL", 4)
    monkeypatch.setattr(listening_module, "MIN_FRAMES", 1)
    with pair(pulse=QUICK) as (left, right):
        left.on_message = lambda message: (time.sleep(0.01), left.messages.put(message))
        for i in range(3 * WINDOW):
            right.channel.send(Cancel(id=i))
        assert left.take(3 * WINDOW) == [Cancel(id=i) for i in range(3 * WINDOW)]


def test_an_incomplete_decode_side_is_ignored() -> None:
    """However often a peer opens a lane."""
    end = End()
    with listening(end, pulse=QUICK) as listener, raw_lanes(listener.address) as lanes:
        end.wait().close()
        end.ended()
        for number in range(20):
            token = bytes([number]) * 16
            lanes[1].send(encode(Open(token=token, lane=number % LANES, facts={}))[0])
            lanes[2].send(encode(Open(token=token, lane=LANES + number, facts={}))[0])
        with dialing(End(), listener.address):
            end.wait()
        assert len(listener._openings) == 1
        assert end.opened.empty()


# Strangers.


def test_another_secret(caplog: pytest.LogCaptureFixture) -> None:
    end, left = End(), End()
    with listening(end, pulse=QUICK) as listener:
        with dialing(left, listener.address, secret="something else", pulse=QUICK):
            wait_for(lambda: "its disaggregation_secret or its version may differ" in caplog.text)
            wait_for(lambda: "its version or disaggregation_secret differs" in caplog.text)
        assert end.opened.empty()
        assert left.opened.empty()


GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 1]) + b"CURVE".ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
        GREETING.replace(b"CURVE", b"NULL\0"),
        GREETING,
        GREETING + b"\4\xc8\5HELLO\1\0" + random.Random(0).randbytes(192),
        GREETING + b"\6" + (2**40).to_bytes(8, "big"),
        GREETING + b"\0\5hello",
        bytes(1000),
    ],
    ids=["silence", "half", "http", "null", "greeting", "key", "large", "message", "zeros"],
)
def test_strangers_get_nothing(said: bytes) -> None:
    end, left = End(), End()
    with listening(end, pulse=QUICK) as listener, dialing(left, listener.address, pulse=QUICK):
        end.wait()
        with reach(listener.address) as sock:
            sock.sendall(said)
            heard = read_until_closed(sock)
        assert len(heard) <= 64  # the greeting, which is the same for all peers
        assert left.wait().is_open
        assert end.ends.empty()
        wait_for(lambda: len(listener._connections) == LANES)


def test_a_slow_handshake_times_out() -> None:
    """The handshake limit covers all bytes of the handshake."""
    with listening(End(), pulse=QUICK) as listener, reach(listener.address) as sock:
        start = time.monotonic()
        with suppress(OSError):
            for byte in GREETING * 3:
                sock.sendall(bytes([byte]))
                time.sleep(0.03)
        assert 0.3 < time.monotonic() - start < SECONDS
        read_until_closed(sock)


def test_connections_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    """Existing connections stay, and new ones are accepted when others have ended."""
    end, left, late = End(), End(), End()
    limit = 2 * LANES + 1
    with (
        listening(end, pulse=QUICK, max_connections=limit) as listener,
        dialing(left, listener.address, pulse=QUICK),
        ExitStack() as stack,
    ):
        honest = end.wait()
        for _ in range(30):
            with suppress(ConnectionError):
                stack.enter_context(reach(listener.address))
        wait_for(lambda: "connections above the limit" in caplog.text)
        assert len(listener._connections) <= limit
        honest.send(Cancel(id=1))
        assert left.take(1) == [Cancel(id=1)]
        stack.enter_context(dialing(late, listener.address, pulse=QUICK, max_wait=0.1))
        assert late.wait().is_open
        assert honest.is_open


def test_a_listener_with_another_secret_or_none() -> None:
    """The connecting side verifies the listener too."""
    left = End()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with dialing(left, f"127.0.0.1:{server.getsockname()[1]}", pulse=QUICK):
            with server.accept()[0] as sock:
                sock.sendall(GREETING[:32] + b"\1" + bytes(31))
                assert b"READY" not in read_until_closed(sock)
            assert left.opened.empty()


# Reconnects.


def test_a_peer_that_reconnects(caplog: pytest.LogCaptureFixture) -> None:
    address, left = free_address(), End()
    with dialing(left, address, max_wait=0.05):
        time.sleep(0.1)  # many attempts
        assert left.opened.empty()
        for _ in range(3):
            end = End()
            with listening(end, address):
                left.wait(), end.wait()
                end.channel.send(Cancel(id=1))
                assert left.take(1) == [Cancel(id=1)]
                left.channel.send(Cancel(id=2))
                assert end.take(1) == [Cancel(id=2)]
            assert "this side closed" in end.ended()
            assert "the peer closed" in left.ended()
    assert 1 <= caplog.text.count("ConnectionRefusedError") <= 4  # one for each outage


def test_a_hello_that_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    facts = {"page_size": 16}
    attempts: list[float] = []
    left = End()

    def opened(channel: Channel) -> Any:
        attempts.append(time.monotonic())
        if channel.hello.facts["page_size"] != 32:
            raise ValueError(f"page_size={channel.hello.facts['page_size']} must be 32")
        return left.accept(channel)

    with (
        listening(End(), hello=lambda: Hello(facts=dict(facts))) as listener,
        dialing(left, listener.address, opened=opened, first_wait=0.001, max_wait=0.1),
    ):
        wait_for(lambda: len(attempts) >= 3)
        assert attempts[1] - attempts[0] > 0.04  # max_wait at once
        facts["page_size"] = 8
        wait_for(lambda: "page_size=8" in caplog.text)
        assert left.opened.empty()
        facts["page_size"] = 32
        left.wait()
    said = [r.getMessage() for r in caplog.records if r.name.endswith("dialer")]
    assert ["page_size=16" in said[0], "page_size=8" in said[1]] == [True, True]
    assert len(said) == 2


def test_a_listener_that_refuses_sends_its_hello_and_is_retried_slowly() -> None:
    times: list[float] = []
    heard: list[Hello] = []

    def refuse(channel: Channel) -> Any:
        times.append(time.monotonic())
        raise ValueError("not you")

    left = End()

    def opened(channel: Channel) -> Any:
        heard.append(channel.hello)
        return left.accept(channel)

    with (
        listening(End(), opened=refuse) as listener,
        dialing(left, listener.address, opened=opened, first_wait=0.02, max_wait=0.16),
    ):
        wait_for(lambda: len(times) >= 5)
    assert times[4] - times[3] > 0.07
    assert set(map(str, heard)) == {str(HELLO)}
    assert "not you" in str(left.ends.get(timeout=SECONDS))


def test_opened_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[int] = []
    left = End()

    def opened(channel: Channel) -> Any:
        if len(failures) < 2:
            failures.append(1)
            raise KeyError("a fault")
        return left.accept(channel)

    with listening(End()) as listener:
        with dialing(left, listener.address, opened=opened, max_wait=0.05):
            left.wait()
    assert caplog.text.count("Traceback") == 1
    assert "KeyError" in caplog.text


@pytest.mark.parametrize("state", ["waiting", "shaking hands", "open"])
def test_close_is_prompt(state: str) -> None:
    end, left = End(), End()
    with socket.create_server(("127.0.0.1", 0)) as server, listening(end) as listener:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
        address = {"waiting": free_address(), "open": listener.address}.get(state, silent)
        with dialing(left, address, first_wait=SECONDS, max_wait=SECONDS) as dialer:
            if state == "open":
                left.wait()
            time.sleep(0.05)
            start = time.monotonic()
            dialer.close()
            dialer.close()
            dialer._thread.join(SECONDS)
            assert time.monotonic() - start < 1
        if state == "open":
            assert "this side closed" in left.ended()
        assert left.opened.empty()


def test_mistakes_are_raised_at_once() -> None:
    end = End()
    for kind in (Dialer, Listener):
        with pytest.raises(ValueError, match="is not an address"):
            kind("nowhere", terms(end))
        with pytest.raises(ValueError, match="disaggregation_secret"):
            kind("10.0.0.1:1", terms(end, secret=""))
    with listening(end) as listener, pytest.raises(OSError, match="Address already in use"):
        Listener(listener.address, terms(end))


def test_quiet_after_close(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), dialing(End(), free_address(), first_wait=SECONDS):
        wait_for(lambda: "ConnectionRefusedError" in caplog.text)
    assert len(caplog.records) == 1


# Addresses.


def test_addresses() -> None:
    assert parse_address("127.0.0.1:8998") == ("127.0.0.1", 8998)
    assert parse_address("prefill-0.local:1") == ("prefill-0.local", 1)
    assert parse_address("[::1]:65535") == ("::1", 65535)
    for address in (
        *("", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "host:9999999999", "::1:1"),
        *("[::1]", "[host]:1", "[]:1", "[::1:1", "a b:1", "http://host:1", "host:1/", "host:²"),
    ):
        with pytest.raises(ValueError, match=r"not an address|must be an integer from 0 to 65535"):
            parse_address(address)


@pytest.mark.parametrize("address", ["[::1]:0", "localhost:0"])
def test_names_and_the_other_family(address: str) -> None:
    end, left = End(), End()
    with listening(end, address) as listener, dialing(left, listener.address):
        assert listener.address.rpartition(":")[0] == address.rpartition(":")[0]
        left.wait().send(Cancel(id=1))
        assert end.take(1) == [Cancel(id=1)]


def test_an_empty_secret_is_for_this_machine_only() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "localhost.org", "127.1")))
    assert check_secret("10.0.0.1:1", "x") == b"x"
    with pytest.raises(ValueError, match="disaggregation_secret"):
        check_secret("0.0.0.0:0", "")
    with pair(secret="") as (left, right):
        left.channel.send(Cancel(id=1))
        assert right.take(1) == [Cancel(id=1)]


@pytest.mark.slow
def test_in_a_forked_process() -> None:
    """A child that exits does not affect the channels of its parent."""
    code = """
import os
from tests.disaggregation.peers import pair
from specjax.disaggregation.messages import Cancel
with pair() as (left, right):
    child = os.fork()
    if child == 0:
        raise SystemExit(0)
    assert os.waitpid(child, 0)[1] == 0
    left.channel.send(Cancel(id=1))
    assert right.take(1) == [Cancel(id=1)]
"""
    command = [sys.executable, "-c", WITH_TESTS + code]
    subprocess.run(command, check=True, timeout=60, env=os.environ | SAFE)

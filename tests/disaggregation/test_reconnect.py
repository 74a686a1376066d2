"""Channels that open again."""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from specjax.disaggregation.channel import Channel
from specjax.disaggregation.listener import Listener
from specjax.disaggregation.messages import Cancel, Hello
from specjax.disaggregation.reconnect import Reconnecting

from .peers import HELLO, MAX_BYTES, SECONDS, SECRET, End, listen, nothing_left, wait_for


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


class Client:
    """What a reconnecting side sees, in order."""

    def __init__(self, address: str, **options: Any) -> None:
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.channel: Channel | None = None
        defaults = {
            "hello": lambda: HELLO,
            "secret": SECRET,
            "max_bytes": MAX_BYTES,
            "check_hello": lambda hello: None,
            "first_wait": 0.01,
            "max_wait": 0.05,
        }
        self.reconnecting = Reconnecting(address, opened=self.opened, **(defaults | options))

    def opened(self, channel: Channel) -> Any:
        self.channel = channel
        self.events.put("opened")
        return self.events.put, self.events.put

    def next(self) -> Any:
        return self.events.get(timeout=SECONDS)


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(*args: Any, **options: Any) -> Client:
        made.append(Client(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.reconnecting.close()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


def listen_at(address: str, end: End) -> Listener:
    return Listener(
        address, hello=lambda: HELLO, secret=SECRET, max_bytes=MAX_BYTES, accept=end.accept
    )


def test_a_peer_that_comes_goes_and_comes_again(client, caplog: pytest.LogCaptureFixture) -> None:
    address = free_address()
    one = client(address)
    time.sleep(0.1)  # many attempts
    assert one.events.empty()
    for _ in range(3):
        end = End()
        listener = listen_at(address, end)
        assert one.next() == "opened"
        wait_for(lambda end=end: end.channel is not None)
        end.channel.send(Cancel(id=1))  # type: ignore[union-attr]
        assert one.next() == Cancel(id=1)
        one.channel.send(Cancel(id=2))
        assert end.take(1) == [Cancel(id=2)]
        listener.close()
        end.channel.close()  # type: ignore[union-attr]
        assert isinstance(one.next(), ConnectionError)
    one.reconnecting.close()
    assert 1 <= caplog.text.count("ConnectionRefusedError") <= 4  # once for each outage


def test_a_hello_that_is_refused(client, caplog: pytest.LogCaptureFixture) -> None:
    facts = {"page_size": 16}
    attempts: list[float] = []

    def check_hello(hello: Hello) -> None:
        attempts.append(time.monotonic())
        if hello.facts["page_size"] != 32:
            raise ValueError(f"page_size={hello.facts['page_size']} must be 32")

    end = End()
    listener = listen(end.accept, hello=lambda: Hello(facts=dict(facts)))
    one = client(listener.address, check_hello=check_hello, first_wait=0.001, max_wait=0.1)
    wait_for(lambda: len(attempts) >= 3)
    assert attempts[1] - attempts[0] > 0.04  # the slowest pace at once
    facts["page_size"] = 8
    wait_for(lambda: "page_size=8" in caplog.text)
    assert one.events.empty()
    facts["page_size"] = 32
    assert one.next() == "opened"
    one.reconnecting.close()
    listener.close()
    messages = [r.getMessage() for r in caplog.records if r.name.endswith("reconnect")]
    assert ["page_size=16" in messages[0], "page_size=8" in messages[1]] == [True, True]
    assert len(messages) == 2


def test_a_channel_that_is_lost_at_once_is_not_opened_at_once_again(client) -> None:
    times = []

    def accept(channel: Channel) -> Any:
        times.append(time.monotonic())
        raise ValueError("not you")

    listener = listen(accept)
    client(listener.address, first_wait=0.02, max_wait=0.16)
    wait_for(lambda: len(times) >= 5)
    listener.close()
    assert times[4] - times[3] > 0.07


def test_opened_that_raises(client, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Client):
        num_failures = 0

        def opened(self, channel: Channel) -> Any:
            self.num_failures += 1
            if self.num_failures < 3:
                raise KeyError("a fault")
            return super().opened(channel)

    listener = listen(End().accept)
    one = Failing(listener.address)
    assert one.next() == "opened"
    one.reconnecting.close()
    listener.close()
    assert caplog.text.count("Traceback") == 1
    assert "KeyError" in caplog.text


@pytest.mark.parametrize("state", ["waiting", "shaking hands", "connecting", "open"])
def test_close_is_prompt(client, state: str) -> None:
    end = End()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
        listener = listen(end.accept)
        address = {"waiting": free_address(), "open": listener.address}.get(state, silent)
        # a listener that takes nobody lets one or two wait, and the others knock
        full = [socket.socket() for _ in range(3 if state == "connecting" else 0)]
        for sock in full:
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
        one = client(address, timeout=SECONDS, first_wait=SECONDS, max_wait=SECONDS)
        if state == "open":
            assert one.next() == "opened"
        time.sleep(0.05)
        start = time.monotonic()
        one.reconnecting.close()
        one.reconnecting.close()
        one.reconnecting._thread.join(SECONDS)
        assert time.monotonic() - start < 1
        if state == "open":
            assert "this side closed" in str(one.next())
        assert one.events.empty()
        listener.close()
        for sock in full:
            sock.close()


def test_close_from_within(client) -> None:
    class Closing(Client):
        def opened(self, channel: Channel) -> Any:
            self.reconnecting.close()
            return super().opened(channel)

    listener = listen(End().accept)
    address = free_address()
    one = Closing(address)
    again = listen_at(address, End())
    assert one.next() == "opened"
    assert isinstance(one.next(), ConnectionError)
    again.close()
    listener.close()


def test_mistakes_are_raised_at_once(client) -> None:
    with pytest.raises(ValueError, match="no address"):
        client("nowhere")
    with pytest.raises(ValueError, match="disaggregation_secret"):
        client("10.0.0.1:1", secret="")


def test_quiet_after_close(client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        one = client(free_address(), first_wait=SECONDS)
        wait_for(lambda: "ConnectionRefusedError" in caplog.text)
        one.reconnecting.close()
    assert len(caplog.records) == 1

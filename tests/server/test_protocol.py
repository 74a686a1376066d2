"""Connections: limits of bytes, time and number before a request reaches its handler."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from specjax.server import process as protocol
from specjax.server.process import HEAD_BYTES, LimitedProtocol
from specjax.testing import Client, running

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"


async def count(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the number of bytes in the body."""
    size, has_more = 0, True
    while has_more and scope["path"] != "/refused":
        message = await receive()
        size += len(message.get("body", b""))
        has_more = message.get("more_body", False)
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class ShortProtocol(LimitedProtocol):
    max_connections = 4


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running(count, http=ShortProtocol) as found:
        yield found


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        yield connection


def answers(port: int, *parts: bytes) -> bytes:
    """Receive everything until the server closes the connection."""
    with connected(port) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except OSError:  # the server does not wait for the rest
            pass
        found = b""
        try:
            while part := connection.recv(2**16):
                found += part
        except ConnectionResetError:
            pass
        return found


def status(answer: bytes) -> int:
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    return int(answer.split()[1])


@pytest.mark.parametrize(
    "head",
    [
        GET + b"a: " + b"x" * HEAD_BYTES,
        GET + b"a: b\r\n" * (HEAD_BYTES // 6),
        GET + b"x" * HEAD_BYTES,
        b"GET /" + b"x" * HEAD_BYTES,
        b"GET /?" + b"x" * HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_long_heads_are_refused(port: int, head: bytes) -> None:
    assert status(answers(port, head)) == 431
    half = len(head) // 2
    assert status(answers(port, head[:half], head[half:])) == 431


@pytest.mark.parametrize("more", [b"0\r\na: " + b"x" * 2**20, b"1;" + b"x" * 2**20])
def test_long_chunks_without_a_body_are_refused(port: int, more: bytes) -> None:
    head = POST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n"
    assert answers(port, head + more) in (b"", b"431")


def test_heads_below_the_limit_are_read(port: int) -> None:
    size = HEAD_BYTES - 200
    head = POST + b"connection: close\r\ncontent-length: 300000\r\na: " + b"x" * size + b"\r\n\r\n"
    body = b"y" * 300_000
    for parts in ((head + body,), (head[:9], head[9:] + body), (head[:-1], head[-1:] + body)):
        assert answers(port, *parts).endswith(b"\r\n\r\n300000")


def test_requests_follow_each_other(port: int) -> None:
    one = POST + b"content-length: 3\r\n\r\nabc"
    last = POST + b"content-length: 5\r\nconnection: close\r\n\r\nabcde"
    found = answers(port, 3 * one + last)
    assert [part[0:1] for part in found.split(b"\r\n\r\n")[1:]] == [b"3", b"3", b"3", b"5"]


def test_slow_heads_are_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(protocol, "DRAIN_SECONDS", 0.05)
    assert status(answers(port, GET)) == 408
    assert answers(port) == b""  # nothing to answer
    for rest in (b"\r\n", b"G"):
        with connected(port) as connection:
            connection.sendall(GET + b"\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
            connection.sendall(rest)
            assert status(connection.recv(1000)) == 408
    refused = POST.replace(b"/ ", b"/refused ") + b"content-length: 9\r\n\r\n"
    with connected(port) as connection:
        connection.sendall(refused + b"ab")
        assert connection.recv(1000).endswith(b"\r\n\r\n0")
        connection.sendall(b"cd")
        assert connection.recv(1000) == b""


def test_connections_that_wait_give_way(port: int) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(port)) for _ in range(20)]
        silent[5].sendall(GET)
        for _ in range(5):
            assert Client(port).get("/").body == b"0"
        kept = stack.enter_context(connected(port))
        kept.sendall(GET + b"\r\n")
        assert kept.recv(1000).startswith(b"HTTP/1.1 200 OK")
        assert sum(is_open(one) for one in silent) <= 3


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def test_failures_to_accept_are_logged_once() -> None:
    logged: list[Any] = []

    class Loop:
        def default_exception_handler(self, context: Any) -> None:
            logged.append(context["message"])

    handle = protocol.AcceptFailures()
    for message in ("socket.accept() out of system resource", "another") * 3:
        handle(Loop(), {"message": message})  # type: ignore[arg-type]
    assert logged == ["socket.accept() out of system resource", *["another"] * 3]


def test_few_requests_wait_on_a_connection(port: int) -> None:
    """Excess connections are closed."""
    some = GET + b"\r\n"
    assert answers(port, some * 10 + GET + b"connection: close\r\n\r\n").count(b"200 OK") == 11
    assert answers(port, some * 2000).count(b"200 OK") < 100


def test_broken_requests_are_not_logged(port: int, caplog) -> None:
    assert status(answers(port, b"nonsense\r\n\r\n")) == 400
    upgrade = b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    answers(port, GET + upgrade)
    assert not caplog.records

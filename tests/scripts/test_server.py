"""The clients of the server's benchmark, against a server that answers as it is asked to."""

import asyncio
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ..loading import load_bench

bench, clients = load_bench("server"), load_bench("clients")

COUNTS = b'{"usage": {"completion_tokens": %d}}'
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(tokens: int) -> bytes:
    body = COUNTS % tokens
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def chunked(*parts: bytes) -> list[bytes]:
    return [CHUNKED, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


@contextmanager
def serving(answer: Callable[[bytes], list[bytes] | None]) -> Iterator[int]:
    """Port of a server that sends these pieces, and closes the connection for ``None``."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                pieces = answer(line.strip())
                if pieces is None:
                    return
                for piece in pieces:
                    self.wfile.write(piece)
                    time.sleep(0.001)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, *requests: bytes) -> list[int]:
    """What one client gets for requests one after the other."""

    async def run() -> list[int]:
        loop = asyncio.get_running_loop()
        transport, client = await loop.create_connection(clients.Client, "127.0.0.1", port)
        try:
            return [await client.ask(request + b"\n") for request in requests]
        finally:
            transport.close()
            await asyncio.sleep(0)

    return asyncio.run(asyncio.wait_for(run(), 10))


def test_answers_are_counted_whole_and_in_chunks() -> None:
    answers = {
        b"whole": [whole(7)],
        b"pieces": [whole(8)[:50], whole(8)[50:]],
        b"stream": chunked(b"data: {}", COUNTS % 1, COUNTS % 9),
    }
    with serving(answers.__getitem__) as port:
        assert ask(port, b"whole", b"stream", b"pieces", b"whole") == [7, 9, 8, 7]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n"], ValueError),
        (chunked(b'data: {"error": {}}'), ValueError),
        (None, ConnectionError),
    ],
)
def test_an_answer_that_fails_is_an_error(answer: list[bytes] | None, error: type) -> None:
    with serving(lambda line: answer) as port, pytest.raises(error):
        ask(port, b"a")


def test_many_clients_ask_and_connect_again() -> None:
    answers = {b"1": [whole(1)], b"2": [whole(2)], b"gone": None}
    with serving(answers.get) as port, clients.Clients(port, 10) as some:
        assert some.ask([[b"1\n", b"2\n"]] * 10) == 30
        assert some.ask([[b"2\n"]]) == 2
        with pytest.raises(ConnectionError):
            some.ask([[b"1\n"], [b"gone\n"]])
        assert some.ask([[b"1\n"]] * 3) == 3


def test_every_client_has_every_prompt_once() -> None:
    assert bench.in_turn("abc", 4) == [list("abca"), list("bcab"), list("cabc")]

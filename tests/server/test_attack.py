"""Attacks by strangers: memory of the server, and latency of other clients meanwhile.

pytest -m long -s tests/server/test_attack.py
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from specjax.testing import Client, Files

from ..support.server_process import serving, wait_until_ready
from ..support.waiting import wait_for

MB = 1e6
MOST_MB, MOST_SECONDS = 300, 0.3
BODY = 32 * 2**20 - 100
BODIES = {
    "text": (b'{"prompt": "', b"words ", b'"}'),
    "texts": (b'{"prompt": ["a"', b',"words words words"', b"]}"),
    "messages": (b'{"messages": [{"role": "user", "content": "', b"words ", b'"}]}'),
    "token ids": (b'{"prompt": [1', b",1234", b"]}"),
    "rows of token ids": (b'{"prompt": [[1]', b",[1234]", b"]}"),
    "lists": (b'{"prompt": [[]', b",[]", b"]}"),
    "lists anywhere": (b'{"metadata": [[]', b",[]", b"]}"),
    "objects": (b'{"messages": [{}', b",{}", b"]}"),
    "fields": (b'{"prompt": 1', b',"a":0', b"}"),
    "rows of tokens": (b'{"tokens": [[1]', b",[1,1,1,1]", b"]}"),
}
ROUTES = {b"messages": "/v1/chat/completions", b"tokens": "/detokenize"}


@pytest.fixture(scope="module")
def server(files: Files) -> Iterator[tuple[Any, Client]]:
    with serving(files.arguments()) as (process, client):
        wait_until_ready(process, client)
        client.post("/v1/completions", {"prompt": "a"})
        yield process, client


def resident(process: Any, name: str = "VmRSS") -> float:
    """Memory of a process in MB: current, or peak (``VmHWM``)."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return float(status.partition(f"{name}:")[2].split()[0]) * 1024 / MB


def while_attacked(server: tuple[Any, Client], what: str, attack: Callable[[], None]) -> None:
    """Check memory, and the latency of another client, while ``attack`` runs."""
    process, client = server
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # reset the peak
    before, waits, over = resident(process), [], threading.Event()

    def look() -> None:
        while not over.is_set():
            start = time.monotonic()
            assert client.get("/health").status == 200
            waits.append(time.monotonic() - start)
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            attack()
        finally:
            over.set()
        looking.result()
    more = resident(process, "VmHWM") - before
    last = sorted(waits)[int(0.99 * len(waits))]
    print(
        f"\n{what}: {more:.0f} MB more, /health p99 {1e3 * last:.0f} ms, "
        f"max {1e3 * max(waits):.0f} ms of {len(waits)}"
    )
    assert more <= MOST_MB
    assert last <= MOST_SECONDS
    assert client.post("/v1/completions", {"prompt": "a"}).status == 200


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", BODIES)
def test_twenty_long_bodies_at_once(server, kind: str) -> None:
    start, part, end = BODIES[kind]
    body = start + part * ((BODY - len(start) - len(end)) // len(part)) + end
    route = ROUTES.get(start.split(b'"')[1], "/v1/completions")
    client, seen = server[1], []

    def attack() -> None:
        with ThreadPoolExecutor(20) as pool:
            seen.extend(pool.map(lambda _: client.post(route, body).status, range(20)))

    while_attacked(server, f"20 bodies of {kind}", attack)
    assert set(seen) <= {400, 413, 429}
    assert {400, 413} & set(seen)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\na: ", b"GET /"])
def test_endless_heads(server, head: bytes) -> None:
    def send(_: int) -> None:
        address = ("127.0.0.1", server[1].port)
        with suppress(OSError), socket.create_connection(address, timeout=20) as connection:
            connection.sendall(head)
            for _ in range(400):
                connection.sendall(b"x" * 2**18)

    def attack() -> None:
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(send, range(60)))

    while_attacked(server, f"60 endless heads {head[:4]!r}", attack)


@pytest.mark.slow
@pytest.mark.long
def test_silent_connections(server) -> None:
    def attack() -> None:
        with ExitStack() as stack:
            for _ in range(500):
                address = ("127.0.0.1", server[1].port)
                connection = socket.create_connection(address, timeout=20)
                stack.enter_context(connection).sendall(b"P")
            time.sleep(20)  # until the server drops them

    while_attacked(server, "500 silent connections", attack)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("is_stream", [False, True])
def test_large_answers_that_nobody_reads(server, is_stream: bool) -> None:
    """25 requests of 1 KB that each need 14 MB of output."""
    asked = {"prompt": "hello", "n": 128, "max_tokens": 110, "logprobs": 20, "ignore_eos": True}

    def attack() -> None:
        with ExitStack() as stack:
            for _ in range(25):
                body = asked | {"stream": is_stream, "echo": True}
                stack.callback(server[1].connect("POST", "/v1/completions", body).close)
            time.sleep(2)
            route = "/v1/loads"
            wait_for(lambda: not server[1].get(route).json()["loads"][0]["num_running_reqs"], 300)
            time.sleep(5)

    while_attacked(server, f"unread answers, {is_stream=}", attack)

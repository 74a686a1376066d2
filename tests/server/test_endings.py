"""Clients that disconnect, servers that stop, engines that fail."""

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from specjax.server import exchange, make_app
from specjax.server.exchange import ClientGoneError, Exchange
from specjax.server.fields import ApiError
from specjax.testing import Client, is_idle, num_held, running

from ..support.waiting import wait_for

COMPLETIONS = "/v1/completions"
PLAIN: dict[str, Any] = {"headers": []}
LONG = {"prompt": "x", "max_tokens": 120, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_disconnect_aborts_the_request(engine, client, is_stream) -> None:
    aborted = engine.metrics.snapshot().num_aborted
    body = LONG | {"stream": is_stream, "n": 8}
    connection = client.connect("POST", COMPLETIONS, body)
    wait_for(lambda: engine.metrics.snapshot().num_running == 2)
    if is_stream:
        connection.getresponse().read(10)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_for(lambda: is_idle(engine))
    assert engine.metrics.snapshot().num_aborted > aborted
    assert num_held(engine) == 0


def test_a_slow_reader_gets_all(engine, client) -> None:
    connection = client.connect("POST", "/generate", {"text": ["a"] * 4, "stream": True})
    response = connection.getresponse()
    data = b""
    while part := response.read(200):
        data += part
        time.sleep(0.0005)
    connection.close()
    assert data.endswith(b"data: [DONE]\n\n")
    parts = [json.loads(line[6:]) for line in data.split(b"\n\n")[:-2]]
    last = {part["index"]: part["meta_info"]["finish_reason"] for part in parts}
    assert {reason["type"] for reason in last.values()} <= {"length", "stop"}
    assert len(last) == 4


async def _reply(one: Exchange, body: bytes) -> None:
    await one.reply(body)


def test_long_answers_go_in_pieces() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    body = bytes(range(256)) * (exchange.PIECE_BYTES // 128)
    asyncio.run(_reply(Exchange(PLAIN, send, send), body + b"end"))
    assert [message.get("more_body", False) for message in sent[1:]] == [True, True, False]
    assert b"".join(message["body"] for message in sent[1:]) == body + b"end"


def test_a_client_that_reads_nothing_is_dropped(monkeypatch) -> None:
    monkeypatch.setattr(exchange, "STALL_SECONDS", 0.05)

    async def never(*message: Any) -> Any:
        await asyncio.Event().wait()

    async def at_once(message: Any) -> None:
        sent.append(message)

    async def slowly(one: Exchange) -> str:
        for _ in range(5):
            await asyncio.sleep(0.03)
            await one.push(b"x")
        await asyncio.sleep(0.2)  # the client does not stall while it waits for the engine
        return "all"

    async def main() -> None:
        stuck = Exchange(PLAIN, never, never)
        with pytest.raises(ClientGoneError):
            await asyncio.wait_for(stuck.while_connected(stuck.push(b"x")), 5)
        for end in (
            partial(Exchange.end_events, events=b"x"),
            partial(Exchange.start_events, failed=ApiError.json),
            partial(_reply, body=b"x"),
        ):
            stuck = Exchange(PLAIN, never, never)
            with pytest.raises(ClientGoneError):
                await asyncio.wait_for(stuck.while_connected(end(stuck)), 5)
        one = Exchange(PLAIN, never, at_once)
        assert await one.while_connected(slowly(one)) == "all"

    sent: list[Any] = []
    asyncio.run(main())
    assert len(sent) == 5


def test_the_connection_of_a_stalled_client_is_closed(monkeypatch) -> None:
    monkeypatch.setattr(exchange, "STALL_SECONDS", 0.05)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        one = Exchange(scope, receive, send)
        with suppress(ClientGoneError):
            await one.while_connected(one.reply(b"x" * 50 * 2**20))

    with running(app) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")

        def is_closed() -> bool:
            try:
                connection.sendall(b"nobody reads this any more")
            except ConnectionError:
                return True
            return False

        wait_for(is_closed)


def test_a_server_that_stops_lets_requests_end(engine) -> None:
    app = make_app(engine)
    service = app.routes[0].app.service
    with running(app) as port:
        client = Client(port)
        running_one = client.connect("POST", COMPLETIONS, LONG)
        wait_for(lambda: service.num_requests == 1)
        service.stop()
        for answer in (client.get("/health"), client.post(COMPLETIONS, LONG)):
            assert answer.status == 503
            assert answer.error["code"] == "stopping"
        body = json.loads(running_one.getresponse().read())
        assert body["usage"]["completion_tokens"] == 120
        running_one.close()
        wait_for(lambda: service.num_requests == 0)


def test_aborted_requests_are_answered(engine) -> None:
    app = make_app(engine)
    service = app.routes[0].app.service
    with running(app) as port:
        client = Client(port)
        found: list[Any] = []
        asked = LONG | {"n": 20}
        threads = [
            threading.Thread(target=lambda: found.append(client.post(COMPLETIONS, asked).json())),
            threading.Thread(target=lambda: found.append(client.stream(COMPLETIONS, asked)[-1])),
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: service.num_requests == 40)
        service.stop()
        service.abort_all()
        for thread in threads:
            thread.join(20)
        reasons = [choice["finish_reason"] for one in found for choice in one["choices"]]
        assert len(reasons) == 21
        assert "abort" in reasons
        wait_for(lambda: service.num_requests == 0)


@pytest.mark.slow
def test_a_dead_engine_is_unavailable(files) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    with files.small() as engine, running(make_app(engine)) as port:
        client = Client(port)
        assert client.get("/health").status == 200
        connection = client.connect("POST", COMPLETIONS, LONG | {"stream": True, "n": 20})
        response = connection.getresponse()
        assert response.status == 200
        with pytest.raises(RuntimeError):
            engine._loop.run(fail, is_vital=True)
        *_, last, mark, _ = response.read().decode().split("\n\n")
        connection.close()
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert mark == "data: [DONE]"
        wait_for(lambda: client.get("/health").status == 503)
        for answer in (client.get("/health"), client.post(COMPLETIONS, LONG)):
            assert answer.status == 503
            assert answer.error["code"] == "engine_failed"
            assert b"device" not in answer.body
    engine = files.small()
    with running(make_app(engine)) as port:
        engine.close()
        assert Client(port).get("/health").error["code"] == "stopping"

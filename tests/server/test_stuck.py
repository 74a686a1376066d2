"""Engines that fail or whose device never answers: health, waiting clients, and the process."""

import asyncio
import json
import sys
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn

from specjax.scheduling.loop import EngineFault
from specjax.server import process, routes
from specjax.server.process import Server
from specjax.server.service import READS_AT_ONCE, Service

from ..support.server_process import serving, wait_until_ready

COMPLETIONS = "/v1/completions"
# the command with an engine that computes no prompt, and with short times
PROGRAM = """
import sys, threading
from specjax import Engine
from specjax.cli import main
from specjax.server import process
process.Server.failure_seconds, process.ANSWER_SECONDS, process.END_SECONDS = 0.5, 0.2, 2.0
def make_engine(**options):
    engine = Engine(**options)
    def wait(*_, **options):
        print("prefill", flush=True)
        threading.Event().wait()
    engine.runner.prefill = wait
    return engine
sys.exit(main(make_engine=make_engine))
"""
STUCK = [sys.executable, "-P", "-c", PROGRAM]


@pytest.fixture
def _stuck(engine, monkeypatch):
    """The engine's thread waits until the test ends."""
    go_on = threading.Event()
    whole = engine.runner.prefill

    def wait(*arguments: Any, **options: Any) -> Any:
        assert go_on.wait(20)
        return whole(*arguments, **options)

    monkeypatch.setattr(engine.runner, "prefill", wait)
    yield
    go_on.set()


@pytest.mark.usefixtures("_stuck")
def test_a_stuck_engine_delays_only_what_needs_it(client, monkeypatch) -> None:
    monkeypatch.setattr(routes, "HEALTH_SECONDS", 0.05)
    started = time.monotonic()
    answer = client.get("/health_generate")
    assert (answer.status, answer.error["code"]) == (503, "engine_slow")
    assert "0.05 s" in answer.error["message"]
    flushes = [client.connect("POST", "/flush_cache", {}) for _ in range(40)]
    for path in ("/health", "/metrics", "/v1/loads", "/get_server_info"):
        assert client.get(path).status == 200
    assert client.post("/tokenize", {"prompt": "x"}).status == 200
    # a long request is read in another thread, and refused because it is too long
    assert client.post(COMPLETIONS, {"prompt": "x" * 20_000}).status == 400
    assert time.monotonic() - started < 5
    for connection in flushes:
        connection.close()


def test_few_requests_are_read_in_one_iteration() -> None:
    order: list[str] = []

    async def read(service: Service) -> None:
        await service.take_turn()
        order.append("read")

    async def look() -> None:
        for _ in range(12):
            order.append("loop")
            await asyncio.sleep(0)

    async def main() -> None:
        service = Service(Mock())
        reading = [asyncio.create_task(read(service)) for _ in range(4 * READS_AT_ONCE)]
        await asyncio.gather(look(), *reading)

    asyncio.run(main())
    turns = "".join(one[0] for one in order).split("l")
    assert max(map(len, turns)) == READS_AT_ONCE
    assert turns.count("r" * READS_AT_ONCE) == 4


@pytest.mark.parametrize("stays", [False, True])
def test_a_failed_engine_ends_the_server(monkeypatch, stays) -> None:
    ended: list[float] = []
    monkeypatch.setattr(process, "end_within", ended.append)
    engine = Mock()
    service = Service(engine)

    async def main() -> list[bool]:
        config = uvicorn.Config(lambda *_: None, log_config=None)
        server = Server(config, service, 1.0)
        server.failure_seconds = None if stays else 0.0
        healthy = await server.on_tick(0)
        engine.check_health.side_effect = EngineFault("the device fell off")
        after = []
        for number in (9, 10, 11, 20):
            after.append(await server.on_tick(number))
            await asyncio.sleep(0.005)
        return [healthy, *after]

    assert asyncio.run(main()) == [False, False, False, not stays, not stays]
    assert ended == ([] if stays else [process.END_SECONDS])


@pytest.mark.slow
def test_clients_of_a_device_that_never_answers_get_an_error(files) -> None:
    arguments = files.arguments(watchdog_timeout=1.0)
    with serving(arguments, program=STUCK) as (server, client):
        wait_until_ready(server, client)
        asked = {"prompt": "a", "max_tokens": 2}
        begun = time.monotonic()
        waiting = [
            client.connect("POST", *request)
            for request in ((COMPLETIONS, asked), (COMPLETIONS, asked | {"stream": True}))
        ]
        while server.stdout.readline() != "prefill\n":  # an idle engine would flush at once
            assert server.poll() is None
        waiting.append(client.connect("POST", "/flush_cache", {}))
        for connection in waiting:
            response = connection.getresponse()
            assert response.status == 503
            assert json.loads(response.read())["error"]["code"] == "engine_failed"
            connection.close()
        assert client.get("/health").error["code"] == "engine_failed"
        assert server.wait(20) == 1
        assert 1.0 < time.monotonic() - begun < 15
        assert "watchdog_timeout" in server.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_signal_ends_a_process_whose_device_never_answers(files, has_failed) -> None:
    arguments = files.arguments(watchdog_timeout=0.5 if has_failed else 300.0)
    more = "--shutdown-timeout", "0.2", "--stay-after-failure"
    with serving(arguments, *more, program=STUCK) as (server, client):
        wait_until_ready(server, client)
        asked = {"prompt": "a"}
        waiting = [client.connect("POST", path, asked) for path in (COMPLETIONS, "/flush_cache")]
        time.sleep(2.0)
        assert client.get("/health").status == (503 if has_failed else 200)
        assert server.poll() is None
        server.terminate()
        begun = time.monotonic()
        assert server.wait(20) == 1
        assert time.monotonic() - begun < 6
        for connection in waiting:
            connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_closed_output_stops_nothing(files, name) -> None:
    with serving(files.arguments()) as (server, client):
        getattr(server, name).close()
        setattr(server, name, None)
        begun = time.monotonic()
        while True:
            try:
                if client.get("/health").status == 200:
                    break
            except OSError:
                assert time.monotonic() - begun < 60
            time.sleep(0.05)
        begun = time.monotonic()
        while time.monotonic() - begun < process.LOAD_SECONDS + 1:
            assert client.post(COMPLETIONS, {"prompt": "a", "zzqq": 1}).status == 200
        server.terminate()
        assert server.wait(20) == 0
        if name == "stdout":
            assert "INFO specjax.server.process: running " in server.stderr.read()

"""``specjax serve`` as a process, from start-up to the answers after a signal."""

import asyncio
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from unittest.mock import Mock

import pytest
import uvicorn

from specjax.cli.main import main
from specjax.server.process import ACCEPT_BATCH, BACKLOG, Server, bind

from ..support.server_process import flags, serving, wait_until_ready

COMPLETIONS = "/v1/completions"
SECONDS = 120.0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_start(files, number) -> None:
    with serving(files.arguments(), "--compile-cache-dir", "none") as (process, client):
        while True:
            try:
                assert client.get("/health").status == 503
                break
            except OSError:
                time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_silent_connections_lock_out_nobody(files) -> None:
    """The process may open 128 files, its log stays short, and its key is in the environment."""
    server = serving(files.arguments(), descriptors=128, key="secret")
    with server as (process, client), ExitStack() as stack:
        assert 503 in wait_until_ready(process, client)
        assert client.get("/v1/models", authorization="").status == 401
        for _ in range(150):
            address = ("127.0.0.1", client.port)
            stack.enter_context(socket.create_connection(address)).sendall(b"G")
        for _ in range(20):
            answer = client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
            assert answer.status == 200
        process.terminate()
        assert process.wait(30) == 0
        assert process.stderr.read().count("out of system resource") <= 1


def test_bad_options_end_with_a_reason(files, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        for options, reason in (
            (["--port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["--port", "70000"], "--port=70000"),
            (["--port", "0", "--max-requests", "0"], "max_requests=0"),
            (["--port", "0", "--shutdown-timeout", "-1"], "--shutdown-timeout=-1"),
            (["--port", "0", "--host", "256.256.256.256"], "cannot listen on 256"),
            (["--port", "0", "--page-size", "0"], "page_size=0"),
            (["--port", "0", "--model", "/nowhere"], "/nowhere"),
        ):
            assert main(["serve", "--quiet", *flags(files.arguments()), *options]) == 2
            assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_more_descriptors_are_allowed() -> None:
    code = (
        "import resource; from specjax.server.process import raise_descriptor_limit as more;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512));"
        "print(more(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    connections, *limits = map(int, done.stdout.split())
    assert limits == [512, 512]
    assert 300 < connections < 512


def test_many_connections_may_wait_to_be_accepted() -> None:
    async def main(listener: socket.socket) -> None:
        options = {"lifespan": "off", "ws": "none", "log_config": None}
        config = uvicorn.Config(lambda *_: None, backlog=ACCEPT_BATCH, **options)
        config.load()
        server = Server(config, Mock(), 1.0)
        server.lifespan = config.lifespan_class(config)
        await server.startup([listener])
        information = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        # tcpi_sacked of a listening socket is the length of its queue
        queue = struct.unpack_from("<8B6I", information)[-1]
        most = int(Path("/proc/sys/net/core/somaxconn").read_text())
        assert queue == min(BACKLOG, most) > ACCEPT_BATCH
        for one in server.servers:
            one.close()

    with bind("127.0.0.1", 0) as listener:
        asyncio.run(main(listener))


def test_ipv6_loopback(capsys) -> None:
    """While the engine is made, a server at ::1 answers 503, and 403 to pages of other sites."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
            port = listener.getsockname()[1]
    except OSError:
        pytest.skip("needs the IPv6 loopback address")
    seen = []

    def make(**options: object) -> None:
        for headers in ({}, {"origin": "http://page.example"}):
            with closing(HTTPConnection("::1", port, timeout=10)) as connection:
                connection.request("GET", "/v1/models", headers=headers)
                seen.append(connection.getresponse().status)
        raise ValueError("seen")

    assert main(["serve", "--host", "::1", "--port", str(port)], make_engine=make) == 2
    assert capsys.readouterr().err.endswith("specjax: error: seen\n")
    assert seen == [503, 403]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_answers_do_not_wait_for_acknowledgements(host: str) -> None:
    with bind(host, 0) as listener, socket.create_connection(listener.getsockname()):
        with listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

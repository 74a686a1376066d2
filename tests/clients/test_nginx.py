"""The nginx configuration of docs/deploying.md, between a client and a server."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specjax.testing import Client, Files

from ..support.server_process import free_port, serving, wait_until_ready

NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
DOCS = Path(__file__).parents[2] / "docs" / "deploying.md"
ASKED = {"prompt": "hello", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def configuration(folder: Path, listen: int, upstream: int) -> str:
    """Adapt the documented blocks to free ports, with a second server that is down."""
    (block,) = re.findall(r"```nginx\n(.*?)```", DOCS.read_text(), re.DOTALL)
    for documented, port in (("30000", upstream), ("30001", free_port()), ("listen 8080", listen)):
        assert documented in block
        block = block.replace(documented, f"listen {port}" if " " in documented else str(port))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "\n".join(f"{kind}_temp_path {folder / kind};" for kind in kinds)
    head = f"daemon off; pid {folder / 'pid'}; error_log {folder / 'log'}; events {{}}"
    return f"{head} http {{ access_log off; {paths}\n{block} }}"


@pytest.fixture(scope="module")
def servers(files: Files, tmp_path_factory) -> Iterator[tuple[Client, Client]]:
    """Clients of a server and of nginx in front of it."""
    if not Path(NGINX).exists():
        pytest.skip("needs nginx, which .ci/run installs")
    folder = tmp_path_factory.mktemp("nginx")
    options = files.arguments()
    with serving(options, "--allowed-hosts", "specjax") as (process, direct):
        wait_until_ready(process, direct)
        proxied = Client(free_port())
        (folder / "conf").write_text(configuration(folder, proxied.port, direct.port))
        nginx = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "conf")])
        try:
            deadline = time.monotonic() + 20
            while True:
                try:
                    socket.create_connection(("127.0.0.1", proxied.port)).close()
                    break
                except OSError:
                    assert nginx.poll() is None, (folder / "log").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            yield direct, proxied
        finally:
            nginx.terminate()
            nginx.wait(20)


def test_answers_through_the_proxy(servers) -> None:
    direct, proxied = servers
    text = direct.post("/v1/completions", ASKED).json()["choices"][0]["text"]
    for _ in range(4):  # one of the two servers is down
        assert proxied.post("/v1/completions", ASKED).json()["choices"][0]["text"] == text
    events = proxied.stream("/v1/completions", ASKED)
    assert len(events) > 2
    assert "".join(event["choices"][0]["text"] for event in events) == text


def test_private_paths_are_denied(servers) -> None:
    direct, proxied = servers
    for path in ("/metrics", "/flush_cache"):
        assert proxied.get(path).status == 403
    assert direct.get("/metrics").status == 200
    # names that neither the server nor its options have
    assert direct.get("/v1/models", host="evil.example").error["code"] == "unknown_host"

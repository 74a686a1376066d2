"""``specjax serve`` under a supervisor with the restart policies that the documents show."""

import configparser
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from specjax.server.process import END_SECONDS
from specjax.testing import Client

from ..support.server_process import flags, free_port, wait_until_ready
from .bodies import CHAT, COMPLETIONS, HELLO

ROOT = Path(__file__).parents[2]
# the command with an engine that fails as the file at the first argument says
PROGRAM = """
import sys, threading
from pathlib import Path
from specjax import Engine
from specjax.cli import main
from specjax.server import process
process.Server.failure_seconds, process.ANSWER_SECONDS = 0.5, 0.2
path = Path(sys.argv.pop(1))
def make_engine(**options):
    engine = Engine(**options)
    compute = engine.runner.prefill
    def prefill(*arguments, **options):
        if path.exists():
            if path.read_text() == "error":
                raise RuntimeError("the device is lost")
            threading.Event().wait()
        return compute(*arguments, **options)
    engine.runner.prefill = prefill
    return engine
sys.exit(main(make_engine=make_engine))
"""


def unit() -> dict[str, str]:
    """The service of the systemd unit."""
    page = (ROOT / "docs" / "deploying.md").read_text("utf-8")
    (source,) = re.findall(r"```ini\n(.*?)```", page, re.DOTALL)
    parser = configparser.ConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(source)
    return dict(parser["Service"])


def must_restart(status: int) -> bool:
    """Whether the unit's policy starts a process again; a negative status is a signal."""
    assert unit()["Restart"] == "on-failure"
    clean = -signal.SIGHUP, -signal.SIGINT, -signal.SIGTERM, -signal.SIGPIPE
    return status not in (0, *clean)


def test_policies_start_a_failed_server_again() -> None:
    service = unit()
    # systemd gives up after 5 starts in 10 s
    assert 5 * float(service["RestartSec"]) > 10
    compose = yaml.safe_load((ROOT / "examples/deploy/compose.yaml").read_text("utf-8"))
    container = compose["services"]["specjax"]
    assert container["restart"] == "unless-stopped"
    dockerfile = (ROOT / "examples/deploy/Dockerfile").read_text("utf-8")
    for text, seconds in (
        (service["ExecStart"], float(service["TimeoutStopSec"])),
        (dockerfile.replace('", "', " "), float(container["stop_grace_period"].removesuffix("s"))),
    ):
        (timeout,) = re.findall(r"--shutdown-timeout (\d+)", text)
        assert seconds >= float(timeout) + END_SECONDS


def supervised(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and again each time that the policy demands it."""
    while True:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()
            if not must_restart(process.returncode):
                return


def children(process: subprocess.Popen[str]) -> set[int]:
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    return {int(number) for task in tasks for number in task.read_text().split()}


def is_running(number: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{number}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_killed_and_failed_servers_serve_again(files, tmp_path) -> None:
    port, failure = free_port(), tmp_path / "failure"
    arguments = flags(files.arguments(watchdog_timeout=2.0))
    program = [sys.executable, "-P", "-c", PROGRAM, str(failure)]
    client, asked = Client(port), {"prompt": "a", "max_tokens": 8, "temperature": 0}
    endings = iter(("killed", "error", "stuck", "stopped", "none"))
    statuses, texts, left = [], set(), set()
    for process in supervised([*program, "serve", *arguments, "--port", str(port)]):
        failure.unlink(missing_ok=True)
        assert 503 in wait_until_ready(process, client)
        assert client.get("/health").status == client.post(CHAT, HELLO).status == 200
        texts.add(client.post(COMPLETIONS, asked).json()["choices"][0]["text"])
        left |= children(process)
        ending = next(endings)
        if ending == "killed":
            os.kill(process.pid, signal.SIGKILL)
        elif ending == "stopped":
            process.terminate()
        else:
            failure.write_text(ending)
            assert client.post(COMPLETIONS, asked).error["code"] == "engine_failed"
            assert client.get("/health").status == 503
        statuses.append(process.wait(30))
    assert statuses == [-signal.SIGKILL, 1, 1, 0]
    assert len(texts) == 1
    assert left
    until = time.monotonic() + 10
    while any(map(is_running, left)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [number for number in left if is_running(number)]

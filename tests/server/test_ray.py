"""The Ray Serve example: a replica is killed under load, and every request is answered.

Use a separate environment: ``pip install -e '.[dev,ray]'``. ``-s`` prints the metrics.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from specjax.testing import Client, Files

from ..support.server_process import flags, free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
REPLICAS = 2
CLIENTS = 8
REQUESTS = 400
KILL_AFTER = 100  # answers
COMPLETIONS = "/v1/completions"
TRIES = 20
SECONDS = 180.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs specjax[ray]"),
]


def question(i: int) -> tuple[str, dict[str, Any]]:
    """A prompt and its sampling parameters; every second one is greedy."""
    params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    if i % 2:
        params |= {"temperature": 0.8, "sampling_seed": i}
    return f"prompt {i}", params


def body(i: int) -> dict[str, Any]:
    prompt, params = question(i)
    names = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
    return {"prompt": prompt} | {names.get(name, name): value for name, value in params.items()}


def ask(client: Client, i: int) -> str:
    """Return the text; raise if the answer is incomplete. Every third pair of requests streams."""
    if i // 2 % 2:
        events = client.stream(COMPLETIONS, body(i % 16))
        return "".join(event["choices"][0]["text"] for event in events)
    answer = client.post(COMPLETIONS, body(i % 16))
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]["text"]


def replicas(ancestor: int) -> set[int]:
    """Processes of replicas among the children of a process."""
    parents, found = {}, set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            pid, status = int(path.name), (path / "stat").read_text()
            parents[pid] = int(status.rpartition(")")[2].split()[1])
            if b"ray::ServeReplica" in (path / "cmdline").read_bytes():
                found.add(pid)
        except OSError:
            continue

    def is_below(pid: int) -> bool:
        return pid == ancestor or (pid in parents and is_below(parents[pid]))

    return {pid for pid in found if is_below(pid)}


def wait_for_replacement(client: Client, since: float) -> None:
    """Wait until a replica that was started since then has answered."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError, HTTPException):
            answer = client.get("/v1/models")
            if answer.status == 200 and answer.json()["data"][0]["created"] >= since:
                return
        time.sleep(0.05)
    raise AssertionError("no replica came in place of the one that was killed")


def test_a_killed_replica_leaves_nobody_without_an_answer(files: Files, tmp_path: Path) -> None:
    with files.engine(dtype="float32") as engine:
        whole = [engine.generate(*question(i))["text"] for i in range(16)]
    port = free_port()
    options = [*flags(files.arguments(dtype="float32")), "--replicas", str(REPLICAS)]
    options += ["--port", str(port)]
    # paths of Unix sockets must be short
    variables = {"RAY_TMPDIR": "/tmp", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), *options],
            env=os.environ | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    client, lock = Client(port), threading.Lock()
    errors: list[str] = []
    tries: list[int] = []
    slowest = 0.0

    def answer(i: int) -> bool:
        """Retry until there is an answer; return whether it is right."""
        nonlocal slowest
        before = time.monotonic()
        for number in range(1, TRIES + 1):
            try:
                text = ask(client, i)
            except (AssertionError, OSError, HTTPException) as error:
                errors.append(f"{type(error).__name__}: {error}"[:200])
                time.sleep(0.2 * number)
                continue
            with lock:
                tries.append(number)
                slowest = max(slowest, time.monotonic() - before)
            return text == whole[i % 16]
        raise AssertionError(f"request {i} has no answer")

    try:
        before = time.monotonic()
        while "is ready at" not in log.read_text():
            assert process.poll() is None
            assert time.monotonic() - before < SECONDS, log.read_text()
            time.sleep(0.1)
        with ThreadPoolExecutor(CLIENTS) as pool:
            before = time.monotonic()
            futures = [pool.submit(answer, i) for i in range(REQUESTS)]
            while len(tries) < KILL_AFTER:
                assert time.monotonic() - before < SECONDS
                time.sleep(0.01)
            victim = min(running := replicas(process.pid))
            assert len(running) == REPLICAS
            killed, since = time.monotonic(), time.time()
            os.kill(victim, signal.SIGKILL)
            wait_for_replacement(client, since)
            again = time.monotonic() - killed
            right = [future.result() for future in futures]
            seconds = time.monotonic() - before
        assert len(replicas(process.pid)) == REPLICAS
        print(
            f"\n{REQUESTS} requests of {CLIENTS} clients in {seconds:.1f} s, "
            f"{sum(tries) - REQUESTS} retries, {right.count(False)} wrong, slowest answer after "
            f"{slowest:.1f} s, {REPLICAS} replicas again after {again:.1f} s",
            *sorted(set(errors)),
            sep="\n",
        )
        assert all(right)
        # after a signal, requests in progress finish
        with ThreadPoolExecutor(CLIENTS) as pool:
            futures = [pool.submit(ask, client, i) for i in range(CLIENTS)]
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            assert [future.result() for future in futures] == whole[:CLIENTS]
        assert process.wait(SECONDS) == 0
        assert not replicas(process.pid)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()

"""A process under load: every request is answered, nothing is left behind, and it ends in order."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from specjax.testing import Client

from .load import Footprint, Load
from .process import serving, wait_until_ready

AT_ONCE = 64
SIZES = {"max_running_requests": 16, "batch_buckets": (16,), "max_total_tokens": 2048}
OPTIONS = ("--served-model-name", "tiny", "--shutdown-timeout", "1")


def settled(process: Any, client: Client) -> Footprint:
    """What the process holds once nothing runs and no client is connected."""
    deadline = time.monotonic() + 20
    while True:
        load = client.get("/v1/loads").json()["loads"][0]
        if not load["num_running_reqs"] + load["num_waiting_reqs"]:
            client.post("/flush_cache")
            if client.get("/v1/loads").json()["loads"][0]["num_used_tokens"] == 0:
                break
        assert time.monotonic() < deadline, load
        time.sleep(0.1)
    found = []
    for _ in range(10):  # the last connections close in a moment
        found.append(Footprint.of(process.pid))
        time.sleep(0.05)
    return min(found, key=lambda one: one.sockets)


def report(process: Any, client: Client, total: int) -> None:
    """Run requests, of which the first fifth warms up, and compare what the process holds."""
    load, start = Load(client), time.monotonic()
    load.run(range(total // 5), AT_ONCE)
    before = settled(process, client)
    load.run(range(total // 5, total), AT_ONCE)
    seconds, after = time.monotonic() - start, settled(process, client)
    print(f"{total} requests in {seconds:.0f} s: {dict(load.kinds)}, {dict(load.statuses)}")
    print(f"{before} -> {after}")
    assert sum(load.kinds.values()) == total
    assert after.sockets == before.sockets
    # those of asyncio's pool come when they are needed
    assert after.threads <= before.threads + 4 + (os.cpu_count() or 1)
    assert after.rss_mb < before.rss_mb + 30


def end_under_load(process: Any, client: Client) -> None:
    """What begins before a signal is answered; what begins later may find nobody."""
    load, numbers, lock = Load(client), count(10**6), threading.Lock()

    def ask_on() -> None:
        is_there = True
        while is_there:
            with lock:
                number = next(numbers)
            is_there = load.ask(number)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(ask_on) for _ in range(AT_ONCE)]
        time.sleep(2)
        load.signal_time = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        seconds = time.monotonic() - load.signal_time
        for future in futures:
            future.result(60)
    print(f"ended in {seconds:.1f} s: {dict(load.kinds)}, {dict(load.statuses)}")
    assert seconds < 10
    assert load.statuses[503]


@pytest.mark.slow
@pytest.mark.parametrize("total", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_load_leaves_nothing_behind(files, total) -> None:
    with serving(files.arguments(**SIZES), *OPTIONS) as (process, client):
        wait_until_ready(process, client)
        report(process, client, total)
        end_under_load(process, client)
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
@pytest.mark.long
def test_hours_leave_nothing_behind(files) -> None:
    """``SOAK_SECONDS`` of load, an hour by default; memory is compared with that after a sixth."""
    seconds, numbers = float(os.environ.get("SOAK_SECONDS", 3600)), count()
    with serving(files.arguments(**SIZES), *OPTIONS) as (process, client):
        wait_until_ready(process, client)
        start, found = time.monotonic(), []
        for share in (1 / 6, 1):
            while time.monotonic() - start < share * seconds:
                load, first = Load(client), 500 * next(numbers)
                load.run(range(first, first + 500), AT_ONCE)
            found.append(settled(process, client))
            print(f"{time.monotonic() - start:.0f} s, {first + 500} requests: {found[-1]}")
        before, after = found
        assert after.sockets == before.sockets
        assert after.threads <= before.threads
        assert after.rss_mb < 1.03 * before.rss_mb

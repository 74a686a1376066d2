"""A process under load: it answers every request, leaks nothing and shuts down in order.

Many clients run at once. Some disconnect, send errors, read slowly or never; others check answers.
"""

import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from specjax.testing import Client

from ..support.server_process import serving, wait_until_ready
from .bodies import CHAT, COMPLETIONS, GENERATE

AT_ONCE = 64
SIZES = {"max_running_requests": 16, "batch_buckets": (16,), "max_total_tokens": 2048}
OPTIONS = ("--served-model-name", "tiny", "--shutdown-timeout", "1")
PROMPTS = ("hello", "ab", "to be or not", "1234567890", "a longer prompt that has some pages")
MALFORMED: tuple[tuple[str, str, Any], ...] = (
    ("POST", COMPLETIONS, b'{"prompt": "a"'),
    ("POST", COMPLETIONS, b"\xff\xfe"),
    ("POST", CHAT, b"[" * 100_000),
    ("POST", CHAT, {"messages": "hello"}),
    ("POST", COMPLETIONS, {"prompt": "a", "temperature": "hot"}),
    ("POST", COMPLETIONS, {"prompt": "a", "max_token": 1}),
    ("POST", COMPLETIONS, {"prompt": "a" * 5000}),
    ("POST", COMPLETIONS, {"prompt": "a", "model": "another"}),
    ("POST", GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -1}}),
    ("POST", "/v1/nothing", {}),
    ("PUT", CHAT, {}),
)
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close at once with a reset


@dataclass(frozen=True)
class Footprint:
    """Resources that a process holds."""

    rss_mb: float
    threads: int
    sockets: int

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        folder = Path(f"/proc/{pid}")
        lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
        status = {name: value.split() for name, _, value in lines}
        targets = []
        for path in (folder / "fd").iterdir():
            try:
                targets.append(str(path.readlink()))
            except FileNotFoundError:
                continue  # closed in the meantime
        sockets = sum(target.startswith("socket:") for target in targets)
        return cls(int(status["VmRSS"][0]) / 1024, int(status["Threads"][0]), sockets)


@dataclass
class Load:
    """Sends requests to one server, each drawn from its number, and counts the outcomes."""

    client: Client
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    signal_time: float = float("inf")  # later requests may find the server gone

    def __post_init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def run(self, numbers: range, at_once: int) -> None:
        """Send a request and check its answers."""
        with ThreadPoolExecutor(at_once) as pool:
            for _ in pool.map(self.ask, numbers):
                pass

    def ask(self, number: int) -> bool:
        """Send one request; return whether the server accepted it, as it must before the signal."""
        rng = random.Random(number)
        draw, begun = rng.random(), time.monotonic()
        kind = "answered"
        kinds = (("cancelled", 0.05), ("malformed", 0.02), ("slow", 0.03), ("silent", 0.01))
        for name, share in kinds:
            if 0 <= draw < share:
                kind = name
            draw -= share
        try:
            status = getattr(self, f"_{kind}")(rng)
        except ConnectionError:
            if begun < self.signal_time:
                raise
            return False
        with self._lock:
            self.kinds[kind] += 1
            self.statuses[status] += 1
        return True

    def _answered(self, rng: random.Random) -> int:
        path, body = _request(rng)
        if rng.random() < 0.05:  # long enough to be parsed in another thread
            body["metadata" if path != GENERATE else "rid"] = "x" * 20_000 + str(rng.random())
        is_stream = rng.random() < 0.5
        answer = self.client.post(path, body | {"stream": is_stream})
        if answer.status != 200:
            assert self._may_refuse(answer.status), (path, body, answer.status, answer.body)
            return answer.status
        parts = answer.events() if is_stream else answer.json()
        if not isinstance(parts, list):
            parts = [parts]
        elif not is_stream:
            parts = [part | {"index": i} for i, part in enumerate(parts)]
        texts, reasons = _texts(parts, path)
        assert texts, (path, body, answer.body)
        key = json.dumps([path, {k: v for k, v in body.items() if k not in ("metadata", "rid")}])
        with self._lock:
            if "abort" in reasons:
                assert time.monotonic() > self.signal_time, (path, body, answer.body)
                known = self._texts.get(key, texts)
                # a part of a stop string may remain at the end
                assert "stop" in body or all(map(str.startswith, known, texts)), (
                    body,
                    texts,
                    known,
                )
                return answer.status
            known = self._texts.setdefault(key, texts)
        assert texts == known, (path, body, texts, known)
        return answer.status

    def _cancelled(self, rng: random.Random) -> int:
        path, body = _request(rng, tokens=90)
        body["stream"] = rng.random() < 0.5
        connection = self.client.connect("POST", path, body)
        if body["stream"]:
            connection.getresponse().read(rng.randrange(1, 300))
        else:
            time.sleep(rng.random() * 0.05)
        if rng.random() < 0.5:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()
        return 0

    def _malformed(self, rng: random.Random) -> int:
        method, path, body = rng.choice(MALFORMED)
        answer = self.client.ask(method, path, body)
        if not self._may_refuse(answer.status):
            assert 400 <= answer.status < 500, (path, body, answer.status, answer.body)
        assert set(answer.error) == {"message", "type", "param", "code"}
        return answer.status

    def _slow(self, rng: random.Random) -> int:
        body = {"text": [rng.choice(PROMPTS)] * 2, "sampling_params": {"max_new_tokens": 60}}
        connection = self.client.connect("POST", GENERATE, body | {"stream": True})
        response = connection.getresponse()
        data = b""
        while part := response.read(rng.randrange(100, 3000)):
            data += part
            time.sleep(rng.random() * 0.01)
        connection.close()
        if response.status == 200:
            assert data.endswith(b"data: [DONE]\n\n"), data[-300:]
        else:
            assert self._may_refuse(response.status), data
        return response.status

    def _silent(self, rng: random.Random) -> int:
        """A client that does not read an answer larger than all buffers."""
        body = {"prompt": rng.choice(PROMPTS), "max_tokens": 90, "ignore_eos": True}
        body |= {"n": 16, "logprobs": 20, "echo": True, "stream": rng.random() < 0.5}
        connection = self.client.connect("POST", COMPLETIONS, body)
        time.sleep(rng.uniform(0.5, 2))
        connection.close()
        return 0

    def _may_refuse(self, status: int) -> bool:
        return status == 503 and time.monotonic() > self.signal_time


def _request(rng: random.Random, tokens: int = 0) -> tuple[str, dict[str, Any]]:
    """A request with a deterministic text."""
    prompt, count = rng.choice(PROMPTS), tokens or rng.randint(4, 8)
    if rng.random() < 0.5:
        sampling: dict[str, Any] = {"temperature": 0}
    else:
        sampling = {"temperature": 1, "top_k": 20, "n": rng.randint(1, 2)}
    seed = rng.randint(1, 3)
    draw = rng.randrange(3)
    if draw == 0:
        sampling |= {"max_new_tokens": count, "sampling_seed": seed}
        return GENERATE, {"text": prompt, "sampling_params": sampling}
    body = sampling | {"max_tokens": count, "seed": seed, "model": "tiny"}
    if rng.random() < 0.2:
        body["stop"] = ["e", "zz"]
    logprobs = rng.random() < 0.2
    if draw == 1:
        return COMPLETIONS, body | {"prompt": prompt} | ({"logprobs": 2} if logprobs else {})
    messages = [{"role": "user", "content": prompt}]
    return CHAT, body | {"messages": messages, "logprobs": logprobs}


def _texts(parts: list[Any], path: str) -> tuple[list[str], set[str | None]]:
    """Texts and finish reasons of all choices, from a whole answer or a stream."""
    texts: dict[int, str] = {}
    reasons: set[str | None] = set()
    for part in parts:
        if path == GENERATE:  # cumulative stream
            texts[part.get("index", 0)] = part["text"]
            reason = part["meta_info"]["finish_reason"]
            reasons.add(reason and reason["type"])
            continue
        for choice in part["choices"]:
            said = choice.get("delta") or choice.get("message") or choice
            text = said.get("content") or said.get("text") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            reasons.add(choice["finish_reason"])
    return [texts[i] for i in sorted(texts)], reasons


def settled(process: Any, client: Client) -> Footprint:
    """Resources of the process when nothing runs and no client is connected."""
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
    for _ in range(10):  # the last connections close soon
        found.append(Footprint.of(process.pid))
        time.sleep(0.05)
    return min(found, key=lambda one: one.sockets)


def report(process: Any, client: Client, total: int) -> None:
    """Run requests, the first fifth as warm-up, and compare the resources of the process."""
    load, start = Load(client), time.monotonic()
    load.run(range(total // 5), AT_ONCE)
    before = settled(process, client)
    load.run(range(total // 5, total), AT_ONCE)
    seconds, after = time.monotonic() - start, settled(process, client)
    print(f"{total} requests in {seconds:.0f} s: {dict(load.kinds)}, {dict(load.statuses)}")
    print(f"{before} -> {after}")
    assert sum(load.kinds.values()) == total
    assert after.sockets == before.sockets
    # threads of asyncio's pool start on demand
    assert after.threads <= before.threads + 4 + (os.cpu_count() or 1)
    assert after.rss_mb < before.rss_mb + 30


def end_under_load(process: Any, client: Client) -> None:
    """Requests before a signal are answered; later ones may find the server gone."""
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
def test_load_leaks_nothing(files, total) -> None:
    with serving(files.arguments(**SIZES), *OPTIONS) as (process, client):
        wait_until_ready(process, client)
        report(process, client, total)
        end_under_load(process, client)
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
@pytest.mark.long
def test_hours_of_load_leak_nothing(files) -> None:
    """``SOAK_SECONDS`` of load (default: an hour); memory may not grow after a sixth."""
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
        # threads of the bounded pools start on demand
        assert after.threads <= before.threads + 4 + (os.cpu_count() or 1)
        assert after.rss_mb < 1.03 * before.rss_mb

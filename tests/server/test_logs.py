"""Log lines of the server: access log, request ids, load, and progress at the start."""

import json
import logging
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from specjax import Engine
from specjax.logs import ACCESS, FORMATS
from specjax.metrics import Totals
from specjax.server.app import route
from specjax.server.process import describe_load, log_load
from specjax.server.service import Access, Service
from specjax.testing import Client, running

COMPLETIONS = "/v1/completions"
SECRET, PROMPT = "sesame-open", "the prompt is private"


@pytest.fixture
def line(caplog):
    """Wait for a line of the log, as a JSON object; a client may have its answer earlier."""
    caplog.handler.setFormatter(FORMATS["json"])
    with caplog.at_level(logging.DEBUG, "specjax"):

        def find(logger: str, request_id: str | None) -> Any:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                for found in map(json.loads, caplog.text.splitlines()):
                    if (found["logger"], found.get("request_id")) == (logger, request_id):
                        return found
                time.sleep(0.01)
            raise AssertionError(caplog.text)

        yield find


def test_access_lines_have_the_id_and_no_secrets(client, line, caplog) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    headers = {"authorization": f"Bearer {SECRET}", "x_api_key": SECRET}
    done = client.post(COMPLETIONS, asked, x_request_id="my id-7", **headers)
    found, rid = line(ACCESS, "my id-7"), done.json()["id"]
    assert (found["level"], found["status"], found["rid"]) == ("info", 200, rid)
    assert (found["client"], found["method"], found["path"]) == ("127.0.0.1", "POST", COMPLETIONS)
    assert 0 < found["seconds"] < 60
    assert f"POST {COMPLETIONS} 200 " in found["message"]
    assert rid in line("specjax.server.generating", "my id-7")["message"]

    bad = client.post(f"{COMPLETIONS}?key={SECRET}", asked | {"temperature": -1}, **headers)
    found = line(ACCESS, bad.headers["x-request-id"])
    assert (found["path"], found["status"], found["rid"]) == (COMPLETIONS, 400, "-")
    client.get("/x%0A%1b%E2%80%A8" + "y" * 300, x_request_id="nasty")
    assert line(ACCESS, "nasty")["path"] == "/x\n\x1b\u2028" + "y" * 251
    client.get("/health", x_request_id="probe")
    assert line(ACCESS, "probe")["level"] == "debug"
    assert SECRET not in caplog.text
    assert PROMPT not in caplog.text


@pytest.mark.parametrize("filler", [1, 5000])  # another thread reads the latter
def test_other_lines_have_the_id(client, line, filler) -> None:
    asked = {"prompt": "a", "max_tokens": 1, f"zzqq{filler}": "x" * filler}
    client.post(COMPLETIONS, asked, x_request_id="filled")
    assert f"zzqq{filler}" in line("specjax.server.fields", "filled")["message"]


def test_a_client_that_leaves_has_status_499(client, line) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nx-request-id: gone\r\n"
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(head.encode() + b"content-length: 9\r\n\r\n{")
    assert line(ACCESS, "gone")["status"] == 499


def test_health_shows_the_progress_of_a_start() -> None:
    future: Future[Engine] = Future()
    service = Service(future, access=Access(api_key=SECRET))
    with running(route(service)) as port:
        client = Client(port)
        before = client.get("/health")
        service.report_progress(3, 8)
        after = client.get("/health")
    for answer, message in (
        (before, "the model is still loading"),
        (after, "the model is still loading: 3/8 functions ready"),
    ):
        assert (answer.status, answer.error["code"]) == (503, "starting")
        assert answer.error["message"] == message


def test_load_is_described_between_two_snapshots() -> None:
    past = Totals(max_total_tokens=100, generated_tokens=7, num_verifies=4, num_accepted_drafts=4)
    assert describe_load(past, past, 5.0) == {}
    now = Totals(
        max_total_tokens=100,
        num_used_tokens=25,
        num_running=2,
        num_waiting=1,
        generated_tokens=107,
        prefilled_tokens=50,
        num_verifies=44,
        num_accepted_drafts=64,
    )
    assert describe_load(now, past, 5.0) == {
        "running": 2,
        "waiting": 1,
        "tokens_per_second": 20.0,
        "prefill_tokens_per_second": 10.0,
        "kv_use": 0.25,
        "accept_length": 2.5,
    }
    assert "accept_length" not in describe_load(now, now, 5.0)
    waiting = Totals(num_waiting=1)
    assert describe_load(waiting, waiting, 5.0)["waiting"] == 1


def test_an_idle_server_logs_no_load(engine, line, caplog) -> None:
    is_over = threading.Event()
    arguments = engine.metrics.snapshot, is_over, 0.02
    thread = threading.Thread(target=log_load, args=arguments)
    thread.start()
    time.sleep(0.1)
    assert "running" not in caplog.text
    engine.generate("hello", {"max_new_tokens": 8, "ignore_eos": True})
    found = line("specjax.server.process", None)
    is_over.set()
    thread.join()
    assert found["tokens_per_second"] > 0 or found["running"] or found["prefill_tokens_per_second"]
    assert found["message"].startswith("running ")

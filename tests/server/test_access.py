"""Access control and limits of the server."""

import asyncio
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import uvicorn

from specjax.server import exchange, make_app
from specjax.server.app import route
from specjax.server.exchange import Exchange
from specjax.server.fields import ApiError
from specjax.server.keys import KeyFile
from specjax.server.process import Server, bind
from specjax.server.service import Access, Service
from specjax.testing import Client, running

from ..support.waiting import wait_for

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
PATHS = [
    ("GET", "/v1/models"),
    ("GET", "/get_server_info"),
    ("GET", "/v1/loads"),
    ("GET", "/health_generate"),
    ("POST", COMPLETIONS),
    ("POST", "/v1/chat/completions"),
    ("POST", "/generate"),
    ("POST", "/tokenize"),
    ("POST", "/abort_request"),
    ("POST", "/flush_cache"),
    ("POST", "/update_weights_from_disk"),
]


def test_a_key_is_needed_where_there_is_one(engine) -> None:
    with running(make_app(engine, api_key="kéy")) as port:
        client = Client(port)
        for method, path in PATHS:
            for wrong in ({}, {"authorization": "Bearer key"}, {"authorization": "Basic k\xe9y"}):
                answer = client.ask(method, path, b"{}", **wrong)
                assert answer.status == 401, path
                assert answer.error["code"] == "invalid_api_key"
        for path in ("/health", "/metrics"):
            assert client.get(path).status == 200
        right = Client(port, authorization="bearer " + "kéy".encode().decode("latin-1"))
        assert right.get("/v1/models").status == 200
        assert right.post("/flush_cache", host="example.org").status == 200


def refusal(access: Access, headers: dict[str, str], client: str = "127.0.0.1") -> str | None:
    """Return the error code for an administration route, if it is refused."""
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    one = Exchange({"client": (client, 1), "headers": pairs}, None, None)  # type: ignore[arg-type]
    try:
        access.check(one)
        access.check_admin(one)
    except ApiError as error:
        return error.code
    return None


def test_keys_of_a_file_are_read_again(tmp_path, caplog) -> None:
    """A file that is wrong leaves the keys as they were."""
    path = tmp_path / "keys"
    path.write_text("# clients\n\n one \ntwö\n")
    key_file = KeyFile(path)

    def codes(**others: str) -> list[str | None]:
        access = Access(key_file=key_file, **others)
        keys = ("one", "twö", "three", "# clients", "")
        sent = ({"x-api-key": key} for key in keys)
        return [refusal(access, headers, "10.0.0.7") for headers in sent]

    wrong = "invalid_api_key"
    assert codes() == ["not_local", "not_local", wrong, wrong, wrong]
    assert codes(api_key="three") == [wrong, wrong, None, wrong, wrong]
    assert codes(admin_api_key="one") == [None, wrong, wrong, wrong, wrong]
    path.write_text("three\n")
    key_file.reload()
    assert codes() == [wrong, wrong, "not_local", wrong, wrong]
    for text, reason in (
        ("", f"--api-key-file={path} must have at least one key"),
        ("four\na b", f"--api-key-file={path}, line 2: a key must"),
        ("four\r\nfi\x85ve", "line 2: a key must"),
        ("four\ufeff", "line 1: a key must"),
    ):
        path.write_text(text)
        key_file.reload()
        assert reason in caplog.messages[-1]
        with pytest.raises(ValueError, match=reason):
            KeyFile(path)
    path.unlink()
    key_file.reload()
    assert codes() == [wrong, wrong, "not_local", wrong, wrong]
    assert Access(key_file=key_file).has_keys
    assert not Access().has_keys
    assert "three" not in caplog.text


def test_keys_of_a_file_are_stored_once_as_bytes(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_bytes("\ufeff# clients\r\none\r\ntwö\none\n".encode())
    assert KeyFile(path).keys == (b"one", "twö".encode())


def test_a_key_file_must_be_regular(tmp_path) -> None:
    """A pipe would block the server."""
    for path in (Path("/dev/null"), tmp_path):
        with pytest.raises(ValueError, match=f"--api-key-file: {path} is not a regular file"):
            KeyFile(path)
    with pytest.raises(ValueError, match=f"--api-key-file: {tmp_path / 'keys'} is missing"):
        KeyFile(tmp_path / "keys")


def test_a_signal_reads_the_keys_again() -> None:
    access = Access(key_file=Mock())

    async def main(listener: socket.socket) -> None:
        options = {"lifespan": "off", "ws": "none", "log_config": None}
        config = uvicorn.Config(lambda *_: None, **options)
        config.load()
        server = Server(config, Mock(access=access), 1.0)
        server.lifespan = config.lifespan_class(config)
        await server.startup([listener])
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        access.key_file.reload.assert_called_once_with()
        for one in server.servers:
            one.close()

    with bind("127.0.0.1", 0) as listener:
        asyncio.run(main(listener))


def test_keys_are_rotated_without_a_refused_request(engine, tmp_path, monkeypatch) -> None:
    """Clients change keys while both are valid. A request of the old key outlives it."""
    path = tmp_path / "keys"
    path.write_text("old")
    key_file = KeyFile(path)
    access = Access(key_file=key_file)
    key, answers, is_over = "old", [], threading.Event()
    has_begun, go_on, compute = threading.Event(), threading.Event(), engine.runner.prefill

    def prefill(*arguments, **options):
        has_begun.set()
        assert go_on.wait(20)
        return compute(*arguments, **options)

    def ask_on() -> None:
        while not is_over.is_set():
            sent = key
            status = client.get("/v1/models", x_api_key=sent).status
            answers.append((threading.get_ident(), sent, status))

    def wait_for_answers() -> None:
        """Wait until both clients have sent the current key."""
        before = len(answers)
        wait_for(lambda: len({who for who, sent, _ in answers[before:] if sent == key}) == 2)

    monkeypatch.setattr(engine.runner, "prefill", prefill)
    with running(route(Service(engine, access=access))) as port, ThreadPoolExecutor(2) as pool:
        client = Client(port)
        asked = {"prompt": "x", "max_tokens": 1}
        begun = client.connect("POST", COMPLETIONS, asked, x_api_key="old")
        assert has_begun.wait(20)
        for _ in range(2):
            pool.submit(ask_on)
        try:
            for text, current in (("old", "old"), ("old\nnew", "old"), ("", "new"), ("new", "new")):
                key = current
                path.write_text(text)
                key_file.reload()
                wait_for_answers()
            assert client.get("/v1/models", x_api_key="old").status == 401
        finally:
            is_over.set()
            go_on.set()
        assert {status for _, _, status in answers} == {200}
        assert begun.getresponse().status == 200
        begun.close()


PAGE = {"host": "127.0.0.1:30000", "origin": "http://page.example"}


CROSS = {"host": "127.0.0.1", "sec-fetch-site": "cross-site"}
PRIVATE = {"is_private": True}


@pytest.mark.parametrize(
    ("client", "headers", "expected", "options"),
    [
        ("127.0.0.1", {}, None, {}),
        ("::1", {"host": "localhost:30000"}, None, {}),
        ("10.0.0.7", {"host": "localhost"}, "not_local", {}),
        ("127.0.0.1", {"host": "example.org"}, "unknown_host", {}),
        ("127.0.0.1", {"host": "[::1"}, "unknown_host", {}),
        ("127.0.0.2", {"host": "127.0.0.2:8000"}, None, {}),
        ("127.0.0.1", {"host": "example.org@localhost"}, "unknown_host", {}),
        ("127.0.0.1", {"host": "localhost/example.org"}, "unknown_host", {}),
        ("127.0.0.1", PAGE, "cross_site", {}),
        ("127.0.0.1", PAGE | {"origin": "null"}, "cross_site", {}),
        ("127.0.0.1", PAGE | {"origin": "http://127.0.0.1:30000"}, None, {}),
        ("127.0.0.1", PAGE | {"origin": "http://127.0.0.1:3000"}, "cross_site", {}),
        ("127.0.0.1", CROSS, "cross_site", {}),
        ("127.0.0.1", {"host": "127.0.0.1", "sec-fetch-site": "same-site"}, "cross_site", {}),
        ("127.0.0.1", {"host": "127.0.0.1", "sec-fetch-site": "same-origin"}, None, {}),
        ("127.0.0.1", CROSS | PAGE, None, {"origins": ["http://page.example"]}),
        ("127.0.0.1", CROSS | PAGE, None, {"origins": ["*"]}),
        ("127.0.0.1", {"host": "specjax"}, "unknown_host", PRIVATE),
        ("127.0.0.1", {"host": "specjax"}, None, PRIVATE | {"allowed_hosts": ["specjax"]}),
    ],
)
def test_local_callers(client, headers, expected, options) -> None:
    assert refusal(Access(**options), headers, client) == expected


@pytest.mark.slow
def test_a_private_server_is_not_for_pages_of_other_sites(engine) -> None:
    private = Service(engine, access=Access(is_private=True))
    with running(route(private)) as port:
        client = Client(port)
        for method, path in (*PATHS, ("GET", "/flush_cache")):
            for foreign in ({"origin": "http://page.example"}, {"sec_fetch_site": "cross-site"}):
                assert client.ask(method, path, b"{}", **foreign).error["code"] == "cross_site"
            assert client.ask(method, path, b"{}", host="evil.example").status == 403
        for path in ("/", "/health", "/metrics"):
            assert client.get(path, host="evil.example", origin="http://page.example").status == 200
        assert client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status == 200


def test_administrators_have_a_key_of_their_own(engine) -> None:
    body, changes = {"abort_all": True}, ("/flush_cache", "/update_weights_from_disk")
    for api_key in ("user", None):
        with running(make_app(engine, api_key=api_key, admin_api_key="admin")) as port:
            user, admin = Client(port, x_api_key="user"), Client(port, x_api_key="admin")
            assert user.get("/v1/models").status == admin.get("/v1/models").status == 200
            for path in changes:
                assert user.post(path).status == 401
            assert user.post("/abort_request", body).status == 401
            assert user.post("/abort_request", {"rid": "none"}).status == 200
            assert admin.post("/abort_request", body).status == 200
            assert admin.post("/flush_cache").status == 200


def test_pages_from_elsewhere_change_nothing(engine, client) -> None:
    foreign = {"origin": "http://example.org"}
    for path, body in (("/flush_cache", {}), ("/abort_request", {"abort_all": True})):
        answer = client.post(path, body, **foreign)
        assert answer.status == 403
        assert answer.error["type"] == "permission_error"
    assert client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **foreign).status == 200


def test_origins_are_allowed_by_name(engine, client) -> None:
    origin = "http://page.example"
    asked = {"origin": origin, "access_control_request_method": "POST"}
    assert "access-control-allow-origin" not in client.get("/health", **asked).headers
    with running(make_app(engine, cors_allow_origins=[origin])) as port:
        allowing = Client(port)
        for answer in (
            allowing.get("/health", **asked),
            allowing.ask("OPTIONS", COMPLETIONS, **asked),
        ):
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == origin
        other = allowing.get("/health", origin="http://other.example")
        assert "access-control-allow-origin" not in other.headers


def test_limits_of_bodies_and_of_requests(engine) -> None:
    with running(make_app(engine, max_requests=3, max_body_bytes=1000)) as port:
        client = Client(port)
        for size in (2000, 3_000_000):
            answer = client.post(COMPLETIONS, b"x" * size)
            assert answer.status == 413
            assert "1000" in answer.error["message"]
        packed = client.post(COMPLETIONS, b"x", content_encoding="gzip")
        assert packed.status == 415
        many = client.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2})
        assert many.status == 400
        connections = [client.connect("POST", COMPLETIONS, LONG) for _ in range(3)]
        wait_for(lambda: client.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 2)
        answer = client.post(COMPLETIONS, LONG)
        assert answer.status == 429
        assert answer.headers["retry-after"] == "1"
        for connection in connections:
            assert connection.getresponse().status == 200
            connection.close()
        assert client.post(COMPLETIONS, LONG).status == 200
    for name in ("max_requests", "max_body_bytes"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            make_app(engine, **{name: 0})


@pytest.mark.slow
def test_a_full_queue_is_reported(files) -> None:
    with files.small(max_waiting_requests=0) as engine, running(make_app(engine)) as port:
        client = Client(port)
        for is_stream in (False, True):
            answer = client.post(COMPLETIONS, LONG | {"prompt": ["a", "b"], "stream": is_stream})
            assert answer.status == 429
            assert answer.error["code"] == "queue_full"


def test_a_body_must_arrive_in_time(client, monkeypatch) -> None:
    monkeypatch.setattr(exchange, "READ_SECONDS", 0.05)
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_weights_are_replaced_one_after_the_other(engine, client, monkeypatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def update(*paths: str | None) -> None:
        begun.set()
        goes_on.wait(20)

    monkeypatch.setattr(engine, "update_weights_from_disk", update)
    route, body = "/update_weights_from_disk", {"model_path": "/"}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, route, body)
        begun.wait(20)
        assert client.post(route, body).status == 409
        goes_on.set()
        assert first.result().status == 200
    assert client.post(route, body).status == 200


@pytest.mark.parametrize("key", ["", " ", "key\n", "two words", "\0"])
def test_malformed_keys_are_refused(engine, key) -> None:
    for name in ("api_key", "admin_api_key"):
        with pytest.raises(ValueError, match=f"{name} of {len(key)} characters"):
            make_app(engine, **{name: key})

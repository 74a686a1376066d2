"""Run the server application in a thread, with a client from the standard library."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from specjax import Engine


@dataclass
class Answer:
    """A complete HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Return the events of a stream and check that it ends with ``[DONE]``."""
        assert self.headers["content-type"].startswith("text/event-stream")
        *chunks, last, nothing = self.body.decode().split("\n\n")
        assert (last, nothing) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in chunks]

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]


class Client:
    """Client of one server, with a new connection for each request."""

    def __init__(self, port: int, **headers: str) -> None:
        self.port, self.headers = port, headers

    def connect(self, method: str, path: str, body: Any = None, **headers: str) -> HTTPConnection:
        """Send a request and return its connection; ``body`` is bytes or a JSON value."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in (self.headers | headers).items()}
        try:
            connection.request(method, path, data, named)
        except OSError:
            connection.close()
            raise
        return connection

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        connection = self.connect(method, path, body, **headers)
        try:
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return self.ask("POST", path, {} if body is None else body, **headers)

    def stream(self, path: str, body: dict[str, Any], **headers: str) -> list[Any]:
        """Request a stream and return its events."""
        answer = self.post(path, body | {"stream": True}, **headers)
        assert answer.status == 200, answer.body
        return answer.events()


@contextmanager
def serve(engine: Engine, **options: Any) -> Iterator[Client]:
    """Serve an engine in a thread on a free port; ``options`` go to ``make_app``."""
    from specjax.server import make_app  # only this function needs the extra "serve"

    with running(make_app(engine, **options)) as port:
        yield Client(port)


@contextmanager
def running(app: Any, http: Any = None) -> Iterator[int]:
    """Serve an application in a thread on a free port."""
    import uvicorn

    from specjax.server.process import LimitedProtocol

    settings: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off"}
    config = uvicorn.Config(app, port=0, http=http or LimitedProtocol, **settings)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="httpd", daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)

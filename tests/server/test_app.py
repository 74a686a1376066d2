"""Routes that tell something, and who may use which."""

from concurrent.futures import Future

import pytest

from specjax import Engine
from specjax.server import make_app

from .client import Client, running
from .conftest import MODEL


def test_models(engine, client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == MODEL
    assert card["root"] == engine.target.name
    assert card["max_model_len"] == engine.context_length
    assert client.get(f"/v1/models/{MODEL}").json() == card
    assert client.get("/v1/models/other/one").status == 404


@pytest.mark.parametrize(
    "path", ["/health", "/health_generate", "/get_server_info", "/server_info"]
)
def test_an_engine_that_runs_is_healthy(client, path) -> None:
    assert client.get(path).status == 200


def test_server_info_is_the_engines(engine, client) -> None:
    info = client.get("/get_server_info").json()
    assert set(engine.get_server_info()) <= set(info)
    assert info["internal_states"][0]["avg_spec_accept_length"] >= 0
    assert client.get("/get_model_info").json()["model_path"] == engine.target.name


def test_loads(client) -> None:
    (load,) = client.get("/v1/loads?include=core").json()["loads"]
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == 0
    assert load["max_running_requests"] == 2


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/x", 404), ("PUT", "/health", 405)]
)
def test_unknown_routes_have_openais_shape(client, method, path, status) -> None:
    answer = client.ask(method, path)
    assert answer.status == status
    assert path in answer.error["message"]


def test_until_the_engine_is_there_everything_is_unavailable(engine) -> None:
    future: Future[Engine] = Future()
    with running(make_app(future)) as port:
        client = Client(port)
        for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/generate")):
            answer = client.ask(method, path, {} if method == "POST" else None)
            assert answer.status == 503
            assert answer.error["code"] == "starting"
            assert answer.headers["retry-after"] == "1"
        future.set_result(engine)
        assert client.get("/health").status == 200
    broken: Future[Engine] = Future()
    broken.set_exception(ValueError("no weights"))
    with running(make_app(broken)) as port:
        answer = Client(port).get("/health")
        assert answer.status == 503
        assert "weights" not in answer.error["message"]

"""Routes that return information, and access to them."""

import asyncio
import json
import re
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

from specjax import Engine
from specjax.engine.names import ROUTES
from specjax.scheduling.loop import EngineFault
from specjax.server import app, make_app
from specjax.server.scrape import ServerMetrics
from specjax.server.service import Service
from specjax.testing import Client, running

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


def test_an_engine_without_kv_events_has_no_source(client) -> None:
    assert client.get("/kv_event_sources").json() == []


def test_server_info_is_the_engines(engine, client) -> None:
    info = client.get("/get_server_info").json()
    assert set(engine.get_server_info()) <= set(info)
    assert 1e-3 * info["max_prefill_stall_ms"] == engine._scheduler._max_stall == 0.03
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


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/embeddings", "only text is generated"),
        ("/chat/completions", "use /v1/chat/completions: the base URL must end in /v1"),
        ("/v1/v1/messages", "the base URL has /v1 twice"),
        ("/v1/responses/resp_1", "responses are not stored; send the whole input to /v1/responses"),
        ("/v1/messages/batches", "send each request to /v1/messages"),
        ("/sleep/", "weights and KV stay on the device"),
    ],
)
def test_routes_of_other_servers_are_answered(client, path, instead) -> None:
    for method in ("GET", "POST"):
        error = client.ask(method, path).error
        assert error["code"] == "unknown_route"
        assert error["message"] == f"Not found: {method} {path}; {instead}"


def test_replaced_routes_do_not_exist(engine) -> None:
    """And the routes that are named do."""
    paths = {route.path for route in make_app(engine).routes}
    assert not paths & set(ROUTES)
    named = re.findall(r"(?<!\w)/[\w/]+", " ".join(ROUTES.values()))
    assert set(named) <= paths
    assert {f"/v1{path}" for path in app._OPENAI} <= paths


def test_everything_is_unavailable_until_the_engine_is_ready(engine) -> None:
    future: Future[Engine] = Future()
    with running(make_app(future)) as port:
        client = Client(port)
        for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/generate")):
            answer = client.ask(method, path, {} if method == "POST" else None)
            assert answer.status == 503
            assert answer.error["code"] == "starting"
            assert answer.headers["retry-after"] == "1"
        assert states(client) == ["starting"]
        future.set_result(engine)
        assert client.get("/health").status == 200
        assert states(client) == ["ready"]
    broken: Future[Engine] = Future()
    broken.set_exception(ValueError("no weights"))
    with running(make_app(broken)) as port:
        answer = Client(port).get("/health")
        assert states(Client(port)) == ["engine_failed"]
        assert answer.status == 503
        assert "weights" not in answer.error["message"]


def scraped(client: Client) -> dict[tuple[str, str], Any]:
    """Metric samples by name and by position or reason."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.body.decode())
    return {
        (
            sample.name,
            sample.labels.get("position", sample.labels.get("finished_reason", "")),
        ): sample
        for family in families
        for sample in family.samples
    }


def test_the_dashboard_asks_for_metrics_that_are_there(client) -> None:
    folder = Path(__file__).parents[2] / "examples" / "deploy"
    dashboard = json.loads((folder / "grafana" / "specjax.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    selected = '{instance=~"$instance", model_name=~"$model"}'
    for query in queries:
        assert query.count("specjax:") == query.count(selected) > 0
    source, *variables = dashboard["templating"]["list"]
    assert [x["name"] for x in variables] == ["instance", "model"]
    assert source["type"] == "datasource"
    sources = {x["datasource"]["uid"] for x in (*dashboard["panels"], *variables)}
    assert sources == {f"${{{source['name']}}}"}
    queries += [x["query"] for x in variables]
    queries.append((folder / "rules.yaml").read_text("utf-8"))
    names = r"(?:specjax:|process_)\w+"
    asked = {name for query in queries for name in re.findall(names, query)}
    assert len(asked) > 10
    client.get("/health")  # the first response to be counted
    assert asked <= {name for name, _ in scraped(client)}


def test_alerts_count_no_probes_and_notice_a_server_that_is_gone() -> None:
    folder = Path(__file__).parents[2] / "examples" / "deploy"
    rules = (folder / "rules.yaml").read_text("utf-8")
    (probes,) = re.findall(r'http_responses_total\{.*endpoint!~"([^"]+)"', rules)
    paths = [entry.path for entry in app.route(Mock(access=Mock(origins=[]))).routes]
    excluded = {path for path in paths if re.fullmatch(probes, path)}
    assert excluded == {"/health", "/health_generate", "/ping"}
    (job,) = re.findall(r"job_name: (\w+)", (folder / "prometheus.yaml").read_text("utf-8"))
    # the series of one server have equal labels, in whatever state it is
    (ready,) = re.findall(r"expr: (.*ready.*)", rules)
    assert ready.startswith("min by (job, instance) (specjax:server_state{")
    assert ready.endswith(f' or up{{job="{job}"}}) == 0')
    assert set(re.findall(r'job="(\w+)"', rules)) == {job}


@pytest.mark.parametrize("error", [None, ValueError("closed"), EngineFault("lost")])
def test_a_server_that_stops_has_metrics_of_its_engine(engine, monkeypatch, error) -> None:
    service = Service(engine)
    service.stop()
    if error is not None:
        monkeypatch.setattr(engine, "check_health", Mock(side_effect=error))
    families = {family.name: family for family in ServerMetrics(service).collect()}
    assert ("vllm:num_requests_running" in families) == (error is None)
    (state,) = (x for x in families["specjax:server_state"].samples if x.value)
    assert state.labels["state"] == "stopping"


def test_responses_are_counted_by_route_and_status(client) -> None:
    def responses() -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(client.get("/metrics").body.decode())
        counted = next(x for x in families if x.name == "specjax:http_responses")
        order = ("endpoint", "method", "status_code")
        return {tuple(x.labels[name] for name in order): x.value for x in counted.samples}

    before = responses()
    client.get("/v1/models/other")
    client.post("/generate", {"text": 3})
    client.ask("PATCH", "/generate", None)
    client.get("/no/such/route")
    after = responses()
    keys = [
        ("/v1/models/{name:path}", "GET", "404"),
        ("/generate", "POST", "400"),
        ("/generate", "other", "405"),
        ("unknown", "other", "404"),
        ("/metrics", "GET", "200"),
    ]
    assert {key: count - before.get(key, 0) for key, count in after.items()} == {
        key: float(key in keys) for key in after
    }
    assert set(keys) <= set(after)


def test_a_cancelled_request_is_counted_like_one_whose_client_has_gone() -> None:
    service = Mock(responses=Counter())

    async def cancel() -> None:
        handler = AsyncMock(side_effect=asyncio.CancelledError)
        endpoint = app.Endpoint(service, "/x", handler, ["GET"])
        with pytest.raises(asyncio.CancelledError):
            await endpoint({"method": "GET", "path": "/x", "headers": []}, Mock(), Mock())

    asyncio.run(cancel())
    assert service.responses == {("/x", "GET", 499): 1}


def states(client: Client) -> list[str]:
    families = text_string_to_metric_families(client.get("/metrics").body.decode())
    (state,) = [x for x in families if x.name == "specjax:server_state"]
    assert len(state.samples) == 4
    return [x.labels["state"] for x in state.samples if x.value == 1]


def test_metrics_have_the_names_of_vllm(engine, client) -> None:
    before = engine.metrics.snapshot()
    client.post("/v1/completions", {"prompt": "hello", "max_tokens": 30, "temperature": 0})
    totals, samples = engine.metrics.snapshot(), scraped(client)
    assert totals.num_verifies > before.num_verifies
    name = "vllm:spec_decode_num_"
    assert samples[f"{name}drafts_total", ""].value == totals.num_verifies
    assert samples[f"{name}draft_tokens_total", ""].value == totals.num_proposed_drafts
    assert samples[f"{name}accepted_tokens_total", ""].value == totals.num_accepted_drafts
    counts = [samples[f"{name}accepted_tokens_per_pos_total", str(i)].value for i in range(3)]
    assert sum(counts) == totals.num_accepted_drafts
    assert counts == sorted(counts, reverse=True)
    assert samples["vllm:num_requests_running", ""].value == 0
    assert samples["vllm:num_requests_waiting", ""].value == 0
    assert samples["vllm:num_requests_waiting", ""].labels == {"model_name": MODEL}
    assert 0 <= samples["vllm:kv_cache_usage_perc", ""].value <= 1
    sizes = samples["vllm:cache_config_info", ""].labels
    assert int(sizes["block_size"]) * int(sizes["num_gpu_blocks"]) == totals.max_total_tokens
    assert samples["specjax:spec_accept_length", ""].value == totals.accept_length
    of_server = (
        "process_",
        *(f"specjax:{name}" for name in ("http", "server", "build", "ignored")),
    )
    of_engine = [x for x in samples.values() if not x.name.startswith(of_server)]
    assert len(of_engine) > 30
    assert {sample.labels["model_name"] for sample in of_engine} == {MODEL}
    for name in (
        "time_to_first_token_seconds_bucket inter_token_latency_seconds_sum "
        "e2e_request_latency_seconds_count prompt_tokens_total generation_tokens_total "
        "request_prompt_tokens_bucket request_generation_tokens_sum"
    ).split():
        assert (f"vllm:{name}", "") in samples
    for reason in ("stop", "length", "abort"):
        assert ("vllm:request_success_total", reason) in samples


def test_it_mounts_below_another_application(engine) -> None:
    with running(Starlette(routes=[Mount("/llm", make_app(engine))])) as port:
        client = Client(port)
        assert client.get("/llm/health").status == 200
        asked = {"prompt": "hello", "max_tokens": 4}
        assert client.post("/llm/v1/completions", asked).status == 200
        assert client.get("/llm/other").error["code"] == "unknown_route"

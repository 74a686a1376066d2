"""SGLang's native routes: ``/generate`` and ``/abort_request``."""

import json
import threading
import time
from contextlib import closing
from http.client import HTTPConnection
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest

from specjax.server.app import route
from specjax.server.service import Access, Service
from specjax.testing import Client, is_idle, running

from .bodies import ENGINE_GREEDY

ROUTE = "/generate"
TIMES = ("e2e_latency", "queue_time", "time_to_first_token", "id", "cached_tokens")


def plain(result: dict[str, Any]) -> dict[str, Any]:
    meta = {name: value for name, value in result["meta_info"].items() if name not in TIMES}
    return result | {"meta_info": meta}


@pytest.mark.parametrize(
    "inputs",
    [{"text": "hello"}, {"input_ids": [4, 5]}, {"text": ["a", "b"]}, {"input_ids": [[4], [5, 6]]}],
)
def test_results_are_the_engines(engine, client, inputs) -> None:
    given = {"prompt" if name == "text" else name: value for name, value in inputs.items()}
    expected = engine.generate(sampling_params=ENGINE_GREEDY, **given)
    found = client.post(ROUTE, inputs | {"sampling_params": ENGINE_GREEDY}).json()
    if isinstance(expected, dict):
        assert plain(found) == plain(expected)
    else:
        assert list(map(plain, found)) == list(map(plain, expected))


def test_a_connection_is_a_caller(engine, client, monkeypatch) -> None:
    callers, run = [], engine.async_run

    async def record(call):
        callers.append(call.caller)
        return await run(call)

    monkeypatch.setattr(engine, "async_run", record)
    body = json.dumps({"input_ids": [4], "sampling_params": ENGINE_GREEDY | {"n": 2}})
    addresses = []
    for _ in range(2):
        with closing(HTTPConnection("127.0.0.1", client.port)) as connection:
            for _ in range(2):
                connection.request("POST", ROUTE, body)
                addresses.append(connection.sock.getsockname())
                assert connection.getresponse().read()
    assert callers == addresses
    assert len(set(callers)) == 2


def test_one_of_several_keys_is_a_caller(engine, monkeypatch) -> None:
    callers, run = [], engine.async_run

    async def record(call):
        callers.append(call.caller)
        return await run(call)

    monkeypatch.setattr(engine, "async_run", record)
    body = {"input_ids": [4], "sampling_params": {"max_new_tokens": 1}}
    file = Mock(keys=(b"one", b"two"))
    with running(route(Service(engine, access=Access(key_file=file, admin_api_key="x")))) as port:
        client = Client(port)
        for key in ("one", "two", "one"):
            assert client.post(ROUTE, body, x_api_key=key).status == 200
        assert client.post(ROUTE, body, authorization="bearer  two ").status == 200
        # all clients have the same key
        file.keys = (b"one",)
        for key in ("one", "one", "x"):
            assert client.post(ROUTE, body, x_api_key=key).status == 200
    named = callers[:4]
    assert [named.index(caller) for caller in named] == [0, 1, 0, 1]
    assert len(set(callers)) == 5
    assert "one" not in repr(callers)


def test_fields_of_gateways_and_benchmarks_change_nothing(engine, client) -> None:
    """Accepts the defaults of SGLang's parameters, router and bench_serving, and a model name."""
    neutral = {"skip_special_tokens": True, "no_stop_trim": False, "regex": None, "stop": None}
    added = {"model": engine.target.name, "lora_path": None, "image_data": [], "priority": 0}
    names = (
        "return_hidden_states background no_logs return_bytes return_entropy stream "
        "return_text_in_logprobs return_routed_experts"
    ).split()
    body = {"text": "hello", "sampling_params": ENGINE_GREEDY | neutral, "log_metrics": True}
    body |= added | dict.fromkeys(names, False)
    expected = engine.generate("hello", ENGINE_GREEDY)
    assert plain(client.post(ROUTE, body).json()) == plain(expected)
    assert plain(client.post(ROUTE, body | {"model": None}).json()) == plain(expected)
    assert client.post(ROUTE, body | {"model": "another"}).status == 404


def test_streams_are_cumulative(engine, client) -> None:
    expected = engine.generate("hello", ENGINE_GREEDY)
    parts = client.stream(ROUTE, {"text": "hello", "sampling_params": ENGINE_GREEDY})
    for before, after in pairwise(parts):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert parts[-1]["text"] == expected["text"]
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
    batch = client.stream(ROUTE, {"text": ["a", "b"], "sampling_params": ENGINE_GREEDY})
    last = {part["index"]: part["text"] for part in batch}
    assert [last[i] for i in range(2)] == [
        one["text"] for one in engine.generate(["a", "b"], ENGINE_GREEDY)
    ]


def test_log_probabilities_may_name_texts(engine, client) -> None:
    asked = {"text": "hello", "sampling_params": ENGINE_GREEDY, "return_logprob": True}
    asked |= {"top_logprobs_num": 1, "logprob_start_len": 0}
    meta = client.post(ROUTE, asked).json()["meta_info"]
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_top_logprobs"][0] is None
    assert [token for _, token, _ in meta["input_token_logprobs"]] == engine.tokenizer.encode(
        "hello"
    )
    assert {text for _, _, text in meta["output_token_logprobs"]} == {None}
    meta = client.post(ROUTE, asked | {"return_text_in_logprobs": True}).json()["meta_info"]
    assert [text for _, _, text in meta["input_token_logprobs"]] == list("hello")


def test_an_id_aborts_its_request(engine, client) -> None:
    found: list[Any] = []

    def ask() -> None:
        params = ENGINE_GREEDY | {"max_new_tokens": 120}
        found.extend(client.stream(ROUTE, {"text": "x", "rid": "one", "sampling_params": params}))

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():  # until the request can be aborted
        assert client.post("/abort_request", {"rid": "one"}).status == 200
        time.sleep(0.001)
    assert found[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert client.post("/abort_request", {"abort_all": True}).status == 200
    assert client.post("/abort_request", {}).status == 400
    assert is_idle(engine)


def test_the_cache_is_flushed(engine, client) -> None:
    engine.generate("a prompt of many pages", ENGINE_GREEDY)
    assert engine.debug_state()["pages_cached"] > 0
    assert client.get("/flush_cache").status == 200
    assert engine.debug_state()["pages_cached"] == 0


def test_weights_come_from_disk(engine, client, files, tmp_path) -> None:
    route = "/update_weights_from_disk"
    before = engine.generate("hello", ENGINE_GREEDY)["text"]
    answer = client.post(route, {"model_path": str(files.target)})
    assert (answer.status, answer.json()["success"]) == (200, True)
    assert engine.generate("hello", ENGINE_GREEDY)["text"] == before
    for name, path in (("model_path", str(tmp_path / "none")), ("draft_path", "owner/name")):
        answer = client.post(route, {name: path})
        assert (answer.status, answer.error["param"]) == (400, name)
        assert "does not exist on the server" in answer.error["message"]
    assert client.post(route, {}).status == 400
    assert client.get("/health").status == 200


# tokens


def test_texts_become_tokens_and_texts_again(engine, client) -> None:
    body = client.post("/tokenize", {"model": "tiny", "prompt": "hello"}).json()
    ids = engine.tokenizer.encode("hello")
    assert body["tokens"] == ids
    assert body["count"] == 5
    assert body["max_model_len"] == engine.context_length
    texts = client.post("/detokenize", {"model": "tiny", "tokens": ids}).json()
    assert texts["prompt"] == texts["text"] == "hello"
    several = client.post("/tokenize", {"prompt": ["a", "bc"], "return_token_strs": True}).json()
    assert several["count"] == [1, 2]
    assert several["token_strs"] == [["a"], ["b", "c"]]
    assert client.post("/detokenize", {"tokens": several["tokens"]}).json()["text"] == ["a", "bc"]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert client.post("/tokenize", chat).json()["count"] == len("<user>hi<assistant>")

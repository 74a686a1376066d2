"""openai-python returns the engine's answers and raises its own exceptions."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specjax.testing import Client

from ..support.waiting import wait_for
from .conftest import KEY, MESSAGES, MODEL, PROMPT, SAMPLING


@pytest.fixture(scope="module")
def found(run_program, given) -> Any:
    return run_program("openai_calls", messages=MESSAGES, prompt=PROMPT, **given)


@pytest.fixture(scope="module")
def said(engine) -> Any:
    return engine.generate(messages=MESSAGES, sampling_params=SAMPLING, return_logprob=True)


def values(meta: dict[str, Any]) -> list[float]:
    return [value for value, *_ in meta["output_token_logprobs"]]


def test_the_block_of_the_documents_runs(run_program, given) -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    (source,) = re.findall(r"```python\n(from openai .*?)```", page, re.DOTALL)
    for documented, here in (("http://127.0.0.1:30000", given["address"]), ('"none"', repr(KEY))):
        assert documented in source
        source = source.replace(documented, here)
    (choice,) = run_program("openai_block", source=source)["choices"]
    assert choice["message"]["content"]


def test_models(found) -> None:
    listed, retrieved = found["models"]
    assert listed == retrieved
    assert (listed["id"], listed["root"]) == (MODEL, "smollm2-135m")


def test_chat(found, said) -> None:
    (choice,) = found["chat"]["choices"]
    assert choice["message"]["content"] == said["text"]
    assert choice["finish_reason"] == said["meta_info"]["finish_reason"]["type"]
    entries = choice["logprobs"]["content"]
    assert [one["logprob"] for one in entries] == pytest.approx(values(said["meta_info"]), abs=1e-4)
    assert "".join(one["token"] for one in entries).startswith(said["text"])
    assert {len(one["top_logprobs"]) for one in entries} == {2}
    usage = found["chat"]["usage"]
    assert usage["prompt_tokens"] == said["meta_info"]["prompt_tokens"]
    assert usage["completion_tokens"] == said["meta_info"]["completion_tokens"]


def test_chat_streams(found, said) -> None:
    *chunks, last = found["chat_stream"]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(one["delta"]["content"] or "" for one in choices) == said["text"]
    entries = [entry for one in choices if one["logprobs"] for entry in one["logprobs"]["content"]]
    assert [one["logprob"] for one in entries] == pytest.approx(values(said["meta_info"]), abs=1e-4)
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == found["chat"]["usage"]["total_tokens"]


def test_chunk_collector_of_the_library(found, said) -> None:
    deltas, final = found["chat_helper"]
    (choice,) = final["choices"]
    assert "".join(deltas) == choice["message"]["content"] == said["text"].split(" ")[0]
    assert choice["finish_reason"] == "stop"


def test_samples_depend_on_their_seeds(engine, found) -> None:
    whole, streamed = found["samples"]
    expected = engine.generate(messages=MESSAGES, sampling_params=SAMPLING | {"n": 2})
    assert whole == streamed == [one["text"] for one in expected]
    assert whole[0] != whole[1]


def test_completions(engine, found) -> None:
    said = engine.generate(PROMPT, SAMPLING, return_logprob=True, logprob_start_len=0)
    (choice,) = found["completion"]["choices"]
    assert choice["text"] == PROMPT + said["text"]
    first, *rest = choice["logprobs"]["token_logprobs"]
    meta = said["meta_info"]
    scored = [value for value, *_ in meta["input_token_logprobs"]][1:]
    assert first is None
    assert rest == pytest.approx(scored + values(meta), abs=1e-4)
    *chunks, last = found["completion_stream"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said["text"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    streamed = [value for part in parts for value in part["token_logprobs"]]
    assert streamed == pytest.approx(values(meta), abs=1e-4)
    assert last["usage"]["completion_tokens"] == meta["completion_tokens"]


def test_batches(engine, found) -> None:
    expected = engine.generate([PROMPT, "One, two,"], SAMPLING | {"n": 2})
    assert found["batch"] == [one["text"] for one in expected]


def test_parallel_requests(engine, found) -> None:
    seeds = range(len(found["at_once"]))
    assert len(seeds) > engine.runner.config.num_slots
    params = [SAMPLING | {"sampling_seed": seed} for seed in seeds]
    expected = engine.generate([PROMPT] * len(seeds), params)
    assert found["at_once"] == [one["text"] for one in expected]


def test_stop_strings(found) -> None:
    whole, word, cut, reason = found["stop"]
    assert cut == whole[: whole.index(word)]
    assert reason == "stop"


def test_extra_fields(engine, found) -> None:
    params = SAMPLING | {"temperature": 0, "ignore_eos": True}
    said = engine.generate(messages=MESSAGES, sampling_params=params)
    assert found["extensions"] == said["text"]


def test_structured_output(found) -> None:
    fruit = found["parsed"]
    assert set(fruit) == {"name", "is_red", "count"}
    assert 1 <= fruit["count"] <= 9


def test_tool_calls(found) -> None:
    whole, collected, after = found["tool_calls"]
    calls = []
    for one in (whole, collected):
        assert one["finish_reason"] == "tool_calls"
        (call,) = one["message"]["tool_calls"]
        calls.append(call["function"] | {"parsed_arguments": None})
    assert calls[0] == calls[1]
    assert calls[0]["name"] == "get_weather"
    assert set(json.loads(calls[0]["arguments"])) == {"city"}
    assert after["message"]["content"]


def test_errors_raise_the_librarys_exceptions(found) -> None:
    assert found["errors"] == {
        "value": ["BadRequestError", 400, None, "temperature"],
        "type": ["BadRequestError", 400, None, "max_tokens"],
        "unknown": ["BadRequestError", 400, "unknown_field", "max_tokns"],
        "tools": ["BadRequestError", 400, None, "tools"],
        "length": ["BadRequestError", 400, "context_length_exceeded", "messages"],
        "model": ["NotFoundError", 404, "model_not_found", "model"],
        "route": ["NotFoundError", 404, "unknown_route", None],
        "key": ["AuthenticationError", 401, "invalid_api_key", None],
        "stream": ["BadRequestError", 400, None, "top_p"],
    }


def test_leaving_aborts_the_request(found, server: Client) -> None:
    assert found["leaving"] == ["APITimeoutError", "Completion", "CancelledError"]
    wait_for(lambda: not server.get("/v1/loads").json()["loads"][0]["num_running_reqs"])
    lines = server.get("/metrics").body.decode().splitlines()
    aborted = [line for line in lines if line.startswith("specjax:num_aborted_requests_total{")]
    assert [float(line.split()[-1]) for line in aborted] == [3]

"""What clients are told where they err: a status, and OpenAI's error object."""

import json
from typing import Any

import pytest

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} | more]}


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": 5}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": 10**400}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
        (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**64}, "seed"),
        (COMPLETIONS, {"prompt": "a", "seed": -(2**63) - 1}, "seed"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
        (COMPLETIONS, {"prompt": "a", "n": 129}, "n"),
        (COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a", 5]}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [10**9]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "echo": 1}, "echo"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options"),
        (
            COMPLETIONS,
            {"prompt": "a", "stream": True, "stream_options": {"x": 1}},
            "stream_options",
        ),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "speculative": 1}, "speculative"),
        (COMPLETIONS, {"prompt": "a", "max_token": 1}, "max_token"),
        (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature"),
        (COMPLETIONS, {"prompt": "a", "respons_format": 1}, "respons_format"),
        (COMPLETIONS, {"prompt": "a", "mirostat": 2}, "mirostat"),
        (COMPLETIONS, {"prompt": "a" * 500}, "prompt"),
        (COMPLETIONS, {"prompt": [10**9]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, None),
        (COMPLETIONS, {"prompt": "a", "model": 5}, "model"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": ["hello"]}, "messages[0]"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages[0]"),
        (CHAT, said(5), "messages[0]"),
        (CHAT, said([IMAGE]), "messages[0]"),
        (CHAT, said(["a"]), "messages[0]"),
        (CHAT, said("a", name=5), "messages[0]"),
        (CHAT, said("a", tool_calls=["f"]), "messages[0]"),
        (CHAT, said("a", tool_calls=[{"function": "f"}]), "messages[0]"),
        (CHAT, HELLO | {"tools": ["f"], "tool_choice": "none"}, "tools"),
        (CHAT, HELLO | {"continue_final_message": True}, "continue_final_message"),
        (CHAT, said("a" * 500), "messages"),
        (CHAT, HELLO | {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        (CHAT, HELLO | {"max_completion_tokens": "a"}, "max_tokens"),
        (CHAT, HELLO | {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, HELLO | {"logprobs": 1}, "logprobs"),
        (CHAT, HELLO | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, HELLO | {"chat_template_kwargs": []}, "chat_template_kwargs"),
        (CHAT, HELLO | {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        (CHAT, HELLO | {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, HELLO | {"tools": [TOOL]}, "tools"),
        (CHAT, HELLO | {"tool_choice": "required"}, "tool_choice"),
        (CHAT, HELLO | {"functions": [{}]}, "functions"),
        (CHAT, HELLO | {"audio": {}}, "audio"),
        (CHAT, HELLO | {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, HELLO | {"guided_json": "{}"}, "guided_json"),
        (GENERATE, {}, "text"),
        (GENERATE, {"text": "a", "input_ids": [1]}, "text"),
        (GENERATE, {"text": []}, None),
        (GENERATE, {"text": "a", "sampling_params": 5}, None),
        (GENERATE, {"text": "a", "sampling_params": {"max_tokens": 5}}, None),
        (GENERATE, {"text": "a", "sampling_params": {"regex": "a"}}, None),
        (GENERATE, {"text": ["a", "b"], "rid": "one"}, None),
        (GENERATE, {"text": "a", "top_logprobs_num": 3}, None),
        (GENERATE, {"text": "a", "image_data": "x"}, "image_data"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, None),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}, "tokens"),
        ("/detokenize", {"tokens": [[1] * (2**20 + 1)]}, "tokens"),
    ],
)
def test_bad_requests_name_the_field(client, route, body, param) -> None:
    answer = client.post(route, body)
    assert answer.status == 400, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param, answer.error
    assert answer.error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT, GENERATE, "/tokenize"])
def test_bodies_that_are_no_requests(client, route, body) -> None:
    answer = client.ask("POST", route, body)
    assert answer.status == 400
    assert len(answer.body) < 5000
    assert answer.error["type"] == "invalid_request_error"


def test_deep_values_are_refused(client) -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = {"a": deep}
    for body in ({"messages": [{"role": "user", "content": deep}]}, HELLO | {"metadata": deep}):
        assert client.post(CHAT, body).status in (200, 400)
    kwargs = HELLO | {"chat_template_kwargs": {"deep": deep}, "max_tokens": 1}
    assert client.post(CHAT, kwargs).status in (200, 400)
    assert client.get("/health").status == 200


def test_an_unknown_model_is_not_found(engine, client) -> None:
    for route, body in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, HELLO),
        ("/tokenize", {"prompt": "a"}),
    ):
        answer = client.post(route, body | {"model": "gpt-é"})
        assert answer.status == 404
        assert answer.error["code"] == "model_not_found"
    asked = {"prompt": "a", "max_tokens": 1, "model": engine.target.name}
    assert client.post(COMPLETIONS, asked).json()["model"] == engine.target.name


def test_an_over_long_prompt_has_openais_code(client) -> None:
    for route, body in ((COMPLETIONS, {"prompt": "a" * 500}), (CHAT, said("a" * 500))):
        error = client.post(route, body).error
        assert error["code"] == "context_length_exceeded"
        # the words that LiteLLM looks for
        assert "This model's maximum context length is" in error["message"]


def test_what_asks_for_nothing_is_taken(client) -> None:
    neutral = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "logit_bias": None,
        "stop": None,
        "seed": None,
        "top_logprobs": None,
        "max_tokens": 1,
        "nothing_known": None,
    }
    assert client.post(CHAT, HELLO | neutral).status == 200


def test_long_values_are_not_sent_back(client) -> None:
    answer = client.post(COMPLETIONS, {"prompt": "a", "model": "m" * 100_000})
    assert answer.status == 404
    assert len(answer.body) < 2000


def test_a_stream_that_is_refused_has_a_status(client) -> None:
    answer = client.post(COMPLETIONS, {"prompt": "", "stream": True})
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["message"]


def test_an_id_in_use_is_refused(engine, client) -> None:
    stream = engine.generate(
        "x", {"max_new_tokens": 100, "ignore_eos": True}, rid="used", stream=True
    )
    next(stream)
    try:
        for is_stream in (True, False):
            answer = client.post(GENERATE, {"text": "a", "rid": "used", "stream": is_stream})
            assert answer.status == 400
            assert "used" in answer.error["message"]
    finally:
        stream.close()


def test_a_defect_tells_nothing(engine, client, monkeypatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(engine, "make_call", broken)
    answer = client.post(COMPLETIONS, {"prompt": "a"})
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert answer.error["type"] == "server_error"

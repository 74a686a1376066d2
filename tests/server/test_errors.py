"""Client errors: status and OpenAI's error object."""

from typing import Any

import pytest

from .bodies import CHAT, COMPLETIONS, GENERATE, HELLO, TOOL

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
FALSY = (3, 0, False)


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} | more]}


# A good request per route, and for each field the values that are refused with its name.
WRONG: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    COMPLETIONS: (
        {"prompt": "a"},
        {
            "prompt": [None, [], 5, ["a", [1]], "a" * 500, [10**9], [-1]],
            "model": [5],
            "max_tokens": [-1, "5", 1.0, True],
            "temperature": [-1, 10**400],
            "top_p": [0],
            "top_k": [-2],
            "seed": [2**64, -(2**63) - 1],
            "n": [0, 129],
            "best_of": [3],
            "stop": [["a", 5], ""],
            "logit_bias": [{"x": 1}, {"999": 1}],
            "stop_token_ids": [[10**9]],
            "logprobs": [21, True],
            "echo": [1],
            "stream": ["yes"],
            "stream_options": [{}],
            "speculative": [1],
            "suffix": ["b"],
            "mirostat": [2],
        },
    ),
    CHAT: (
        HELLO,
        {
            "messages": [None, [], "hello", said("a" * 500)["messages"]],
            "top_logprobs": [2],
            "logprobs": [1],
            "continue_final_message": [True],
            "chat_template_kwargs": [[], {"messages": 1}],
            "response_format": [{"type": "json_object"}],
            "tools": [[TOOL]],
            "tool_choice": ["required"],
            "functions": [[{}]],
            "audio": [{}],
            "modalities": [["text", "audio"]],
            "guided_json": ["{}"],
        },
    ),
    GENERATE: ({"text": "a"}, {"text": [None], "image_data": ["x"], "background": [True]}),
    "/tokenize": ({"prompt": "a"}, {"prompt": [5]}),
    "/detokenize": (
        {"tokens": [1]},
        {"tokens": ["a", [10**30], [1] * (2**20 + 1), [[1] * (2**20 + 1)]]},
    ),
}
# Other bad requests, with the field in the error and words of its message.
OTHERS: list[tuple[str, dict[str, Any], str | None, str]] = [
    (COMPLETIONS, {"prompt": ""}, None, "no tokens"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens=3"),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": {"x": 1}},
        "stream_options",
        "unknown_field",
    ),
    # names inside quoted values are not changed
    (COMPLETIONS, {"prompt": "a", "stop": ["max_new_tokens", 5]}, "stop", "'max_new_tokens'"),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "'temperature'"),
    (COMPLETIONS, {"prompt": "a", "respons_format": 1}, "respons_format", "'response_format'"),
    *((COMPLETIONS, {"prompt": "a", "max_token": v}, "max_token", "'max_tokens'") for v in FALSY),
    *((CHAT, HELLO | {"tool_choise": v}, "tool_choise", "mean 'tool_choice'?") for v in FALSY),
    *(
        (GENERATE, {"text": "a", "sampling_param": v}, "sampling_param", "unknown_field")
        for v in FALSY
    ),
    *(
        (CHAT, body, "messages[0]", "messages[0]")
        for body in (
            {"messages": ["hello"]},
            {"messages": [{"content": "a"}]},
            {"messages": [{"role": "king", "content": "a"}]},
            said(5),
            said([IMAGE]),
            said(["a"]),
            said("a", name=5),
            said("a", tool_calls=["f"]),
            said("a", tool_calls=[{"function": "f"}]),
        )
    ),
    (CHAT, HELLO | {"tools": ["f"], "tool_choice": "none"}, "tools", "function.name"),
    (
        CHAT,
        HELLO | {"max_tokens": 3, "max_completion_tokens": 4},
        "max_completion_tokens",
        "differ; set one",
    ),
    (CHAT, HELLO | {"max_completion_tokens": "a"}, "max_tokens", "max_tokens='a'"),
    (CHAT, HELLO | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    (GENERATE, {"text": "a", "input_ids": [1]}, "text", "exactly one"),
    (GENERATE, {"text": []}, None, "at least one"),
    (GENERATE, {"text": "a", "sampling_params": 5}, None, "sampling_params=5"),
    (GENERATE, {"text": "a", "sampling_params": {"max_tokens": 5}}, None, "use 'max_new_tokens'"),
    (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -5}}, None, "max_new_tokens=-5"),
    (GENERATE, {"text": "a", "sampling_params": {"nonsense": 5}}, None, "['nonsense'] are not"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": "a"}}, None, "grammar_backend"),
    (GENERATE, {"text": "a", "sampling_params": {"custom_params": {}}}, None, "custom_params={}"),
    (GENERATE, {"text": ["a", "b"], "rid": "one"}, None, "rid='one'"),
    (GENERATE, {"text": "a", "top_logprobs_num": 3}, None, "return_logprob"),
    ("/tokenize", {"prompt": "\ud800"}, None, ""),
    # fields of other routes
    (GENERATE, {"text": "a", "temperature": [1]}, "temperature", "pass it in sampling_params"),
    (GENERATE, {"text": "a", "max_tokens": [1]}, "max_tokens", "pass it in sampling_params"),
    (GENERATE, {"text": "a", "top_k": [1]}, "top_k", "pass it in sampling_params"),
    (COMPLETIONS, {"prompt": "a", "messages": [1]}, "messages", "other routes do"),
    (COMPLETIONS, {"prompt": "a", "sampling_params": [1]}, "sampling_params", "other routes do"),
    (CHAT, HELLO | {"prompt": [1]}, "prompt", "other routes do"),
    (CHAT, HELLO | {"enable_thinking": [1]}, "enable_thinking", "must be true or false"),
    # LiteLLM recognises the error by this wording
    (COMPLETIONS, {"prompt": "a" * 500}, "prompt", "This model's maximum context length is 128"),
    (CHAT, said("a" * 500), "messages", "This model's maximum context length is 128"),
    (GENERATE, {"text": "a" * 500}, None, "context_length_exceeded"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "body", "param", "words"),
    [
        *(
            (route, good | {name: value}, name, "")
            for route, (good, fields) in WRONG.items()
            for name, values in fields.items()
            for value in values
        ),
        *OTHERS,
    ],
)
def test_bad_requests_name_the_field(client, route, body, param, words) -> None:
    answer = client.post(route, body)
    assert answer.status == 400, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.body) < 5000
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param, answer.error
    assert answer.error["message"]
    assert words in f"{answer.error['message']} {answer.error['code']}"


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
def test_bodies_that_are_not_requests(client, route, body) -> None:
    answer = client.ask("POST", route, body)
    assert answer.status == 400
    assert len(answer.body) < 5000
    assert answer.error["type"] == "invalid_request_error"


def test_an_unknown_model_is_not_found(engine, client) -> None:
    for route, body in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, HELLO),
        ("/tokenize", {"prompt": "a"}),
    ):
        for name in ("gpt-é", "m" * 100_000):
            answer = client.post(route, body | {"model": name})
            assert answer.status == 404
            assert answer.error["code"] == "model_not_found"
            assert len(answer.body) < 2000
    asked = {"prompt": "a", "max_tokens": 1, "model": engine.target.name}
    assert client.post(COMPLETIONS, asked).json()["model"] == engine.target.name


def test_neutral_values_are_accepted(client) -> None:
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


def test_an_internal_error_reveals_nothing(engine, client, monkeypatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(engine, "make_call", broken)
    answer = client.post(COMPLETIONS, {"prompt": "a"})
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert answer.error["type"] == "server_error"

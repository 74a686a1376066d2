"""``/v1/chat/completions`` compared with the engine."""

from typing import Any

import pytest

from .bodies import ENGINE_GREEDY, GREEDY, choices_of

ROUTE = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(c["delta"].get("content", "") for c in choices_of(chunks, index))


def test_the_answer_is_the_engines(engine, client) -> None:
    expected = engine.generate(messages=HELLO, sampling_params=ENGINE_GREEDY)
    body = client.post(ROUTE, {"messages": HELLO} | GREEDY).json()
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == expected["text"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == expected["meta_info"]["prompt_tokens"]
    chunks = client.stream(ROUTE, {"messages": HELLO} | GREEDY)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    first, *others = choices_of(chunks)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in others)
    assert text_of(chunks) == expected["text"]
    assert [choice["finish_reason"] for choice in others][-1] == "length"


@pytest.mark.parametrize(
    "content", [[{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}], "hel\nlo"]
)
def test_parts_of_text_are_lines(engine, client, content) -> None:
    expected = engine.generate(
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "hel\nlo"}],
        sampling_params=ENGINE_GREEDY,
    )
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": content}]
    body = client.post(ROUTE, {"messages": messages} | GREEDY).json()
    assert body["choices"][0]["message"]["content"] == expected["text"]


def test_the_template_gets_its_variables(engine, client, monkeypatch) -> None:
    template = "{% if enable_thinking %}think {% endif %}{{ messages[0].content }}{{ kind }}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    asked = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True, "kind": "x"}}
    body = client.post(ROUTE, asked | GREEDY).json()
    expected = engine.generate("think hellox", ENGINE_GREEDY)["text"]
    assert body["choices"][0]["message"]["content"] == expected
    # a slow template must not block the event loop
    slow = "{% for i in range(1000) %}{% for j in range(900) %}{% endfor %}{% endfor %}hello"
    monkeypatch.setattr(engine.tokenizer, "chat_template", slow)
    body = client.post(ROUTE, {"messages": HELLO} | GREEDY).json()
    expected = engine.generate("hello", ENGINE_GREEDY)["text"]
    assert body["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(client, name) -> None:
    asked = {"messages": HELLO, "ignore_eos": True, name: 5}
    assert client.post(ROUTE, asked).json()["usage"]["completion_tokens"] == 5


def test_without_a_limit_the_context_is_one(engine, client) -> None:
    body = client.post(ROUTE, {"messages": HELLO, "ignore_eos": True}).json()
    assert body["usage"]["total_tokens"] == engine.context_length
    assert body["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_name_bytes(engine, client) -> None:
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2} | GREEDY
    content = client.post(ROUTE, asked).json()["choices"][0]["logprobs"]["content"]
    options = {"return_logprob": True, "top_logprobs_num": 2}
    meta = engine.generate(messages=HELLO, sampling_params=ENGINE_GREEDY, **options)["meta_info"]
    assert [entry["logprob"] for entry in content] == [
        v for v, _, _ in meta["output_token_logprobs"]
    ]
    for entry, tops in zip(content, meta["output_top_logprobs"], strict=True):
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [top["logprob"] for top in entry["top_logprobs"]] == [value for value, _, _ in tops]
    parts = choices_of(client.stream(ROUTE, asked))
    assert [e for part in parts if part["logprobs"] for e in part["logprobs"]["content"]] == content
    (none,) = client.post(ROUTE, asked | {"logprobs": False, "top_logprobs": 0}).json()["choices"]
    assert none["logprobs"] is None

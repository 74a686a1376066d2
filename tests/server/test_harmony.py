"""Harmony over HTTP, from a model that writes its messages by chance."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from specjax import Engine
from specjax.server import make_app
from specjax.testing import Client, Files, running
from specjax.text.harmony import CALL as CALLED
from specjax.text.harmony import RETURN

from ..support.harmony_files import exactly, write_harmony
from .bodies import CHAT

pytestmark = pytest.mark.slow
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = {
    CHAT: [{"type": "function", "function": FUNCTION}],
    RESPONSES: [{"type": "function", **FUNCTION}],
    MESSAGES: [{"name": "f", "input_schema": SCHEMA}],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
BEFORE = "<|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>hm<|end|>{BEFORE}"
PREAMBLE = f"<|channel|>commentary<|message|>So:<|end|>{BEFORE}"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
FINAL = "<|channel|>final<|message|>"
BODIES = {"hm", '{"x": 1}'}  # contents that the model writes
Answer = dict[str, Any]
PART = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?<\|channel\|>(\w+)(?: to=functions\.(\w+) json)?<\|message\|>"
    r"(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


@pytest.fixture(scope="module")
def engine(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with files.engine(
        target=write_harmony(tmp_path_factory.mktemp("harmony") / "model"),
        speculative=False,
        speculative_algorithm="NGRAM",
        speculative_num_steps=3,
        grammar_backend="llguidance",
        reasoning_parser="gpt-oss",
        tool_call_parser="gpt-oss",
        max_running_requests=4,
        batch_buckets=(4,),
        dtype="float32",
    ) as made:
        yield made


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[Client]:
    with running(make_app(engine, served_model_name="tiny")) as port:
        yield Client(port)


def drawn(seed: int, **others: Any) -> Answer:
    return {"messages": [USER], "temperature": 1.0, "seed": seed, "max_tokens": 90} | others


def said(path: str, text: str, **others: Any) -> Answer:
    body: Answer = {"ebnf": exactly(text), "tools": TOOLS[path]} | others
    if path == RESPONSES:
        return body | {"input": "hi", "max_output_tokens": 400}
    return body | {"messages": [USER], "max_tokens": 400}


def events(client: Client, path: str, body: Answer) -> list[Answer]:
    answer = client.post(path, body | {"stream": True})
    assert answer.status == 200
    blocks = answer.body.decode().split("\n\n")[:-1]
    return [json.loads(block.partition("data: ")[2]) for block in blocks]


@pytest.mark.parametrize("seed", range(6))
def test_parts_are_those_of_the_tokens(client: Client, engine: Engine, seed: int) -> None:
    """Whole, in a stream, and without drafts."""
    body = drawn(seed, tools=TOOLS[CHAT], n=4, return_token_ids=True)
    choices = client.post(CHAT, body).json()["choices"]
    assert engine.tokenizer is not None
    for choice in choices:
        text = engine.tokenizer.decode(choice["token_ids"], skip_special_tokens=False)
        reasoning, content, calls = [], [], []
        for channel, function, body_text in PART.findall(text):
            if function:
                calls.append({"name": function, "arguments": body_text})
            else:
                (reasoning if channel == "analysis" else content).append(body_text)
        message = choice["message"]
        assert (message["reasoning_content"] or "") == "\n\n".join(reasoning)
        assert (message["content"] or "") == "\n\n".join(content)
        assert [call["function"] for call in message.get("tool_calls", [])] == calls
        ends = [engine.tokenizer.backend.token_to_id(mark) for mark in (RETURN, CALLED)]
        assert choice["finish_reason"] == "length" or choice["matched_stop"] in ends
        is_call = calls and calls[-1]["arguments"] != "hm"
        assert choice["finish_reason"] in ({"tool_calls"} if is_call else {"stop", "length"})
    messages = [choice["message"] for choice in choices]
    plain = client.post(CHAT, body | {"speculative": False}).json()["choices"]
    assert [choice["token_ids"] for choice in plain] == [choice["token_ids"] for choice in choices]
    streamed: list[Answer] = [
        {"content": "", "reasoning_content": "", "calls": {}} for _ in choices
    ]
    for event in client.post(CHAT, body | {"stream": True}).events():
        for one in event["choices"]:
            merged, delta = streamed[one["index"]], one["delta"]
            for name in ("content", "reasoning_content"):
                merged[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                known = merged["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                for name, value in call["function"].items():
                    known[name] += value
    for merged, message in zip(streamed, messages, strict=True):
        assert merged["content"] == (message["content"] or "")
        assert merged["reasoning_content"] == (message["reasoning_content"] or "")
        calls = [call["function"] for call in message.get("tool_calls", [])]
        assert list(merged["calls"].values()) == calls


def test_a_schema_holds_for_the_channel_final(client: Client) -> None:
    body = drawn(1, n=16, response_format=FORMAT, logit_bias={"101": -20, "102": -20})
    for fields in ({}, {"tools": TOOLS[CHAT]}):
        choices = client.post(CHAT, body | fields).json()["choices"]
        ended = [choice for choice in choices if choice["finish_reason"] != "length"]
        assert len(ended) > 10
        for choice in ended:
            *preambles, answer = choice["message"]["content"].split("\n\n")
            calls = {f"<|channel|>commentary to=functions.f json<|message|>{x}" for x in BODIES}
            assert {*preambles} <= BODIES | calls | {BEFORE + call for call in calls}
            jsonschema.validate(json.loads(answer), SCHEMA)
        assert any(choice["message"]["reasoning_content"] for choice in ended)
        plain = client.post(CHAT, body | fields | {"speculative": False}).json()["choices"]
        assert [choice["message"] for choice in plain if "tool_calls" not in choice["message"]] == [
            choice["message"] for choice in choices if "tool_calls" not in choice["message"]
        ]


def test_calls_that_are_required(client: Client) -> None:
    chosen = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", chosen):
        body = drawn(2, n=8, tools=TOOLS[CHAT], tool_choice=choice, max_tokens=300)
        choices = client.post(CHAT, body).json()["choices"]
        for one in choices:
            (call,) = one["message"]["tool_calls"]
            assert (call["function"]["name"], one["finish_reason"]) == ("f", "tool_calls")
            assert one["message"]["content"] is None
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert any(one["message"]["reasoning_content"] for one in choices)
    refused = client.post(CHAT, body | {"thinking_token_budget": 3})
    assert (refused.status, refused.error["param"]) == (400, "thinking_token_budget")


def test_a_budget_for_the_reasoning(client: Client, engine: Engine) -> None:
    """After it, the channel analysis is not possible until the answer has begun."""
    body = drawn(3, n=16, thinking_token_budget=1, return_token_ids=True)
    assert engine.tokenizer is not None
    num_cut = 0
    for choice in client.post(CHAT, body).json()["choices"]:
        text = engine.tokenizer.decode(choice["token_ids"], skip_special_tokens=False)
        text = text.partition("final")[0]
        assert text.count("analysis") <= 1
        num_cut += "analysis<|message|>h<|end|>" in text
    assert num_cut > 0


ITEMS = {"reasoning": "reasoning", "message": "text", "function_call": "call"}
BLOCKS = {"thinking": "reasoning", "text": "text", "tool_use": "call"}


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"{THOUGHT}{FINAL}Hi", ["reasoning", "text"]),
        (f"{THOUGHT}{PREAMBLE}{CALL}", ["reasoning", "text", "call"]),
        (f"{THOUGHT}{PREAMBLE}{THOUGHT}{FINAL}Hi", ["reasoning", "text", "reasoning", "text"]),
        (CALL, ["call"]),
    ],
)
def test_three_apis_have_the_same_blocks(client: Client, text: str, kinds: list[str]) -> None:
    """Whole and streamed."""
    message = client.post(CHAT, said(CHAT, text)).json()["choices"][0]["message"]
    response = client.post(RESPONSES, said(RESPONSES, text)).json()
    assert [ITEMS[item["type"]] for item in response["output"]] == kinds
    texts = {"reasoning": "", "text": "", "call": ""}
    for item in response["output"]:
        texts[ITEMS[item["type"]]] += item.get("arguments") or item["content"][0]["text"]
    assert texts["reasoning"] == (message["reasoning_content"] or "")
    assert texts["text"] == (message["content"] or "")
    assert texts["call"] == "".join(
        call["function"]["arguments"] for call in message.get("tool_calls", [])
    )
    usage = response["usage"]
    if "reasoning" in kinds:
        assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    else:
        assert usage["output_tokens_details"]["reasoning_tokens"] == 0
    streamed = events(client, RESPONSES, said(RESPONSES, text))[-1]["response"]["output"]
    assert [ITEMS[item["type"]] for item in streamed] == kinds
    assert [item.get("content") for item in streamed] == [
        item.get("content") for item in response["output"]
    ]
    whole = client.post(MESSAGES, said(MESSAGES, text)).json()
    assert [BLOCKS[block["type"]] for block in whole["content"]] == kinds
    assert whole["stop_reason"] == ("tool_use" if "call" in kinds else "end_turn")
    starts = [
        event["content_block"]["type"]
        for event in events(client, MESSAGES, said(MESSAGES, text))
        if event["type"] == "content_block_start"
    ]
    assert [BLOCKS[kind] for kind in starts] == kinds


def test_logprobs_are_of_the_content(client: Client) -> None:
    include = ["message.output_text.logprobs"]
    body = said(RESPONSES, f"{THOUGHT}{FINAL}Hi", tools=[], include=include)
    *_, item = client.post(RESPONSES, body).json()["output"]
    assert [entry["token"] for entry in item["content"][0]["logprobs"]] == ["H", "i"]


def test_the_prompt_of_a_history(client: Client, engine: Engine) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "assistant", "content": "So:", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "9"},
    ]
    body = drawn(1, messages=[USER, *turns], max_tokens=1, return_token_ids=True)
    assert engine.tokenizer is not None
    ids = client.post(CHAT, body).json()["prompt_token_ids"]
    assert engine.tokenizer.decode(ids, skip_special_tokens=False) == (
        # the tokenizer has no line breaks
        "<|start|>user<|message|>hi<|end|><|start|>assistant<|message|>hmSo:|<|end|>"
        "<|start|>tool<|message|>9<|end|><|start|>assistant"
    )
    odd = [
        USER,
        turns[0] | {"tool_calls": [call | {"id": []}] * 2},
        turns[1] | {"tool_call_id": {}},
    ]
    assert client.post(CHAT, drawn(1, messages=odd, max_tokens=1)).status == 200
    wrong = [USER, turns[0] | {"reasoning_content": [3]}]
    error = client.post(CHAT, drawn(1, messages=wrong)).error
    assert "reasoning_content" in error["message"]


def test_stop_strings_and_decisions(client: Client) -> None:
    body = said(CHAT, f"{THOUGHT}{FINAL}Hi you", stop=["i y"])
    choice = client.post(CHAT, body).json()["choices"][0]
    assert (choice["message"]["content"], choice["matched_stop"]) == ("H", "i y")
    question = {"type": "predicate", "instructions": "red?"}
    body = {"model": "tiny", "input": "x", "questions": [question]}
    (answer,) = client.post("/v1/decisions", body).json()["answers"]
    assert 0 <= answer["probability"] <= 1

"""Responses and Messages: the same conversation as over chat completions, in other forms."""

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from specjax import Engine
from specjax.scheduling.request import new_id
from specjax.server import make_app
from specjax.server.blocks import Block
from specjax.server.conversation import Conversation
from specjax.server.fields import ApiError
from specjax.server.messages import content_of, error_json, read_tools
from specjax.server.responses import ResponseAnswer, read_choice, read_input
from specjax.server.responses import read_tools as read_functions
from specjax.testing import Client, Files, running
from specjax.testing.files import EOS_ID, letter_tokenizer, write_tokenizer
from specjax.text.parts import TextParts, Tools
from specjax.text.tool_formats import FORMATS, HERMES, ToolCall

from .conftest import served

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
STOP = {"type": "stop"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
TEXTS = {
    "text": "Sure.",
    "a call": CALL,
    "text and a call": f"Sure. {CALL}",
    "two calls": '<tool_call>{"name":"f"}</tool_call>' * 2,
}
HISTORY = {
    CHAT: [
        {"role": "system", "content": "B."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "L:",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 3}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "9"},
        {"role": "user", "content": "k<think>"},
    ],
    RESPONSES: [
        {"role": "developer", "content": [{"type": "input_text", "text": "B."}]},
        {"type": "message", "role": "user", "content": "hi"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "L:", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 3}'},
        {"type": "function_call_output", "call_id": "1", "output": "9"},
        {"role": "user", "content": [{"type": "input_text", "text": "k<think>"}]},
    ],
    MESSAGES: [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "L:"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 3}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "9"}],
                },
                {"type": "text", "text": "k<think>"},
            ],
        },
    ],
}
# shows all that a template can see of a message, in few tokens
TEMPLATE = (
    "{{ '{' if tools else '' }}{% for m in messages %}{{ m.role[0] }}"
    "{{ m.reasoning_content or '' }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.id }}{{ c.function.name }}{{ c.function.arguments }})"
    "{% endfor %}{{ m.tool_call_id or '' }}{% endfor %}"
)
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def agents(files: Files, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, tokenizer = tmp_path_factory.mktemp("agents"), letter_tokenizer()
    tokenizer.backend.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    write_tokenizer(folder, tokenizer)
    options = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "tokenizer": folder}
    with served(files, engine, **options) as client:
        yield client


def fields(path: str, answer: str, **others: Any) -> Answer:
    """A request whose answer has drawn reasoning and then ``answer``."""
    end = str(EOS_ID + 2)
    common = {
        "ebnf": f"start: {json.dumps(answer)}",
        "logit_bias": {end: 8.0},
        "temperature": 1.0,
        "seed": 3,
    }
    function = {"name": "f", "description": "x", "parameters": SCHEMA}
    match path:
        case "/v1/chat/completions":
            tools: Any = [{"type": "function", "function": function}]
            named = {"messages": HISTORY[CHAT], "max_tokens": 99}
        case "/v1/responses":
            tools = [{"type": "web_search"}, {"type": "function", **function, "strict": None}]
            named = {"input": HISTORY[RESPONSES], "max_output_tokens": 99, "store": False}
        case _:
            tools = [{"name": "f", "description": "x", "input_schema": SCHEMA}]
            named = {"messages": HISTORY[MESSAGES], "max_tokens": 99, "system": "B."}
    return common | named | {"tools": tools} | others


def of_chat(body: Answer) -> Answer:
    (choice,) = body["choices"]
    message, usage = choice["message"], body["usage"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return {
        "reasoning": message["reasoning_content"] or "",
        "text": message["content"] or "",
        "calls": [(call["name"], json.loads(call["arguments"])) for call in calls],
        "tokens": (usage["prompt_tokens"], usage["completion_tokens"]),
    }


def of_response(body: Answer) -> Answer:
    items: dict[str, list[Answer]] = {"reasoning": [], "message": [], "function_call": []}
    for item in body["output"]:
        items[item["type"]].append(item)
    usage = body["usage"]
    return {
        "reasoning": "".join(item["content"][0]["text"] for item in items["reasoning"]),
        "text": "".join(item["content"][0]["text"] for item in items["message"]),
        "calls": [(c["name"], json.loads(c["arguments"])) for c in items["function_call"]],
        "tokens": (usage["input_tokens"], usage["output_tokens"]),
    }


def of_message(body: Answer) -> Answer:
    content, usage = body["content"], body["usage"]
    cached = usage["cache_read_input_tokens"]
    return {
        "reasoning": "".join(b["thinking"] for b in content if b["type"] == "thinking"),
        "text": "".join(block["text"] for block in content if block["type"] == "text"),
        "calls": [(b["name"], b["input"]) for b in content if b["type"] == "tool_use"],
        "tokens": (usage["input_tokens"] + cached, usage["output_tokens"]),
    }


def events(client: Client, path: str, body: Answer) -> list[Answer]:
    """The events of a stream, each of which has the name of its type."""
    answer = client.post(path, body | {"stream": True})
    assert answer.status == 200
    return parse_events(answer.body)


def parse_events(data: bytes) -> list[Answer]:
    *blocks, end = data.decode().split("\n\n")
    assert end == ""
    parsed = []
    for block in blocks:
        name, data = block.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def replay_response(stream: list[Answer]) -> Answer:
    """Check the order of events, and rebuild the response from them."""
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    first, second, *middle, last = stream
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"]["status"] == "in_progress"
    output: list[Answer] = []
    text = ""
    for event in middle:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(output) - (kind != "output_item.added")
        if kind == "output_item.added":
            output.append(event["item"])
            text = ""
            continue
        item = output[-1]
        if kind == "output_item.done":
            assert event["item"]["id"] == item["id"]
            output[-1] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
        elif kind.endswith("_text.done"):
            assert event["text"] == text
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text
    response = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert response["output"] == output
    return response


def replay_message(stream: list[Answer]) -> Answer:
    first, *middle, last_delta, last = stream
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    message, partial = first["message"], ""
    assert message["content"] == []
    for event in middle:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            partial = ""
            continue
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = json.loads(partial)
            continue
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            partial += delta["partial_json"]
        else:
            name = delta["type"].removesuffix("_delta")
            block[name] += delta[name]
    assert last_delta["type"] == "message_delta"
    return message | last_delta["delta"] | {"usage": last_delta["usage"]}


def without_ids(body: Answer) -> Answer:
    """A response without ids and times, and without cached tokens, which a repetition has."""
    text = json.dumps(body)
    parsed = json.loads(text)
    for item in parsed.get("output", parsed.get("content")):
        for name in ("id", "call_id"):
            item.pop(name, None)
    names = ("id", "created_at", "completed_at", "usage")
    return {name: value for name, value in parsed.items() if name not in names}


@pytest.mark.slow
@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_three_forms_have_the_same_content(agents: Client, text: str, speculative: bool) -> None:
    bodies = {
        path: fields(path, text, speculative=speculative) for path in (CHAT, RESPONSES, MESSAGES)
    }
    chat, response, message = (agents.post(path, body).json() for path, body in bodies.items())
    expected = of_chat(chat)
    assert expected["reasoning"]
    assert len(expected["calls"]) == text.count("<tool_call>")
    assert of_response(response) == of_message(message) == expected
    assert message["stop_reason"] == ("tool_use" if expected["calls"] else "end_turn")
    streamed = replay_response(events(agents, RESPONSES, bodies[RESPONSES]))
    assert without_ids(streamed) == without_ids(response)
    assert of_response(streamed) == expected
    details = streamed["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < expected["tokens"][1]
    streamed = replay_message(events(agents, MESSAGES, bodies[MESSAGES]))
    assert without_ids(streamed) == without_ids(message)
    assert of_message(streamed) == expected


@pytest.mark.slow
def test_histories_hold_what_was_answered(agents: Client) -> None:
    """Output items are valid input, also reasoning that only its encrypted form holds."""
    body = fields(RESPONSES, TEXTS["text and a call"], include=["reasoning.encrypted_content"])
    response = agents.post(RESPONSES, body).json()
    reasoning, *others = response["output"]
    plain = of_response(response)["reasoning"]
    hidden = {name: value for name, value in reasoning.items() if name != "content"}
    lengths = []
    for item in (reasoning, hidden, hidden | {"encrypted_content": "not ours"}):
        history = [*body["input"], item, *others]
        lengths.append(
            agents.post(RESPONSES, body | {"input": history}).json()["usage"]["input_tokens"]
        )
    assert lengths[0] == lengths[1] == lengths[2] + len(plain)
    messages = fields(MESSAGES, TEXTS["text and a call"])
    answer = agents.post(MESSAGES, messages).json()
    turn = {"role": "assistant", "content": answer["content"]}
    messages["messages"] = [*messages["messages"], turn]
    assert agents.post(MESSAGES, messages).json()["usage"]["input_tokens"] > 0
    counted = {name: messages[name] for name in ("messages", "system", "tools")}
    total = agents.post(COUNT, counted).json()["input_tokens"]
    assert (
        total
        == agents.post(RESPONSES, body | {"input": [*body["input"], *response["output"]]}).json()[
            "usage"
        ]["input_tokens"]
    )


@pytest.mark.slow
def test_ends(agents: Client) -> None:
    """Ends by the length, a stop sequence and a schema."""
    short = fields(RESPONSES, TEXTS["text"], max_output_tokens=1)
    response = agents.post(RESPONSES, short).json()
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    streamed = replay_response(events(agents, RESPONSES, short))
    assert streamed["output"][-1]["status"] == "incomplete"
    message = agents.post(MESSAGES, fields(MESSAGES, "Sure.", max_tokens=1)).json()
    assert message["stop_reason"] == "max_tokens"
    message = agents.post(MESSAGES, fields(MESSAGES, "Sure.", stop_sequences=["re"])).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "re")
    assert of_message(message)["text"] == "Su"
    schema = {"enum": [7]}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    limited: Answer = {"tools": [], "ebnf": None}
    body = fields(RESPONSES, "", **limited, text={"format": form})
    assert json.loads(of_response(agents.post(RESPONSES, body).json())["text"]) == 7
    body = fields(MESSAGES, "", **limited, output_config={"format": form})
    assert json.loads(of_message(agents.post(MESSAGES, body).json())["text"]) == 7


META = {"prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": 5}


HERMES_TOOLS = Tools(names=["f"], format=HERMES, new_id=new_id)


def stub_answer(tools: Tools = HERMES_TOOLS) -> ResponseAnswer:
    return ResponseAnswer(
        id="resp_1",
        model="tiny",
        new_parts=partial(TextParts, tools=tools, may_reason=True),
        request={},
        texts=None,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("step", [1, 2, 7, 40, 1000])
def test_blocks_are_in_the_order_of_the_text(step: int) -> None:
    """However it was cut, also if a call is not the end."""
    text = f"<think>hm</think>A {CALL} B {CALL}\n{CALL} C"
    result = {"text": text, "output_ids": [0], "meta_info": META | {"finish_reason": STOP}}
    answer = stub_answer()
    chunks = [
        answer.chunk({"text": text[:end], "output_ids": []}) for end in range(step, len(text), step)
    ]
    streamed = replay_response(parse_events(b"".join([*chunks, answer.chunk(result)])))
    body = json.loads(stub_answer().body([result]))
    assert without_ids(streamed) == without_ids(body)
    kinds = [item["type"] for item in body["output"]]
    call = "function_call"
    assert kinds == ["reasoning", "message", call, "message", call, call, "message"]
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}


def test_text_before_calls_of_mistral_is_the_first_block() -> None:
    tools = Tools(names=["f"], format=FORMATS["mistral"], new_id=new_id)
    text = 'Yes. [TOOL_CALLS]f[ARGS]{"a": 1}'
    result = {"text": text, "output_ids": [0], "meta_info": META | {"finish_reason": STOP}}
    body = json.loads(stub_answer(tools).body([result]))
    assert [item["type"] for item in body["output"]] == ["message", "function_call"]
    assert body["output"][0]["content"][0]["text"] == "Yes."


def test_adjacent_items_of_the_assistant_are_one_message() -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "L"}
    (message,) = read_input([reasoning, said, reasoning, call, said])
    (tool_call,) = message.pop("tool_calls")
    assert tool_call["function"] == {"name": "f", "arguments": "{}"}
    assert message == {"role": "assistant", "content": "LL", "reasoning_content": "hmhm"}
    user = {"role": "user", "content": ""}
    assert read_input([], "B.") == [{"role": "system", "content": "B."}, user]


def test_a_tool_of_messages_has_the_order_of_chat() -> None:
    tool = {"strict": True, "input_schema": SCHEMA, "name": "f", "description": "x"}
    (function,) = (made["function"] for made in read_tools(None, [tool]))  # type: ignore[arg-type]
    assert list(function) == ["name", "description", "parameters", "strict"]


@pytest.mark.parametrize("value", ["1e999", "[" * 3000 + "]" * 3000, "9" * 5000, "["])
def test_arguments_that_no_client_reads_are_left_out(value: str) -> None:
    block = Block("call", 0, ToolCall("f", "", "1"), f'{{"a": {value}}}')
    assert content_of(block)["input"] == {}


def test_a_long_prompt_has_the_words_that_clients_recognise() -> None:
    error = ApiError(400, "9 tokens", code="context_length_exceeded")
    message = json.loads(error_json(error))["error"]["message"]
    assert message == "prompt is too long: 9 tokens"


LOGPROBS = "message.output_text.logprobs"


def allowed(mode: str, *names: str) -> Answer:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": [*tools, {"type": "web_search"}]}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_may_be_called(mode: str) -> None:
    engine = SimpleNamespace(tool_call_parser="hermes", reasoning=None)
    letters = letter_tokenizer()
    tokenizer = SimpleNamespace(
        chat_template="{{ tools }}", backend=letters.backend, special_ids=letters.special_ids
    )
    service: Any = SimpleNamespace(engine=engine, tokenizer=tokenizer, ignored_fields=set())
    tools = read_functions(service, [{"type": "function", "name": name} for name in "fgh"])
    variables: Answer = {}
    choice = read_choice(service, allowed(mode, "h", "g"))
    options = {"tools": tools, "choice": choice, "is_parallel": True}
    made = Conversation(service, [], variables, **options).tools
    assert (made.names, made.is_required, made.is_parallel) == (
        ["g", "h"],
        mode == "required",
        True,
    )
    assert variables["tools"] == tools  # the prompt, and so its prefix in the cache, is the same


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_cut_answer_is_incomplete(reason: str) -> None:
    meta = META | {"finish_reason": {"type": reason}}
    data = stub_answer().chunk({"text": "A", "output_ids": [0], "meta_info": meta})
    *_, item, last = parse_events(data)
    assert item["item"]["status"] == "incomplete"
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    expected = {"length": "max_output_tokens", "abort": "abort"}[reason]
    assert last["response"]["incomplete_details"] == {"reason": expected}


def test_logprobs_are_those_of_chat(client: Client) -> None:
    body: Answer = HELLO | {"include": [LOGPROBS], "top_logprobs": 2, "seed": 3}
    messages = [{"role": "user", "content": HELLO["input"]}]
    ask = {"messages": messages, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "seed": 3}
    expected = client.post(CHAT, ask).json()["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in expected] == [2, 2, 2]
    answer = client.post(RESPONSES, body).json()
    (item,) = answer["output"]
    assert item["content"][0]["logprobs"] == expected
    assert answer["top_logprobs"] == 2
    streamed = events(client, RESPONSES, body)
    deltas = [event for event in streamed if event["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta["logprobs"]] == expected
    assert without_ids(replay_response(streamed)) == without_ids(answer)
    (done,) = (event for event in streamed if event["type"] == "response.output_text.done")
    assert done["logprobs"] == expected


END_TAG, EOS = 90, 91
PIECES = {10: "<think>", 11: "hm", 12: "\n\n", END_TAG: "</think>", 20: "Hi", 21: "</th", EOS: ""}


@pytest.mark.parametrize(
    ("ids", "num_hidden", "is_inside"),
    [
        ((10, 12, END_TAG, 12, 20, 20, EOS), 3, False),
        ((10, 11, END_TAG, 20, 20, EOS), 3, False),
        ((END_TAG, 12, 20), 1, True),
        ((11, 12), 2, True),
        ((20, 21, EOS, EOS), 0, False),
        ((20, END_TAG, 20, EOS), 0, False),  # a tag in the text
        ((10, 12, END_TAG, EOS), 3, False),
    ],
)
def test_logprobs_are_of_all_tokens_after_the_reasoning(ids, num_hidden, is_inside) -> None:
    """In a stream, those without text come in a last delta."""

    def make() -> ResponseAnswer:
        return ResponseAnswer(
            id="resp_1",
            model="tiny",
            new_parts=partial(TextParts, may_reason=True, is_inside=is_inside, end_token=END_TAG),
            request={},
            texts=SimpleNamespace(of=lambda token: (str(token), b"")),  # type: ignore[arg-type]
            wants_logprobs=True,
        )

    def result(num: int) -> Answer:
        reason = STOP if num == len(ids) else None
        scored = [(-1.0, token, None) for token in ids[:num]]
        meta = META | {"finish_reason": reason, "output_token_logprobs": scored}
        text = "".join(PIECES[token] for token in ids[:num])
        return {"text": text, "output_ids": list(ids[:num]), "meta_info": meta}

    expected = [str(token) for token in ids[num_hidden:]]
    body = json.loads(make().body([result(len(ids))]))
    texts = [item["content"][0] for item in body["output"] if item["type"] == "message"]
    assert [entry["token"] for text in texts for entry in text["logprobs"]] == expected
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == num_hidden
    answer = make()
    data = b"".join(answer.chunk(result(num)) for num in range(1, len(ids) + 1))
    assert without_ids(replay_response(parse_events(data))) == without_ids(body)
    deltas = [x for x in parse_events(data) if x["type"] == "response.output_text.delta"]
    assert [entry["token"] for delta in deltas for entry in delta["logprobs"]] == expected


def test_the_list_of_models_has_the_field_of_codex(client: Client) -> None:
    models = client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert models["models"] == []


HELLO = {"input": "hi", "max_output_tokens": 3}
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def test_small_requests(client: Client) -> None:
    body = client.post(RESPONSES, HELLO).json()
    assert (body["object"], body["output"][0]["type"]) == ("response", "message")
    assert body["usage"]["output_tokens"] == 3
    assert client.post(RESPONSES, {"input": [], "max_output_tokens": 1}).status == 200
    message = client.post(MESSAGES, ASK | {"metadata": {"user_id": "x"}}).json()
    assert (message["type"], message["role"]) == ("message", "assistant")
    counted = client.post(COUNT, {"messages": ASK["messages"]}).json()["input_tokens"]
    assert counted == of_message(message)["tokens"][0]
    billing = {"type": "text", "text": "x-anthropic-billing-header: 1"}
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    extra = {"system": [billing], "output_config": form, "seed": 3}
    assert client.post(COUNT, ASK | extra).json()["input_tokens"] == counted
    streamed = events(client, RESPONSES, HELLO)
    assert replay_response(streamed)["usage"]["output_tokens"] == 3
    assert replay_message(events(client, MESSAGES, ASK))["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", ["resp_1", "history"]),
        ({"conversation": "c"}, "conversation", ["history"]),
        ({"background": True}, "background", ["synchronous"]),
        ({"prompt": {"id": "p"}}, "prompt", ["instructions"]),
        ({"include": "reasoning"}, "include", ["list"]),
        ({"top_logprobs": 2}, "top_logprobs", ["top_logprobs=2", "message.output_text.logprobs"]),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", ["20"]),
        ({"n": 2}, "n", ["n=2"]),
        ({"input": 5}, "input", ["input=5"]),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input",
            ["item_reference", "input[0]", "store=false"],
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            ["input_image", "input[0]"],
        ),
        ({"input": [{"type": "function_call", "name": 3}]}, "input", ["name", "input[0]"]),
        ({"tools": [3]}, "tools", ["type"]),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", ["web_search"]),
        ({"tool_choice": allowed("auto", "f")}, "tool_choice", ["'f'", "[]"]),
        ({"tool_choice": allowed("none")}, "tool_choice", ["'none'", "required"]),
        ({"tool_choice": allowed("required")}, "tool_choice", ["required", "needs tools"]),
        ({"max_output_tokens": -1}, "max_output_tokens", ["max_output_tokens=-1"]),
        ({"reasoning": {"effort": "huge"}}, "reasoning", ["huge"]),
        ({"text": "json"}, "text", ["object"]),
        ({"text": {"format": {"type": "xml"}}}, "text", ["text.format", "json_schema"]),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", ["other routes"]),
        ({"instructions": 4}, "instructions", ["4"]),
        ({"temprature": 1}, "temprature", ["temperature"]),
    ],
)
def test_refused_responses(client: Client, change: Answer, param: str, words: list[str]) -> None:
    answer = client.post(RESPONSES, HELLO | change)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert all(word in answer.error["message"] for word in words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["messages[0].role"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            ["image", "messages[0]"],
        ),
        ({"messages": [{"role": "user", "content": 3}]}, ["messages[0].content"]),
        ({"thinking_token_budget": -1}, ["thinking.budget_tokens=-1"]),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, ["tool_use"]),
        ({"system": 3}, ["system"]),
        ({"max_tokens": -1}, ["max_tokens=-1"]),
        ({"stop_sequences": 3}, ["stop_sequences"]),
        ({"thinking": {"type": "x"}}, ["thinking", "enabled"]),
        ({"tool_choice": {"type": "x"}}, ["tool_choice", "any"]),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}}, ["'f'"]),
        ({"output_config": {"effort": "huge"}}, ["huge"]),
        ({"output_config": {"format": {"type": "xml"}}}, ["json_schema"]),
    ],
)
def test_refused_messages(client: Client, change: Answer, words: list[str]) -> None:
    answer = client.post(MESSAGES, ASK | change)
    error = answer.json()
    assert (answer.status, error["type"]) == (400, "error")
    assert error["error"]["type"] == "invalid_request_error"
    assert all(word in error["error"]["message"] for word in words)


def test_errors_before_a_request_is_read_have_the_form_of_messages(engine: Engine) -> None:
    with running(make_app(engine, api_key="k")) as port:
        answer = Client(port).post(COUNT, ASK)
        assert (answer.status, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert Client(port, x_api_key="k").post(COUNT, ASK).status == 200


def test_token_ids_are_those_of_chats(client) -> None:
    user = {"messages": [{"role": "user", "content": "hello"}]}
    common = {"temperature": 0, "ignore_eos": True}
    asked = {"return_token_ids": True}
    chat = client.post(CHAT, user | common | asked | {"max_tokens": 9}).json()
    ids = {name: chat.get(name) for name in ("prompt_token_ids", "token_ids")}
    ids["token_ids"] = chat["choices"][0]["token_ids"]
    assert len(ids["token_ids"]) == 9
    for path, fields, last in (
        (RESPONSES, {"input": "hello", "max_output_tokens": 9}, "response.completed"),
        (MESSAGES, user | {"max_tokens": 9}, "message_delta"),
    ):
        body = common | fields
        assert not ids.keys() & client.post(path, body).json().keys()
        assert client.post(path, body | asked).json().items() >= ids.items()
        stream = events(client, path, body | asked)
        [event] = [x for x in stream if x.get("response", x).keys() & ids.keys()]
        assert event["type"].replace("incomplete", "completed") == last
        assert event.get("response", event).items() >= ids.items()

"""``response_format`` and ``structured_outputs`` over HTTP."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import tokenizers

from specjax import Engine
from specjax.checkpoints.target import open_target
from specjax.sampling.grammar import LAYOUT, OPTIONS
from specjax.sampling.grammar_compiler import GrammarCompiler
from specjax.server.conversation import Conversation, with_default_prompt
from specjax.testing import Client, Files
from specjax.testing.files import EOS_ID, LETTERS, letter_tokenizer, write_tokenizer
from specjax.text.parts import Tools
from specjax.text.tool_formats import FORMATS, ToolCall

from .bodies import CHAT, COMPLETIONS, GENERATE
from .conftest import served

JSON = {OPTIONS: LAYOUT}
# formats whose forced calls are objects; tests/text has those of the others
OBJECTS = sorted(FORMATS.keys() - {"gpt-oss", "qwen3_coder"})
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}


@pytest.fixture(scope="module")
def structured(files: Files, engine: Engine) -> Iterator[Client]:
    with served(files, engine, constrained_json_disable_any_whitespace=True) as client:
        yield client


def check_refusal(client: Client, body: dict[str, Any], param: str, words: str) -> None:
    answer = client.post(CHAT, body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert words in answer.error["message"]


def test_answers_match_their_schema(structured: Client) -> None:
    body = HELLO | {"response_format": FORMAT, "temperature": 1.0, "n": 2, "seed": 4}
    answer = structured.post(CHAT, body).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
        assert " " not in text
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    streamed = ["", ""]
    for event in structured.post(CHAT, body | {"stream": True}).events():
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == texts


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, {"yes", 'n"o'}),
        ({"structured_outputs": {"regex": "[ab]c"}}, {"ac", "bc"}),
        ({"structured_outputs": {"grammar": 'start: "k" | "l"'}}, {"k", "l"}),
        ({"structured_outputs": {"json": {"enum": [3, 4]}, "regex": None}}, {"3", "4"}),
        ({"regex": "xyz"}, {"xyz"}),
        ({"json_schema": {"enum": [[1, 2]], "x-guidance": {"item_separator": ";"}}}, {"[1,2]"}),
        ({"structured_outputs": {"json": True}, "max_tokens": 1}, set('"[{-0123456789tfn')),
        ({"ebnf": 'root ::= "u" | "v"'}, {"u", "v"}),
        ({"allowed_token_ids": [LETTERS.index("k")], "max_tokens": 5}, {"kkkkk"}),
        ({"bad_words": [*sorted({*LETTERS} - {*"uv"}), " "], "max_tokens": 1}, {"u", "v", ""}),
        ({"bad_words": [], "regex": "xyz"}, {"xyz"}),
    ],
)
def test_other_fields(structured: Client, fields: dict[str, Any], texts: set[str]) -> None:
    answer = structured.post(COMPLETIONS, {"prompt": "a", "max_tokens": 20} | fields)
    assert answer.json()["choices"][0]["text"] in texts


def test_json_object_and_native_parameters(structured: Client) -> None:
    body = HELLO | {"response_format": {"type": "json_object"}, "max_tokens": 3}
    assert structured.post(CHAT, body).json()["choices"][0]["message"]["content"][0] == "{"
    sampling = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 60}
    text = structured.post(GENERATE, {"text": "a", "sampling_params": sampling}).json()["text"]
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "must have the type text"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        (
            {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "give only one of response_format, structured_outputs",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "list of strings"),
        ({"structured_outputs": {"magic": 1}}, "structured_outputs", "must have one of json"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs", "structured_outputs='a("),
        (
            {"structured_outputs": {"json": {"type": 5}}},
            "structured_outputs",
            "structured_outputs=",
        ),
        ({"structured_outputs": {"json": 5}}, "structured_outputs", "structured_outputs=5 must be"),
        ({"json_schema": {"type": 5}}, "json_schema", "json_schema="),
        ({"regex": "a("}, "regex", "regex='a('"),
        ({"bad_words": "a"}, "bad_words", "bad_words='a' must be a list of at least one string"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "allowed_token_ids=[-1] must be"),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            "response_format",
            "response_format=",
        ),
        (
            {"response_format": FORMAT, "min_tokens": 2},
            "min_tokens",
            "min_tokens=2 must be 0 with response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "response_format",
            "response_format=",
        ),
    ],
)
def test_refusals(structured: Client, fields: dict[str, Any], param: str, words: str) -> None:
    check_refusal(structured, HELLO | fields, param, words)


def test_a_server_without_grammars_names_the_option(client: Client) -> None:
    body = HELLO | {"response_format": {"type": "json_object"}}
    check_refusal(client, body, "response_format", "grammar_backend='llguidance'")


@pytest.fixture(scope="module")
def reasoning(files: Files, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer has the tags as its last two tokens."""
    folder, tokenizer = tmp_path_factory.mktemp("reasoning"), letter_tokenizer()
    tokenizer.backend.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    write_tokenizer(folder, tokenizer)
    with served(files, engine, reasoning_parser="qwen3", tokenizer=folder) as client:
        yield client


@pytest.mark.slow
def test_reasoning_comes_apart_and_before_the_grammar(reasoning: Client) -> None:
    """Prompts that open the reasoning, close it, or leave it to the model."""
    end = str(EOS_ID + 2)
    for content, is_reasoned in (("hi<think>", True), ("hi", False), ("<think></think>", False)):
        body = {
            "messages": [{"role": "user", "content": content}],
            "response_format": FORMAT,
            "logit_bias": {end: 6.0},
            "temperature": 1.0,
            "seed": 3,
            "max_tokens": 100,
        }
        choice = reasoning.post(CHAT, body).json()["choices"][0]
        message = choice["message"]
        if content == "<think></think>":
            jsonschema.validate(json.loads(message["content"]), SCHEMA)
            assert message["reasoning_content"] is None
        elif is_reasoned:
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(message["content"]), SCHEMA)
            assert message["reasoning_content"]
        whole = reasoning.post(CHAT, body | {"separate_reasoning": False}).json()
        text = whole["choices"][0]["message"]["content"]
        if is_reasoned:
            before, tag, after = text.partition("</think>")
            assert (before.strip(), tag, after) == (
                message["reasoning_content"],
                "</think>",
                message["content"],
            )
        parts = {"content": "", "reasoning_content": ""}
        for event in reasoning.post(CHAT, body | {"stream": True}).events():
            for one in event["choices"]:
                for name in parts:
                    parts[name] += one["delta"].get(name) or ""
        assert parts["content"] == message["content"]
        assert (parts["reasoning_content"] or None) == message["reasoning_content"]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"response_format": FORMAT}, {"speculative": False}])
def test_reasoning_has_a_budget(reasoning: Client, fields: dict[str, Any]) -> None:
    """The letters are tokens, and the model does not end its reasoning by itself."""
    body = {
        "messages": [{"role": "user", "content": "hi<think>"}],
        "thinking_token_budget": 6,
        "temperature": 1.0,
        "seed": 1,
        "logit_bias": {str(EOS_ID + 2): -100.0, str(EOS_ID): -100.0},
        "max_tokens": 20,
        "separate_reasoning": False,
    }
    text = reasoning.post(CHAT, body | fields).json()["choices"][0]["message"]["content"]
    assert text.index("</think>") == 6
    if not fields.get("response_format"):
        plain = reasoning.post(CHAT, body | {"speculative": False}).json()
        assert text == plain["choices"][0]["message"]["content"]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "text",
            "parameters": {
                "type": "object",
                "properties": {"x": {"enum": values}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
    for name, values in (("f", [1, 2]), ("g", ["a", "b"]))
]

STRICT = [tool | {"function": tool["function"] | {"strict": True}} for tool in TOOLS]


@pytest.fixture(scope="module")
def tools(
    files: Files, engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """The template knows tools, but does not show them: they are longer than the context."""
    folder, tokenizer = tmp_path_factory.mktemp("tools"), letter_tokenizer()
    tokenizer.chat_template = "{% if tools %}T{% endif %}{{ messages[0].content }}"
    write_tokenizer(folder, tokenizer)
    options = {"tool_call_parser": "llama3", "constrained_json_disable_any_whitespace": True}
    with served(files, engine, **options, tokenizer=folder) as client:
        yield client


CALL: dict[str, Any] = HELLO | {"tools": TOOLS, "temperature": 1.0, "seed": 5, "max_tokens": 100}


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"f", "g"}), ({"type": "function", "function": {"name": "g"}}, {"g"})],
)
def test_calls_that_are_required(tools: Client, choice: Any, names: set[str]) -> None:
    body = CALL | {"tool_choice": choice, "n": 2}
    choices = tools.post(CHAT, body).json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"tool_calls"}
    for one in choices:
        (call,) = one["message"]["tool_calls"]
        assert one["message"]["content"] is None
        assert (call["type"], call["id"][:5]) == ("function", "call_")
        assert call["function"]["name"] in names
        assert set(json.loads(call["function"]["arguments"])) == {"x"}
    found: dict[int, Any] = {}
    ends, num_deltas = {}, 0
    for event in tools.post(CHAT, body | {"stream": True}).events():
        for one in event["choices"]:
            assert not one["delta"].get("content")
            for call in one["delta"].get("tool_calls", ()):
                assert call["index"] == 0
                num_deltas += 1
                new, known = call["function"], found.setdefault(one["index"], {"arguments": ""})
                assert ("name" in new) == ("id" in call) == ("name" not in known)
                known |= new | {"arguments": known["arguments"] + new["arguments"]}
            ends[one["index"]] = one["finish_reason"]
    assert ends == {0: "tool_calls", 1: "tool_calls"}
    assert num_deltas > 2  # arguments come as they are written
    assert found == {i: x["message"]["tool_calls"][0]["function"] for i, x in enumerate(choices)}


def test_the_same_choice_in_other_forms(tools: Client) -> None:
    """Responses and Messages name a function that must be called in their own way."""
    body: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    chosen = {"type": "function", "function": {"name": "g"}}
    message = tools.post(CHAT, CALL | {"tool_choice": chosen}).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body |= {"input": "hi", "max_output_tokens": 100, "tools": flat}
    for choice, is_g in (({"type": "function", "name": "g"}, True), ("required", False)):
        (item,) = tools.post("/v1/responses", body | {"tool_choice": choice}).json()["output"]
        assert item["type"] == "function_call"
        assert not is_g or item["arguments"] == call["function"]["arguments"]
    named = [
        {"name": function["name"], "input_schema": function["parameters"]} for function in flat
    ]
    body |= {"messages": HELLO["messages"], "max_tokens": 100, "tools": named}
    body = {name: body[name] for name in body if name not in ("input", "max_output_tokens")}
    for choice, is_g in (({"type": "tool", "name": "g"}, True), ({"type": "any"}, False)):
        answer = tools.post("/v1/messages", body | {"tool_choice": choice}).json()
        assert answer["stop_reason"] == "tool_use"
        (block,) = answer["content"]
        assert not is_g or block["input"] == json.loads(call["function"]["arguments"])


def test_a_forced_call_has_no_response_format(tools: Client) -> None:
    """In chats and in Responses."""
    forced = CALL | {"tool_choice": "required"}
    calls = []
    for body in (forced, forced | {"response_format": FORMAT}):
        message = tools.post(CHAT, body).json()["choices"][0]["message"]
        assert message["content"] is None
        calls.append([call["function"] for call in message["tool_calls"]])
    assert calls[0] == calls[1]
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": "hi", "tools": flat, "text": form, "seed": 5, "max_output_tokens": 100}
    chosen = {"type": "function", "name": "g"}
    (item,) = tools.post("/v1/responses", body | {"tool_choice": chosen}).json()["output"]
    assert (item["type"], item["name"]) == ("function_call", "g")


@pytest.mark.parametrize(("opening", "num_calls"), [("[", 1), ("{", 0)])
def test_an_answer_is_a_call_or_has_the_format(
    tools: Client, opening: str, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each API; calls of ``llama3`` begin like objects, so the engine gets another format."""
    monkeypatch.setitem(FORMATS, "llama3", FORMATS["pythonic"])
    # the model would rather begin with this letter than with the other that is allowed
    common = {"seed": 5, "logit_bias": {str(LETTERS.index(opening)): 9.0}}
    functions = [tool["function"] for tool in STRICT]
    named = [
        {"name": f["name"], "input_schema": f["parameters"], "strict": True} for f in functions
    ]
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    body = CALL | common | {"tools": STRICT}
    body |= {"response_format": FORMAT, "parallel_tool_calls": False}
    message = tools.post(CHAT, body).json()["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert len(calls) == num_calls
    if not calls:
        jsonschema.validate(json.loads(message["content"]), SCHEMA)
    common |= {"temperature": 1.0}
    flat = [{"type": "function", **function} for function in functions]
    body = common | {"input": "hi", "max_output_tokens": 100, "tools": flat}
    body |= {"text": {"format": form}, "parallel_tool_calls": False}
    (item,) = tools.post("/v1/responses", body).json()["output"]
    body = common | {"messages": HELLO["messages"], "max_tokens": 100, "tools": named}
    body |= {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    body |= {"output_config": {"format": form}}
    (block,) = tools.post("/v1/messages", body).json()["content"]
    if calls:
        assert item["arguments"] == calls[0]["arguments"]
        assert block["input"] == json.loads(calls[0]["arguments"])
    else:
        assert item["content"][0]["text"] == block["text"] == message["content"]


def test_only_strict_functions_limit_an_answer_with_a_format() -> None:
    """Schemas of others are not read, as without a format: a grammar cannot have all of them."""
    odd = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    function = {"name": "f", "parameters": odd}
    for is_strict in (False, True):
        declared = [{"type": "function", "function": function | {"strict": is_strict}}]
        grammar = Tools(declared, ["f"], format=FORMATS["hermes"]).grammar(JSON, answer=SCHEMA)
        assert ("uniqueItems" in grammar["ebnf"]) == is_strict


def test_grammars_next_to_tools_with_a_format(tools: Client, monkeypatch: Any) -> None:
    monkeypatch.setitem(FORMATS, "llama3", FORMATS["pythonic"])
    body = CALL | {"response_format": FORMAT, "structured_outputs": {"regex": "a"}}
    words = "give only one of tools with response_format, structured_outputs"
    check_refusal(tools, body, "structured_outputs", words)
    tag = {"structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]}
    body = CALL | {"tool_choice": "required"}
    body |= {"response_format": {"type": "structural_tag"} | tag}
    check_refusal(tools, body, "response_format", "give only one of tools, response_format")


def test_a_call_that_is_cut_off(tools: Client) -> None:
    """It has the arguments so far, and the finish reason of the text."""
    body = CALL | {"tool_choice": {"type": "function", "function": {"name": "g"}}}
    for fields, reason in (({"max_tokens": 30}, "length"), ({"stop": '"x"'}, "stop")):
        (choice,) = tools.post(CHAT, body | fields).json()["choices"]
        assert choice["finish_reason"] == reason
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "g"
        arguments = call["function"]["arguments"]
        assert arguments.startswith("{")
        assert not arguments.endswith("}")
        streamed = ""
        for event in tools.post(CHAT, body | fields | {"stream": True}).events():
            for one in event["choices"]:
                for part in one["delta"].get("tool_calls", ()):
                    streamed += part["function"]["arguments"]
                end = one["finish_reason"]
        assert (streamed, end) == (arguments, reason)


@pytest.mark.slow
def test_a_model_that_calls_nothing_answers_with_content(tools: Client) -> None:
    """The same text as without tools in the request."""
    for fields in ({"tool_choice": "auto"}, {"tool_choice": "none"}):
        choice = tools.post(CHAT, CALL | fields).json()["choices"][0]
        assert choice["message"]["content"]
        assert "tool_calls" not in choice["message"]
        streamed = ""
        for event in tools.post(CHAT, CALL | fields | {"stream": True}).events():
            streamed += "".join(x["delta"].get("content") or "" for x in event["choices"])
        assert streamed == choice["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "must not repeat a name"),
        ({"tools": [{"type": "function"}]}, "tools", "function.name"),
        ({"tool_choice": {"function": {"name": "h"}}}, "tool_choice", "must name one of the tools"),
        (
            {"tool_choice": "any"},
            "tool_choice",
            "none, auto, required, a function or allowed_tools",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"multipleOf": 99991}}}],
                "tool_choice": "required",
            },
            "tools",
            "multipleOf of 99991 is not supported",
        ),
        (
            {"tool_choice": "required", "ebnf": 'start: "a"'},
            "tools",
            "give only one of ebnf, tools",
        ),
    ],
)
def test_wrong_tools(tools: Client, fields: dict[str, Any], param: str, words: str) -> None:
    check_refusal(tools, CALL | fields, param, words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OBJECTS)
def test_a_required_call_is_what_the_parser_reads(kind: str) -> None:
    tokenizer = open_target("smollm2-135m", dtype="float32").load_tokenizer()
    compiler = GrammarCompiler(tokenizer.backend.to_str(), 49152, [2], spaces=True)
    key = "parameters" if kind == "llama3" else "arguments"
    call = json.dumps({"name": "g", key: {"x": "b"}})
    text = {"llama3": call, "mistral": f"[{call}]", "pythonic": f"[{call}]"}.get(
        kind, f"<tool_call>\n{call}\n</tool_call>"
    )
    nested = {"$defs": {"A": {"enum": ["a", "b"]}}, "properties": {"x": {"$ref": "#/$defs/A"}}}
    nested |= {"type": "object", "required": ["x"], "additionalProperties": False}
    given = [TOOLS[0], {"type": "function", "function": {"name": "g", "parameters": nested}}]
    asked = Tools(given, ["f", "g"], is_required=True, format=FORMATS[kind])
    ((name, grammar),) = asked.grammar(JSON).items()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert compiler.compile(name, grammar).advance(ids) == len(ids)
    assert FORMATS[kind].parse(text, asked.names) == ("", [ToolCall("g", '{"x": "b"}')])
    twice = text.replace(call, f"{call}, {call}")
    if kind in ("hermes", "qwen25"):
        twice = f"{text}\n{text}"
    ids = tokenizer.encode(twice, add_special_tokens=False)
    for is_parallel in (False, True):
        ((name, grammar),) = asked._replace(is_parallel=is_parallel).grammar(JSON).items()
        is_whole = compiler.compile(name, grammar).advance(ids) == len(ids)
        assert is_whole is (is_parallel and kind != "llama3")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in OBJECTS if kind != "llama3"])
def test_a_text_is_calls_or_a_value_of_a_schema(kind: str) -> None:
    tokenizer = open_target("smollm2-135m", dtype="float32").load_tokenizer()
    compiler = GrammarCompiler(tokenizer.backend.to_str(), 49152, [2], spaces=True)
    asked = Tools(STRICT, ["g"], format=FORMATS[kind])
    ((name, grammar),) = asked.grammar(JSON, answer=SCHEMA).items()
    form = FORMATS[kind].required
    call = f'{form.begin}{form.start("g")}{{"x": "b"}}}}{form.end}'
    assert asked.parse(call, is_final=True) == ("", [ToolCall("g", '{"x": "b"}')])
    assert asked.parse('{"n": 7}', is_final=True) == ('{"n": 7}', [])
    for text, is_allowed in (
        (call, True),
        ('{"n": 7}', True),
        (call.replace('"b"', '"c"'), False),
        ('{"n": "b"}', False),
        ("hi", False),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (compiler.compile(name, grammar).advance(ids) == len(ids)) is is_allowed, text
    assert asked._replace(names=[]).grammar(JSON, answer=SCHEMA) == {}
    for other, answer in (
        (asked._replace(format=FORMATS["llama3"]), SCHEMA),
        (asked, {"type": "array"}),
    ):
        assert other.grammar(JSON, answer=answer, is_possible=False) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hermes", "llama3", "mistral"])
def test_arguments_of_strict_functions_are_limited(kind: str) -> None:
    """Free text, a call of a strict function, and one of another."""
    tokenizer = open_target("smollm2-135m", dtype="float32").load_tokenizer()
    if kind == "mistral":  # whose tag is a token
        tokenizer.backend.add_special_tokens(["[TOOL_CALLS]"])
    compiler = GrammarCompiler(tokenizer.backend.to_str(), 49184, [2], spaces=True)
    strict = TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}
    asked = Tools([strict, TOOLS[1]], ["f", "g"], format=FORMATS[kind])
    assert asked.grammar(JSON, is_possible=False) == {}
    assert asked._replace(format=FORMATS["pythonic"]).grammar(JSON) == {}
    assert asked._replace(declared=TOOLS).grammar(JSON) == {}
    ((name, grammar),) = asked.grammar(JSON).items()
    for call, is_allowed in (
        ('{"name": "f", "arguments": {"x": 2}}', True),
        ('{"name": "f", "arguments": {"x": 3}}', False),
        ('{"name": "g", "arguments": {"y": [3]}}', True),
        ('{"name": "h", "arguments": {}}', False),
    ):
        text = f"Let me see.\n<tool_call>\n{call}\n</tool_call> Done."
        if kind == "llama3":
            text = call.replace("arguments", "parameters")
        elif kind == "mistral":
            text = f"Let me see.[TOOL_CALLS] [{call}]"
            parsed = FORMATS[kind].parse(text, asked.names)
            assert parsed[0] == ("Let me see." if '"h"' not in call else text)
        ids = tokenizer.encode(text, add_special_tokens=False)
        made = compiler.compile(name, grammar)
        assert (made.advance(ids) == len(ids)) is is_allowed, call
        assert not made.is_complete


@pytest.mark.slow
@pytest.mark.parametrize("is_special", [False, True])
def test_marks_of_calls_may_be_tokens(is_special: bool) -> None:
    """As in the tokenizer of Qwen3: forced, optional and strict calls have these tokens."""
    tokenizer = open_target("smollm2-135m", dtype="float32").load_tokenizer()
    marks = ("<tool_call>", "</tool_call>")
    added = [tokenizers.AddedToken(x, special=is_special, normalized=False) for x in marks]
    tokenizer.backend.add_tokens(added)
    token_ids = {mark: tokenizer.backend.token_to_id(mark) for mark in marks}
    compiler = GrammarCompiler(tokenizer.backend.to_str(), 49184, [2], spaces=True)
    strict = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}]
    asked = Tools(strict, ["f"], format=FORMATS["hermes"], token_ids=token_ids)
    service: Any = SimpleNamespace(
        engine=SimpleNamespace(tool_call_parser="hermes", reasoning=None), tokenizer=tokenizer
    )
    how: dict[str, Any] = {"tools": strict, "choice": "auto", "is_parallel": True}
    made = Conversation(service, HELLO["messages"], {}, **how)
    assert made._has_special_marks == is_special
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 2}}\n</tool_call>'
    for parameters, text in (
        (asked._replace(is_required=True).grammar(JSON), f"{call}\n{call}"),
        (asked.grammar(JSON, answer=SCHEMA), f"{call}\n{call}"),
        (asked.grammar(JSON), f"Yes. {call} Done. {call}"),
    ):
        ((name, grammar),) = parameters.items()
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids.count(token_ids["</tool_call>"]) == 2
        made = compiler.compile(name, grammar)
        for i, token in enumerate(ids):
            assert made.mask()[token // 32] >> (token % 32) & 1, (name, i)
            assert made.advance([token]) == 1


def test_a_template_without_tools_gets_a_prompt() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]
    system, *others = with_default_prompt(turns, TOOLS)
    assert system["role"] == "system"
    assert all(json.dumps(tool["function"]) in system["content"] for tool in TOOLS)
    assert others == [
        turns[0],
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        },
        {"role": "user", "content": "<tool_response>\n7\n</tool_response>"},
    ]
    for text, expected in (('{"x":1}', '{"x":1}'), ("no JSON", '"no JSON"')):
        call["function"] = {"name": "f", "arguments": text}
        assert f'"arguments": {expected}}}' in with_default_prompt(turns, TOOLS)[2]["content"]
    own = [{"role": "system", "content": "be brief"}, *turns]
    assert with_default_prompt(own, TOOLS)[0]["content"].startswith("be brief\n\nYou can call")


@pytest.mark.slow
@pytest.mark.parametrize("kind", OBJECTS)
def test_required_calls_are_read_while_they_are_written(kind: str) -> None:
    """At any cut, calls are a beginning of the whole ones, which the parser of the kind reads."""
    begin, key, between, end = FORMATS[kind].required
    arguments = ['{"x": "} \\"é, ]"}', "{}", '{"y": [1, {"z": null}], "x": "</tool_call"}']
    arguments = arguments if between else arguments[:1]
    calls = [f'{{"name": "f", "{key}": {one}}}' for one in arguments]
    text = begin + between.join(calls) + end
    names = ["f", "g"]
    whole = FORMATS[kind].required.calls(text, names)
    assert whole == [ToolCall("f", one) for one in arguments]
    assert [json.loads(one.arguments) for one in FORMATS[kind].parse(text, ["f"])[1]] == [
        json.loads(one) for one in arguments
    ]
    for cut in range(len(text)):
        found = FORMATS[kind].required.calls(text[:cut], names)
        assert found[:-1] == whole[: max(0, len(found) - 1)]
        if found:
            assert whole[len(found) - 1].arguments.startswith(found[-1].arguments)
    tools = Tools(TOOLS, names, is_required=True, is_parallel=False, format=FORMATS[kind])
    assert tools.parse(text, is_final=True) == ("", whole[:1])

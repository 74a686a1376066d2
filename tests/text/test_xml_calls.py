"""Tool calls in XML form: types of values, marks in values, all cuts of a stream, grammars."""

import itertools
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.checkpoints.target import open_target
from specjax.sampling.grammar import LAYOUT, OPTIONS
from specjax.sampling.grammar_compiler import GrammarCompiler
from specjax.server.conversation import Conversation
from specjax.server.fields import ApiError
from specjax.testing.files import TEMPLATE
from specjax.text.parts import TextParts, Tools
from specjax.text.tool_formats import QWEN3_CODER, ToolCall

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "color": {"enum": ["red", "blue"]},
        "size": {"type": "integer"},
        "record": {"type": "object"},
    },
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "record": {"type": "object"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "any": {},
        "model": {"anyOf": [{"$ref": "#/$defs/record"}, {"type": "null"}]},
        "mixed": {"oneOf": [{"type": ["string", "null"]}, {"type": "integer"}]},
        "nested": {"anyOf": [{"anyOf": [{"type": "integer"}]}]},
        "open": {"anyOf": [{}, {"type": "integer"}]},
        "level": {"enum": [1, 2, None]},
        "color": {"$ref": "#/$defs/color"},
        "size": {"$ref": "#/$defs/size"},
        "loop": {"$ref": "#/properties/loop"},
        "lost": {"$ref": "#/$defs/none"},
    },
    "required": ["text", "count"],
}
SCHEMAS = {"f": SCHEMA, "g": {"type": "object", "properties": {}}}
DECLARED = [{"function": {"name": name, "parameters": x}} for name, x in SCHEMAS.items()]
# the same texts, which a type decides
TYPED = [
    ("text", "5", "5"),
    ("text", "", ""),
    ("text", "\n a\n", "\n a\n"),
    ("text", "null", "null"),
    ("count", "5", 5),
    ("count", " -7\n", -7),
    ("count", "5.5", "5.5"),
    ("count", "five", "five"),
    ("ratio", "5", 5),
    ("ratio", "2.5e3", 2500.0),
    ("ratio", "NaN", "NaN"),
    ("flag", "true", True),
    ("flag", "False", False),
    ("flag", "1", "1"),
    ("items", '[1, "<b>", null]', [1, "<b>", None]),
    ("items", '["\\ud800"]', '["\\ud800"]'),
    ("items", "[" * 9999, "[" * 9999),
    ("record", '{"a": {"b": []}}', {"a": {"b": []}}),
    ("record", "{'a': 1}", "{'a': 1}"),
    ("maybe", "None", None),
    ("maybe", "5", "5"),
    ("either", "5", 5),
    ("either", "five", "five"),
    ("any", "5", "5"),
    ("open", "5", "5"),
    ("model", '{"a": 1}', {"a": 1}),
    ("model", "null", None),
    ("mixed", "a", "a"),
    ("mixed", "5", 5),
    ("nested", "5", "5"),
    ("level", "2", 2),
    ("level", "null", None),
    ("color", "red", "red"),
    ("size", "3", 3),
    ("loop", "3", "3"),
    ("lost", "3", "3"),
    ("unknown", "3", "3"),
]


def written(name: str, values: dict[str, str]) -> str:
    parts = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def parse(text: str, *, is_final: bool = True) -> tuple[str, list[tuple[str, Any]]]:
    content, calls = QWEN3_CODER.parse(text, SCHEMAS, is_final=is_final)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("key", "value", "expected"), TYPED)
def test_the_schema_says_what_a_value_is(key: str, value: str, expected: Any) -> None:
    assert parse(written("f", {key: value})) == ("", [("f", {key: expected})])


def test_without_a_schema_values_are_strings() -> None:
    (call,) = QWEN3_CODER.parse(written("f", {"count": "5"}), ("f",))[1]
    assert call == ToolCall("f", '{"count": "5"}')


CALL = written("f", {"text": "Zürich", "count": "2"})
CALLED = ("f", {"text": "Zürich", "count": 2})
EXAMPLES: list[tuple[str, tuple[str, list[tuple[str, Any]]]]] = [
    (f"So:\n\n{CALL}\n{written('g', {})}\n", ("So:", [CALLED, ("g", {})])),
    (f"{CALL} and {CALL} .", (" and  .", [CALLED, CALLED])),
    # marks that models leave out
    (CALL.removesuffix("\n</tool_call>"), ("", [CALLED])),
    (CALL.removeprefix("<tool_call>\n"), ("", [CALLED])),
    (CALL.replace("\n", ""), ("", [CALLED])),
    (f"<tool_call>{CALL}", ("<tool_call>", [CALLED])),
    ("<function=g></function> x", (" x", [("g", {})])),
    # a parameter that is there twice
    (CALL.replace("=count", "=text"), ("", [("f", {"text": "Zürich"})])),
]
OTHERS = [
    written("unknown", {"a": "b"}),
    "<tool_call>\n<function=f>\n<parameter=text>\nx\n</parameter>\n",
    "<tool_call>\n<function=f>\n<parameter=text>\nx</function>\n</tool_call>",
    "<tool_call>\n<function=f>\ntext\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "<tool_call>",
    "a < b <func",
    "<function=",
    "<function=f\n></function>",
    "<function=f",
]


@pytest.mark.parametrize(("text", "parsed"), EXAMPLES)
def test_examples(text: str, parsed: Any) -> None:
    assert parse(text) == parsed


@pytest.mark.parametrize("text", OTHERS)
def test_other_text_is_kept(text: str) -> None:
    assert parse(text) == (text, [])


MARKS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "<parameter=a>"),
    *("</parameter>", "<parameter", "\n", "<", "text", "é", " ", "5", CALL, "<think>", "</think>"),
]


@given(st.lists(st.sampled_from(MARKS), max_size=10).map("".join))
@settings(max_examples=60)
def test_parts_only_grow_to_the_whole(text: str) -> None:
    whole, calls = QWEN3_CODER.parse(text, SCHEMAS)
    before, found = "", list[ToolCall]()
    for end in range(len(text) + 1):
        part, some = QWEN3_CODER.parse(text[:end], SCHEMAS, is_final=False)
        assert whole.startswith(part), text[:end]
        assert part.startswith(before), text[:end]
        assert calls[: len(some)] == some, text[:end]
        assert some[: len(found)] == found, text[:end]
        before, found = part, some
    if not calls:
        assert whole == text


# what a value cannot have: the mark of its end before what may follow it
FREE = st.lists(st.sampled_from([x for x in MARKS if x not in ("</parameter>", CALL)])).map("".join)


@given(st.lists(st.dictionaries(st.sampled_from(["text", "a", "b c"]), FREE), min_size=1), FREE)
@settings(max_examples=40)
def test_marks_in_values_are_text(given_calls: list[dict[str, str]], inner: str) -> None:
    """Also ends of parameters and functions, if no parameter or end follows those of parameters."""
    for values in given_calls:
        if "text" in values:
            values["text"] += "</parameter> </tool_call>" + inner.replace("<parameter=", "")
            values["text"] = values["text"].replace("</parameter> </function>", "")
    text = "".join(written("f", values) for values in given_calls)
    if any("</parameter>\n</function>" in x for values in given_calls for x in values.values()):
        return
    assert parse(text) == ("", [("f", values) for values in given_calls])


def test_unclosed_tags_take_linear_time() -> None:
    for mark in ("<tool_call>", "<tool_call>\n<function=f>", "<function=f><parameter=a>", "<"):
        text, started = mark * 20_000, time.process_time()
        assert parse(text) == (text, [])
        assert parse(text, is_final=False)[1] == []
        assert time.process_time() - started < 2, mark  # linear: 0.1


def test_a_stream_finds_the_types_of_parameters_once() -> None:
    """A small schema with references may have millions of types."""
    names = [f"p{i}" for i in range(100)]
    options = [{"type": "integer"}] * 1000
    schema = {"properties": {x: {"$ref": "#/$defs/any"} for x in names}}
    declared = [{"function": {"name": "f", "parameters": schema}}]
    schema["$defs"] = {"any": {"anyOf": options}}
    parts = TextParts(tools=Tools(declared, ["f"], format=QWEN3_CODER))
    text, started = written("f", dict.fromkeys(names, "1")), time.process_time()
    for end in range(len(text) - 20, len(text)):
        assert parts.read(text[:end], is_final=False)[2] == []
    assert time.process_time() - started < 0.5  # 2 s if they are found for each text
    ((_, call),) = parts.read(text, is_final=True)[2]
    assert json.loads(call.arguments) == dict.fromkeys(names, 1)


def test_grammars_of_many_parameters_take_linear_time() -> None:
    names = [f"p{i}" for i in range(10_000)]
    schema = {"type": "object", "properties": {x: {} for x in names}, "required": names[::-1]}
    started = time.process_time()
    grammar = QWEN3_CODER.required.grammar({"f": schema}, is_parallel=False)
    assert time.process_time() - started < 0.3  # 1.1 s if each is looked up in the list
    assert "part_0_9999?" not in grammar


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_calls_after_reasoning_at_all_cuts(is_required: bool, is_parallel: bool) -> None:
    """As with Qwen3.5: the prompt opens the reasoning, which may name the marks of calls."""
    calls = CALL if is_required else f"I call.\n\n{CALL}"
    text = f"why {CALL[:40]}\n</think>\n\n{calls}\n{written('f', {'text': '</tool_call>'})}"
    numbers = itertools.count()
    tools = Tools(
        DECLARED, ["f", "g"], is_required, is_parallel, QWEN3_CODER, lambda: str(next(numbers))
    )
    rules: dict[str, Any] = {"tools": tools, "may_reason": True, "is_inside": True}
    whole, growing = TextParts(**rules), TextParts(**rules)
    whole.read(text, is_final=True)
    reasoning = content = ""
    arguments = dict[int, str]()
    for end in (*range(len(text) + 1), None):
        more, new, new_calls = growing.read(text[:end], is_final=end is None)
        reasoning, content = reasoning + more, content + new
        for i, call in new_calls:
            arguments[i] = arguments.get(i, "") + call.arguments
    assert reasoning == f"why {CALL[:40]}".strip()
    assert content == ("" if is_required else "I call.")
    expected = [CALLED[1], {"text": "</tool_call>"}][: 1 + is_parallel]
    assert [json.loads(x) for x in arguments.values()] == expected
    assert [json.loads(x.arguments) for x in whole.calls] == expected
    assert growing.ends_with_call


def test_a_required_call_that_is_cut_has_whole_arguments() -> None:
    tools = Tools(DECLARED, ["f"], is_required=True, format=QWEN3_CODER)
    assert tools.parse(CALL[: CALL.index("2\n")], is_final=True) == (
        "",
        [ToolCall("f", '{"text": "Zürich"')],
    )
    for end in range(len(CALL)):
        for call in tools.parse(CALL[:end], is_final=False)[1]:
            assert '{"text": "Zürich", "count": 2}'.startswith(call.arguments)


@pytest.fixture(scope="module")
def compiler() -> tuple[Any, GrammarCompiler]:
    tokenizer = open_target("smollm2-135m", dtype="float32").load_tokenizer()
    return tokenizer, GrammarCompiler(tokenizer.backend.to_str(), 49152, [2], spaces=True)


FULL = {"text": "a </parameter> <b>\n\n", "count": "3", "items": "[1]", "color": "blue"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (CALL, True),
        (written("f", FULL), True),
        (written("g", {}), True),
        (f"{CALL}\n{CALL}", True),
        (f"{CALL}\n\n{CALL}", False),
        (written("f", {"text": ""}), False),
        (written("f", FULL | {"count": "3.5"}), False),
        (written("f", FULL | {"color": "green"}), False),
        (written("f", FULL | {"other": "1"}), False),
        (written("g", {"x": "1"}), False),
        (written("h", {}), False),
        ("text", False),
    ],
)
def test_a_forced_call_follows_its_schema(compiler: Any, text: str, is_allowed: bool) -> None:
    """Numbers, lists and enumerations do; optional parameters may be left out."""
    tokenizer, made = compiler
    tools = Tools(DECLARED, ["f", "g"], is_required=True, format=QWEN3_CODER)
    ((name, grammar),) = tools.grammar({OPTIONS: LAYOUT}).items()
    ids = tokenizer.encode(text, add_special_tokens=False)
    constraint = made.compile(name, grammar)
    assert (constraint.advance(ids) == len(ids)) is is_allowed
    if is_allowed:
        assert tools.parse(text, is_final=True)[1] == QWEN3_CODER.parse(text, SCHEMAS)[1]
        one = tools._replace(is_parallel=False).grammar({OPTIONS: LAYOUT})["ebnf"]
        assert (made.compile("ebnf", one).advance(ids) == len(ids)) is (text.count("<function") < 2)


@pytest.mark.slow
def test_a_schema_may_refer_to_that_of_its_parameters(compiler: Any) -> None:
    """As models that contain themselves do."""
    node = {"count": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}
    node = {"type": "object", "properties": node, "required": ["count"]}
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    declared = [{"function": {"name": "f", "parameters": schema}}]
    tools = Tools(declared, ["f"], is_required=True, format=QWEN3_CODER)
    tokenizer, made = compiler
    grammar = tools.grammar({OPTIONS: LAYOUT})["ebnf"]
    for values, is_allowed in (
        ({"count": "3"}, True),
        ({"count": "3", "next": '{"count": 4, "next": {"count": 5}}'}, True),
        ({"count": "3", "next": '{"count": "4"}'}, False),
        ({"count": '{"count": 3}'}, False),
        ({}, False),
    ):
        text = written("f", values)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (made.compile("ebnf", grammar).advance(ids) == len(ids)) is is_allowed, text
        if is_allowed:
            ((call,), expected) = tools.parse(text, is_final=True)[1], values.items()
            assert json.loads(call.arguments) == {key: json.loads(x) for key, x in expected}


WRONG: list[Any] = [
    {"properties": 5},
    {"properties": {"a": 5, "b": True, "c": None}, "required": 7},
    {"properties": {"a": {"enum": 5}, "b": {"type": [[1], {}]}, "c": {"anyOf": {}}}},
    {"properties": {"a": {"enum": []}, "b": {"$ref": 5}, "c": {"$ref": "#/a/b"}, "d": [1]}},
    {"properties": {"a": {"anyOf": [5, None]}, "b": {"enum": ["a", 1, {}]}}, "required": [["a"]]},
    # enumerations next to the types of strings
    {"properties": {"a": {"anyOf": [{"type": "string"}], "enum": [1]}}},
    {"properties": {"a": {"oneOf": [{"enum": ["x"]}], "enum": 5}}},
    {"properties": {"a": {"type": "string", "enum": {"x": 1}}}},
    {"$ref": "#/$defs/lost", "properties": 5},
]


@pytest.mark.slow
@pytest.mark.parametrize("schema", WRONG)
def test_schemas_that_are_wrong_or_unknown_limit_nothing(compiler: Any, schema: Any) -> None:
    declared = [{"function": {"name": "f", "parameters": schema | {"type": "object"}}}]
    tools = Tools(declared, ["f"], is_required=True, format=QWEN3_CODER)
    values = {key: f"{key}!" for key in ("a", "b", "c", "d")}
    text = written("f", values)
    assert json.loads(tools.parse(text, is_final=True)[1][0].arguments) == values
    tokenizer, made = compiler
    grammar = tools.grammar({OPTIONS: LAYOUT})["ebnf"]
    known = schema["properties"] if isinstance(schema["properties"], dict) else values
    ids = tokenizer.encode(written("f", {x: values[x] for x in known}), add_special_tokens=False)
    assert made.compile("ebnf", grammar).advance(ids) == len(ids)


@pytest.mark.slow
def test_a_text_is_calls_or_an_object(compiler: Any) -> None:
    """Functions that are not strict take any parameters."""
    tokenizer, made = compiler
    declared = [DECLARED[0] | {"function": DECLARED[0]["function"] | {"strict": True}}, DECLARED[1]]
    answer = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = Tools(declared, ["f", "g"], format=QWEN3_CODER)
    ((name, grammar),) = tools.grammar({OPTIONS: LAYOUT}, answer=answer).items()
    for text, is_allowed in (
        ('{"n": 7}', True),
        (CALL, True),
        (written("g", {"x y": "1"}), True),
        (written("f", {"text": "a"}), False),
        ("hi", False),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (made.compile(name, grammar).advance(ids) == len(ids)) is is_allowed, text
    assert tools.grammar({OPTIONS: LAYOUT}) == {}


@pytest.mark.slow
@pytest.mark.parametrize("is_special", [False, True])
def test_marks_of_calls_may_be_tokens(is_special: bool) -> None:
    tokenizer = open_target("smollm2-135m", dtype="float32").load_tokenizer()
    marks = ("<tool_call>", "</tool_call>")
    added = [tokenizers.AddedToken(x, special=is_special, normalized=False) for x in marks]
    tokenizer.backend.add_tokens(added)
    token_ids = {mark: tokenizer.backend.token_to_id(mark) for mark in marks}
    made = GrammarCompiler(tokenizer.backend.to_str(), 49184, [2], spaces=True)
    tools = Tools(DECLARED, ["f"], is_required=True, format=QWEN3_CODER, token_ids=token_ids)
    grammar = tools.grammar({OPTIONS: LAYOUT})["ebnf"]
    ids = tokenizer.encode(f"{CALL}\n{CALL}", add_special_tokens=False)
    assert ids.count(token_ids["</tool_call>"]) == 2
    constraint = made.compile("ebnf", grammar)
    for token in ids:
        assert constraint.mask()[token // 32] >> (token % 32) & 1
        assert constraint.advance([token]) == 1
    service: Any = SimpleNamespace(
        engine=SimpleNamespace(tool_call_parser="qwen3_coder", reasoning=None), tokenizer=tokenizer
    )
    tokenizer.chat_template = "{{ tools }}"
    how: dict[str, Any] = {"tools": DECLARED, "choice": "auto", "is_parallel": True}
    messages = [{"role": "user", "content": "hi"}]
    assert Conversation(service, messages, {}, **how)._has_special_marks == is_special
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(ApiError, match="the chat template does not read tools"):
        Conversation(service, messages, {}, **how)

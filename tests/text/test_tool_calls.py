"""Tool calls in text, whole and in pieces."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.text.tool_calls import FORMATS, MAX_PYTHON, ToolCall, parse_tool_calls

NAMES = ("get_weather", "add")
WEATHER, ADD = {"city": "Zürich"}, {"a": 1, "b": [2, {"c": None}]}


def calls(*found: tuple[str, object]) -> list[ToolCall]:
    return [ToolCall(name, json.dumps(value, ensure_ascii=False)) for name, value in found]


BOTH = calls(("get_weather", WEATHER), ("add", ADD))
# as in the model cards of Qwen2.5, Hermes 2, Llama 3.1 and 3.2, and Mistral 7B v0.3
EXAMPLES = [
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": null}]}}'
        "\n</tool_call>",
        ("Let me see.", BOTH),
    ),
    (
        "qwen25",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}',
        ("", calls(("add", {"a": 2}))),
    ),
    (
        "llama3",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich"}};'
        ' {"name": "add", "parameters": {"a": 1, "b": [2, {"c": null}]}}',
        ("", BOTH),
    ),
    ("llama3", '{"name": "add", "parameters": {"a": 1}};\n', ("", calls(("add", {"a": 1})))),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": null}</tool_call>',
        ("", calls(("add", {}))),
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich"}}, {"name": "add", '
        '"arguments": {"a": 1, "b": [2, {"c": null}]}}]',
        ("", BOTH),
    ),
    ("mistral", 'Yes.[TOOL_CALLS]add[ARGS]{"a": 1}', ("Yes.", calls(("add", {"a": 1})))),
    ("mistral", ' [{"name": "add", "arguments": {"a": 1}}]', ("", calls(("add", {"a": 1})))),
    ("pythonic", '[{"name": "add", "arguments": {"a": 1}}]', ("", calls(("add", {"a": 1})))),
    ("pythonic", "[get_weather(city='Zürich'), add(a=1, b=[2, {'c': None}])]", ("", BOTH)),
]
# texts without a valid call of these functions
OTHERS = [
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> so'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": }</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", "a < b and <tool_cal"),
    ("llama3", '{"name": "add", "parameters": {"a": 1}'),
    ("llama3", '{"some": "object"}; and text'),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[1, 2] are numbers"),
    ("mistral", '[{"name": "unknown", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS]add[ARGS]{"),
    ("llama3", '; {"name": "add", "parameters": {"a": 1}}'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'),
    ("pythonic", "[add(a=1e999)]"),
    ("pythonic", "[add(**{'a': 1})]"),
    ("pythonic", "[add(a=open('x'))]"),
    ("pythonic", "[add(1)]"),
    ("pythonic", "[1, 2, 3] is a list"),
    ("pythonic", "[" * 5000),
]


@pytest.mark.parametrize(("kind", "text", "parsed"), EXAMPLES)
def test_published_examples(kind: str, text: str, parsed: object) -> None:
    assert parse_tool_calls(kind, text, NAMES) == parsed


@pytest.mark.parametrize(("kind", "text"), OTHERS)
def test_other_text_is_kept(kind: str, text: str) -> None:
    assert parse_tool_calls(kind, text, NAMES) == (text, [])


MARKS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", ";", "<"),
        *('{"name": "add", "arguments": {"a": 1}}', '[{"name": "add", "arguments": {}}]', "\n"),
        *("add(a=1)", "[add(a=1)]", "[", "]", "{", "}", '"', "text", "é", "<tool", "_call>", " "),
    ]
)
TEXTS = st.lists(MARKS, max_size=10).map("".join) | st.sampled_from(
    [text for _, text, _ in EXAMPLES]
)


@given(st.sampled_from(sorted(FORMATS)), TEXTS)
def test_parts_only_grow_to_the_whole(kind: str, text: str) -> None:
    content, found = parse_tool_calls(kind, text, NAMES)
    before: tuple[str, list[ToolCall]] = "", []
    for end in range(len(text) + 1):
        part, some = parse_tool_calls(kind, text[:end], NAMES, is_final=False)
        assert content.startswith(part), (text[:end], part)
        assert found[: len(some)] == some
        assert part.startswith(before[0])
        assert some[: len(before[1])] == before[1]
        before = part, some
    if not found:
        assert content == text


def test_a_required_call_may_be_longer_than_python_text() -> None:
    value = {"a": "x" * MAX_PYTHON}
    text = json.dumps([{"name": "add", "arguments": value}])
    assert parse_tool_calls("pythonic", text, NAMES) == ("", calls(("add", value)))


def test_unclosed_tags_take_linear_time() -> None:
    text = "<tool_call>" * 20_000
    started = time.process_time()
    assert parse_tool_calls("hermes", text, NAMES) == (text, [])
    assert time.process_time() - started < 0.1

"""Tool calls in text, whole and in pieces."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.text.tool_formats import FORMATS, MAX_PYTHON, ToolCall

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
    (
        "mistral",
        '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]x[ARGS]'
        '{"city": "Zürich"}',
        ("", calls(("add", {"a": 1}), ("get_weather", WEATHER))),
    ),
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
    ("mistral", "[TOOL_CALLS]add[ARGS]"),
    ("mistral", "[TOOL_CALLS]add[ARGS][TOOL_CALLS]add[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]add[CALL_ID]x{}"),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1} and text'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}} text</tool_call>'),
    ("hermes", "<tool_call></tool_call>"),
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
def test_published_examples(kind: str, text: str, parsed: tuple[str, list[ToolCall]]) -> None:
    content, expected = parsed
    placed = [call._replace(at=len(content)) for call in expected]
    assert FORMATS[kind].parse(text, NAMES) == (content, placed)


def test_calls_have_their_place_in_the_content() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    content, found = FORMATS["hermes"].parse(f"A \n{call}{call} B{call}\n", NAMES)
    assert content == "A \n B"
    assert [content[: call.at] for call in found] == ["A", "A", "A \n B"]


@pytest.mark.parametrize(("kind", "text"), OTHERS)
def test_other_text_is_kept(kind: str, text: str) -> None:
    assert FORMATS[kind].parse(text, NAMES) == (text, [])


MARKS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", ";", "<"),
        *('{"name": "add", "arguments": {"a": 1}}', '[{"name": "add", "arguments": {}}]', "\n"),
        *('{"name": "add", "arguments": {"a": "', '\\"', '"}}', "1", "[CALL_ID]", "null"),
        *("add(a=1)", "[add(a=1)]", "[", "]", "{", "}", '"', "text", "é", "<tool", "_call>", " "),
    ]
)
TEXTS = st.lists(MARKS, max_size=10).map("".join) | st.sampled_from(
    [text for _, text, _ in EXAMPLES]
)


@given(st.sampled_from(sorted(FORMATS)), TEXTS)
def test_parts_only_grow_to_the_whole(kind: str, text: str) -> None:
    content, found = FORMATS[kind].parse(text, NAMES)
    before: tuple[str, list[ToolCall]] = "", []
    for end in range(len(text) + 1):
        part, some = FORMATS[kind].parse(text[:end], NAMES, is_final=False)
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
    assert FORMATS["pythonic"].parse(text, NAMES) == ("", calls(("add", value)))


def test_unclosed_tags_take_linear_time() -> None:
    text = "<tool_call>" * 20_000
    started = time.process_time()
    assert FORMATS["hermes"].parse(text, NAMES) == (text, [])
    assert time.process_time() - started < 0.1


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # strings with the marks of all formats
    | st.lists(st.one_of(MARKS, st.characters(codec="utf-8")), max_size=4).map("".join),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(MARKS, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(MARKS, VALUES, max_size=3)


def written(kind: str, found: list[ToolCall], is_spaced: bool) -> str:
    """A text with calls in the form of a model family."""
    space = "\n " if is_spaced else ""
    key = "parameters" if kind == "llama3" else "arguments"
    objects = [
        f'{{"name":{space} "{call.name}", "{key}": {call.arguments}{space}}}' for call in found
    ]
    if kind in ("hermes", "qwen25"):
        return "Now:" + "".join(f"{space}<tool_call>{x}{space}</tool_call>" for x in objects)
    if kind == "llama3":
        return "<|python_tag|>" + ";".join(objects)
    if kind == "list":
        return f"[{', '.join(objects)}]"
    if kind == "pythonic":
        words = [
            ", ".join(f"{name}={value!r}" for name, value in json.loads(call.arguments).items())
            for call in found
        ]
        calls_ = (f"{call.name}({text})" for call, text in zip(found, words, strict=True))
        return f"[{', '.join(calls_)}]"
    if kind == "mistral":
        return f"Now: [TOOL_CALLS]{space}[{', '.join(objects)}]"
    marks = {"args": "", "id": "[CALL_ID]a1b2c3d4e"}[kind]
    return "".join(
        f"[TOOL_CALLS]{call.name}{marks}[ARGS]{space}{call.arguments}{space}" for call in found
    )


@given(
    st.sampled_from("hermes qwen25 llama3 list pythonic mistral args id".split()),
    st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=50)
def test_marks_in_strings_are_text(
    kind: str, given_calls: list[tuple[str, dict[str, object]]], is_spaced: bool
) -> None:
    """Whole, and in all cuts: what a part has is never taken back."""
    if kind == "pythonic":
        renamed = [
            (name, {f"x{i}": value for i, value in enumerate(values.values())})
            for name, values in given_calls
        ]
        given_calls = renamed  # type: ignore[assignment]
    text = written(kind, calls(*given_calls), is_spaced)
    parser = {"list": "mistral", "args": "mistral", "id": "mistral"}.get(kind, kind)
    content = "Now:" if text.startswith("Now:") else ""
    found = [call._replace(at=len(content)) for call in calls(*given_calls)]
    assert FORMATS[parser].parse(text, NAMES) == (content, found)
    for end in range(0, len(text), 1 + len(text) // 40):
        part, some = FORMATS[parser].parse(text[:end], NAMES, is_final=False)
        assert content.startswith(part)
        assert found[: len(some)] == some

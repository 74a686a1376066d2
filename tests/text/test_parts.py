"""Parts of an answer's text, as it grows."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.text.parts import TextParts, Tools
from specjax.text.reasoning import END, START
from specjax.text.tool_formats import FORMATS

MARKS = st.sampled_from(
    [
        *(START, END, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "<", "\n", "text"),
        *('{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": {}}', ", ", "é"),
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    ]
)
TEXTS = st.lists(MARKS, max_size=8).map("".join)


def numbered(**options: object) -> Tools:
    numbers = itertools.count()
    return Tools(names=["f"], new_id=lambda: str(next(numbers)).zfill(12), **options)  # type: ignore[arg-type]


@given(TEXTS, st.sampled_from(sorted(FORMATS)), *[st.booleans()] * 5)
@settings(max_examples=40)
def test_what_is_new_adds_up_to_the_parts(
    text: str, kind: str, required: bool, parallel: bool, reasons: bool, opened: bool, apart: bool
) -> None:
    options = {"is_required": required, "is_parallel": parallel, "format": FORMATS[kind]}
    rules = {"may_reason": reasons, "is_inside": opened, "is_separate": apart}
    at_once = TextParts(tools=numbered(**options), **rules)
    at_once.read(text, is_final=True)
    growing = TextParts(tools=numbered(**options), **rules)
    reasoning, content, calls = "", "", dict[int, list[str]]()
    for end in (*range(len(text) + 1), None):
        more, added, new_calls = growing.read(text[:end], is_final=end is None)
        reasoning, content = reasoning + more, content + added
        for i, call in new_calls:
            known = calls.setdefault(i, [call.name, call.id, ""])
            assert (call.name, call.id) in ((known[0], known[1]), ("", ""))
            known[2] += call.arguments
    assert (reasoning, content) == (at_once.reasoning, at_once.content)
    assert [(name, arguments, call_id) for name, call_id, arguments in calls.values()] == [
        tuple(call) for call in at_once.calls
    ]
    if not apart or not reasons:
        assert reasoning == ""
    if not parallel:
        assert len(calls) <= 1


@pytest.mark.parametrize("is_parallel", [False, True])
def test_calls_after_the_first_need_parallel_calls(is_parallel: bool) -> None:
    text = 2 * '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parts = TextParts(tools=numbered(format=FORMATS["hermes"], is_parallel=is_parallel))
    assert len(parts.read(text, is_final=True)[2]) == len(parts.calls) == 1 + is_parallel


@pytest.mark.parametrize(
    ("kind", "call_id"), [("hermes", "call_000000000000"), ("mistral", "000000000")]
)
def test_a_required_call_grows_after_reasoning(kind: str, call_id: str) -> None:
    form = FORMATS[kind].required
    arguments = json.dumps({"x": [1, "}"]})
    text = f"why{END}\n\n{form.begin}{form.start('f')}{arguments}}}{form.end}"
    parts = TextParts(
        tools=numbered(is_required=True, format=FORMATS[kind]), may_reason=True, is_inside=True
    )
    cut = text.index("[1") + 2
    assert parts.read("why", is_final=False) == ("why", "", [])
    assert parts.read(text[:cut], is_final=False)[2] == [(0, ("f", '{"x": [1', call_id, 0))]
    assert not parts.ends_with_call
    assert parts.read(text, is_final=True) == ("", "", [(0, ("", ', "}"]}', "", 0))])
    assert parts.ends_with_call
    assert (parts.reasoning, parts.content) == ("why", "")

"""Tool calls in the text of a completion, in the formats of several model families.

``hermes`` and ``qwen25``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number.
``llama3``: the text is ``{"name": ..., "parameters": {...}}``, several of them with ``;`` between,
after ``<|python_tag|>`` or without it. ``mistral``: ``[TOOL_CALLS]`` and a list of objects, or a
name, ``[ARGS]`` and the arguments. ``pythonic``: the text is a list of Python calls.

A parser reads the whole text so far, so its result cannot depend on how the text was cut. What it
has returned for a part of a text only grows. Text that is not a valid call stays content.
"""

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

START, END = "<tool_call>", "</tool_call>"
PYTHON_TAG, MISTRAL_TAG, MISTRAL_ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"
_DECODER = json.JSONDecoder()
_BLOCK = re.compile(f"{re.escape(START)}(.*?){re.escape(END)}", re.DOTALL)
MAX_PYTHON = 2**16  # characters of a list of Python calls


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: str  # JSON text of an object


Parsed = tuple[str, list[ToolCall]]


def parse_tool_calls(
    kind: str, text: str, names: Collection[str], *, is_final: bool = True
) -> Parsed:
    """Return the content of a completion and its calls of functions with these ``names``.

    If the text is not final, a part that may still become a call is left out. Content next to
    calls has no white space around it.
    """
    content, calls = FORMATS[kind](text, names, is_final)
    if calls or not is_final:
        content = content.rstrip()
    return content, calls


def _hermes(text: str, names: Collection[str], is_final: bool) -> Parsed:
    content, calls, at = "", list[ToolCall](), 0
    for block in _BLOCK.finditer(text):
        call = _object_call(block[1], names)
        content += text[at : block.start() if call else block.end()]
        calls += [call] if call else []
        at = block.end()
    rest = text[at:]
    begin = rest.find(START)
    if begin < 0:
        return content + rest[: len(rest) - (0 if is_final else _overlap(rest, START))], calls
    if not is_final:
        return content + rest[:begin], calls
    # the end tag may be missing, because it is an end token of some models
    call = _object_call(rest[begin + len(START) :], names)
    return content + (rest[:begin] if call else rest), calls + ([call] if call else [])


def _llama3(text: str, names: Collection[str], is_final: bool) -> Parsed:
    body = text.lstrip()
    if not is_final and (PYTHON_TAG.startswith(body) or body.startswith(("{", PYTHON_TAG))):
        return "", []
    found = [_call_of(value, names) for value in _objects(body.removeprefix(PYTHON_TAG))]
    calls = [call for call in found if call is not None]
    return ("", calls) if calls and len(calls) == len(found) else (text, [])


def _mistral(text: str, names: Collection[str], is_final: bool) -> Parsed:
    begin = text.find(MISTRAL_TAG)
    if begin < 0:
        return text[: len(text) - (0 if is_final else _overlap(text, MISTRAL_TAG))], []
    if not is_final:
        return text[:begin], []
    calls = list[ToolCall]()
    for part in text[begin:].split(MISTRAL_TAG)[1:]:
        name, mark, arguments = part.partition(MISTRAL_ARGS)
        if mark:
            value: Any = [{"name": name.strip(), "arguments": _json(arguments)}]
        else:
            value = _json(part)
        made = [_call_of(one, names) for one in value] if isinstance(value, list) else [None]
        if None in made or not made:
            return text, []
        calls += [call for call in made if call is not None]
    return text[:begin], calls


def _pythonic(text: str, names: Collection[str], is_final: bool) -> Parsed:
    body = text.strip().removeprefix(PYTHON_TAG)
    if not is_final:
        return ("", []) if PYTHON_TAG.startswith(body) or body[0] in "[<" else (text, [])
    if not body.startswith("[") or len(body) > MAX_PYTHON:
        return text, []
    try:
        tree = ast.parse(body, mode="eval").body
        assert isinstance(tree, ast.List)
        calls = [_python_call(item, names) for item in tree.elts]
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError, TypeError):
        return text, []
    return ("", calls) if calls else (text, [])


FORMATS: dict[str, Callable[[str, Collection[str], bool], Parsed]] = {
    "hermes": _hermes,
    "qwen25": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "pythonic": _pythonic,
}


def _python_call(node: ast.expr, names: Collection[str]) -> ToolCall:
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    assert node.func.id in names
    assert not node.args
    values = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
    assert None not in values
    return ToolCall(node.func.id, json.dumps(values, ensure_ascii=False, allow_nan=False))


def _json(text: str) -> Any:
    """A JSON value with nothing after it; ``None`` if the text is not one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _objects(text: str) -> Iterator[Any]:
    """JSON values with semicolons between them; ``None`` for text that is none."""
    at = 0
    while at < len(text.rstrip()):
        at += len(text[at:]) - len(text[at:].lstrip(" \n\t\r;"))
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield None
            return
        yield value


def _object_call(text: str, names: Collection[str]) -> ToolCall | None:
    return _call_of(_json(text), names)


def _call_of(value: Any, names: Collection[str]) -> ToolCall | None:
    """The call that an object describes, if it is one of a known function."""
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write JSON text
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of a text that begins a mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)

"""Tool calls in the text of a completion, in the formats of several model families.

``hermes`` and ``qwen25``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number.
``llama3``: the text is ``{"name": ..., "parameters": {...}}``, several of them with ``;`` between,
after ``<|python_tag|>`` or without it. ``mistral``: ``[TOOL_CALLS]`` and a list of objects, or a
name, ``[ARGS]`` and the arguments; ``[CALL_ID]`` and an id may follow the name. ``pythonic``: the
text is a list of Python calls. With the last two, a text that is a JSON list of objects is a list
of calls too: required calls have this form. Marks within a string of JSON are part of the string.
``qwen3_coder``: functions in XML form between the marks of ``hermes``, see ``xml_calls``.
``gpt-oss``: messages, see ``harmony``.

A parser reads the whole text so far, so its result cannot depend on how the text was cut. What it
has returned for a part of a text only grows. Text that is not a valid call stays content.
"""

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from specjax.text import harmony
from specjax.text.reasoning import overlap
from specjax.text.xml_calls import (
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    Parameters,
    beginnings,
    body_of,
    parameter_schema,
    read_arguments,
    types_of,
)

START, END = "<tool_call>", "</tool_call>"
PYTHON_TAG, MISTRAL_TAG = "<|python_tag|>", "[TOOL_CALLS]"
MISTRAL_ID, MISTRAL_ARGS = "[CALL_ID]", "[ARGS]"
_DECODER = json.JSONDecoder()
# reads integers of any length; the limit of Python's integers is lower than a text may have
_SCANNER = json.JSONDecoder(parse_int=float)
_SEPARATORS = re.compile(r"[\s;]*")
_SPACE = re.compile(r"[ \t\n\r]*")
_MARKS = re.compile(f"({START}|{END})")
MAX_PYTHON = 2**16  # characters of a list of Python calls


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: str  # JSON text of an object
    id: str = ""
    at: int = 0  # number of characters of the content that come before the call


Parsed = tuple[str, list[ToolCall]]


class CallForm(NamedTuple):
    """The text of calls that a grammar forces: objects with a name and arguments."""

    begin: str = "["
    key: str = "arguments"
    between: str = ", "  # empty if there can be only one call
    end: str = "]"

    def start(self, name: str) -> str:
        """The text of a call before its arguments."""
        return f'{{"name": {json.dumps(name)}, "{self.key}": '

    def calls(self, text: str, names: Collection[str]) -> list[ToolCall]:
        """The calls in a text of this form; the arguments of the last may be incomplete."""
        starts = {self.start(name): name for name in names}
        text, at, before, calls = text.lstrip(), 0, self.begin, list[ToolCall]()
        while start := next((x for x in starts if text.startswith(before + x, at)), None):
            at += len(before + start)
            end = _end(text, at)
            calls.append(ToolCall(starts[start], text[at:end]))
            if end is None or not self.between:
                break
            at, before = end + len("}"), self.between
        return calls

    def grammar(
        self,
        schemas: Mapping[str, Any],
        *,
        is_parallel: bool,
        answer: Any | None = None,
        token_ids: Mapping[str, int] = MappingProxyType({}),
    ) -> str:
        """The grammar (EBNF) of texts that must be calls of functions with these schemas.

        If there is a schema of an ``answer``, the text may also be a JSON value of it.
        ``token_ids`` are of marks that are tokens, which are not found as text.
        """
        begin, between, end = (
            _as_rule(text, token_ids) for text in (self.begin, self.between, self.end)
        )
        repetition = f" ({between} call)*" if is_parallel and self.between else ""
        rules = [
            "start: calls" if answer is None else "start: calls | answer",
            f"calls: {begin} call{repetition} {end}",
            f"call: {' | '.join(f'call_{i}' for i in range(len(schemas)))}",
        ]
        if answer is not None:
            rules.append(f"answer: %json {json.dumps(answer)}")
        # each schema is a rule of its own, so that its references keep their root
        for i, (name, schema) in enumerate(schemas.items()):
            rules += self.rules(i, name, schema)
        return "\n".join([*rules, ""])

    def rules(self, i: int, name: str, schema: Any) -> list[str]:
        """The rules of function ``i``, of which the first is ``call_i``."""
        call = f'call_{i}: {json.dumps(self.start(name))} values_{i} "}}"'
        return [call, f"values_{i}: %json {json.dumps(schema)}"]

    def tag(self, schemas: Mapping[str, Any]) -> str:
        """The structural tag of texts that may have calls of functions with these schemas."""
        tags = [
            {"begin": self.begin + self.start(name), "schema": schema, "end": f"}}{self.end}"}
            for name, schema in schemas.items()
        ]
        trigger = self.begin.split()[0] if self.begin else '{"name": "'
        return json.dumps({"structures": tags, "triggers": [trigger]})


def _as_rule(text: str, token_ids: Mapping[str, int]) -> str:
    """Write a text in a grammar, with the tokens of marks in it."""
    pieces = [piece for piece in _MARKS.split(text) if piece]
    rules = [f"<[{token_ids[x]}]>" if x in token_ids else json.dumps(x) for x in pieces]
    return " ".join(rules) or '""'


class XmlForm(CallForm):
    """Calls in XML form. A grammar limits strings by their enumeration only."""

    def start(self, name: str) -> str:
        return f"{FUNCTION}{name}>\n"

    def calls(self, text: str, names: Collection[str]) -> list[ToolCall]:
        text, at, before, calls = text.lstrip(), 0, self.begin, list[ToolCall]()
        while text.startswith(before, at) and (tag := _NAME.match(text, at + len(before))):
            arguments, end = read_arguments(text, tag.end(), _parameters(names, tag[1]))
            if tag[1] not in names or (written := _dump(arguments or {})) is None:
                break
            if arguments is None or end < 0:
                return [*calls, ToolCall(tag[1], written[:-1])]
            calls.append(ToolCall(tag[1], written))
            at, before = end, self.between
        return calls

    def rules(self, i: int, name: str, schema: Any) -> list[str]:
        shared = {x: schema[x] for x in schema if x == "definitions" or x.startswith(("$", "x-"))}
        shared.pop("$ref", None)  # of the whole, not of a parameter
        body = body_of(schema)
        body = body if isinstance(body, Mapping) else {}
        properties, stated = body.get("properties"), body.get("required")
        # a set, because schemas may have 100,000 parameters
        required = {x for x in stated if isinstance(x, str)} if isinstance(stated, list) else set()
        end, parts = f"\n{PARAMETER_END}\n", [json.dumps(self.start(name))]
        rules = [rf"text_{i}[lazy]: /(?s:.*)\n<\/parameter>\n/"]
        if not isinstance(properties, Mapping):
            parts.append(rf'("{PARAMETER}" /[^<>\n]+/ ">\n" text_{i})*')
            properties = {}
        for j, (key, value) in enumerate(properties.items()):
            found = parameter_schema(schema, key)
            types, rule = types_of(found, schema), f"text_{i}"
            texts = found["enum"] if types == {"string"} and "enum" in found else []
            if texts and isinstance(texts, list) and all(isinstance(x, str) for x in texts):
                rule = f"({' | '.join(json.dumps(x + end) for x in texts)})"
            elif types and "string" not in types:
                rules.append(f"json_{i}_{j}: %json {json.dumps(value | shared)}")
                rule = f"json_{i}_{j} {json.dumps(end)}"
            begin = f"{PARAMETER}{key}>\n"
            rules.append(f"part_{i}_{j}: {json.dumps(begin)} {rule}")
            parts.append(f"part_{i}_{j}{'' if key in required else '?'}")
        return [f"call_{i}: {' '.join(parts)} {json.dumps(FUNCTION_END)}", *rules]


class HarmonyForm(CallForm):
    """A call with its header, and the reasoning before it; the completion begins in a header."""

    def grammar(self, schemas: Mapping[str, Any], **options: Any) -> str:
        rules = super().grammar(schemas, **options).replace("start: ", "start: analysis* ", 1)
        return rules + harmony.RULES

    def rules(self, i: int, name: str, schema: Any) -> list[str]:
        to, channel = json.dumps(f" to=functions.{name}"), f'{harmony.CHANNEL} "commentary"'
        header = f"({channel} {to} | {to} {channel}) kind? {harmony.MESSAGE}"
        return [f"call_{i}: {header} values_{i}", f"values_{i}: %json {json.dumps(schema)}"]


LIST = CallForm()


class ToolFormat(NamedTuple):
    """The calls of a model family: how a text is parsed, and what a grammar can force."""

    parser: Callable[[str, Collection[str], bool], Parsed]
    required: CallForm = LIST
    optional: CallForm | None = None  # ``None`` if no schema can limit calls that are not required
    is_special: bool = False  # whether texts without special tokens lack the marks
    id_form: str = "call_{}"  # makes the id of a call from a unique text

    def parse(self, text: str, names: Collection[str], *, is_final: bool = True) -> Parsed:
        """Return the content of a completion and its calls of functions with these ``names``.

        A mapping also has the :class:`Parameters` of each, or their schema, for values in XML.

        If the text is not final, a part that may still become a call is left out. Content next to
        calls has no white space around it.
        """
        content, calls = self.parser(text, names, is_final)
        return content.rstrip() if calls or not is_final else content, calls


def _end(text: str, at: int) -> int | None:
    """The end of the JSON value that begins at a position; ``None`` if it is not complete."""
    try:
        return _SCANNER.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return None


def is_json(text: str) -> bool:
    """Whether the arguments of a call are complete, which those of a forced call may not be."""
    return _end(text, 0) == len(text)


def _hermes(text: str, names: Collection[str], is_final: bool) -> Parsed:
    content, calls, at = "", list[ToolCall](), 0
    while (begin := text.find(START, at)) >= 0:
        value, after = _read(text, begin + len(START))
        # a text that goes on may complete the value, even if it has an end tag, in a string
        end = text.find(END, max(after, begin)) if is_final or after >= 0 else -1
        # the end tag may be missing, because it is an end token of some models
        is_last = end < 0 and is_final and after == len(text)
        call = _call_of(value, names) if end == after or is_last else None
        if end < 0:
            content += text[at:] if is_final and call is None else text[at:begin]
            return content, calls + _after(content, call)
        end += len(END)
        content += text[at : begin if call else end]
        calls += _after(content, call)
        at = end
    return content + text[at : len(text) - (0 if is_final else overlap(text[at:], START))], calls


def _after(content: str, *calls: ToolCall | None) -> list[ToolCall]:
    """Calls with their place after a content, without its white space at the end."""
    return [call._replace(at=len(content.rstrip())) for call in calls if call is not None]


def _llama3(text: str, names: Collection[str], is_final: bool) -> Parsed:
    body = text.lstrip()
    may_call = body.startswith(("{", PYTHON_TAG))
    if not is_final and (may_call or PYTHON_TAG.startswith(body)):
        return "", []
    calls = _object_calls(body.removeprefix(PYTHON_TAG), names) if may_call else []
    return ("", calls) if calls else (text, [])


def _mistral(text: str, names: Collection[str], is_final: bool) -> Parsed:
    begin, is_list = text.find(MISTRAL_TAG), text.lstrip().startswith("[")
    if begin < 0 and not is_list:
        return text[: len(text) - (0 if is_final else overlap(text, MISTRAL_TAG))], []
    if not is_final:
        return "" if is_list else text[:begin], []
    if calls := _calls_of(_json(text), names):
        return "", calls
    at = max(begin, 0)
    while text.startswith(MISTRAL_TAG, at):
        start = at + len(MISTRAL_TAG)
        value, at = _read(text, start)
        if not isinstance(value, list) and (end := text.find(MISTRAL_ARGS, start)) >= 0:
            arguments, at = _read(text, end + len(MISTRAL_ARGS))
            name, _, _ = text[start:end].partition(MISTRAL_ID)
            value = [{"name": name.strip(), "arguments": arguments}] * (arguments is not None)
        if not (new_calls := _calls_of(value, names)):
            return text, []
        calls += new_calls
    if not calls or at < len(text):
        return text, []
    return text[:begin], _after(text[:begin], *calls)


def _pythonic(text: str, names: Collection[str], is_final: bool) -> Parsed:
    body = text.strip().removeprefix(PYTHON_TAG)
    if not is_final:
        return ("", []) if PYTHON_TAG.startswith(body) or body[0] in "[<" else (text, [])
    if calls := _calls_of(_json(body), names):
        return "", calls
    if not body.startswith("[") or len(body) > MAX_PYTHON:
        return text, []
    try:
        tree = ast.parse(body, mode="eval").body
        items = tree.elts if isinstance(tree, ast.List) else []
        calls = [_python_call(item, names) for item in items]
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        return text, []
    return ("", calls) if calls else (text, [])


_NAME = re.compile(rf"{FUNCTION}([^<>\n]+)>")
_XML_CALL = re.compile(rf"(?:{START}\s*)?{_NAME.pattern}")
_XML_END = re.compile(rf"\s*{END}")
_XML_END_BEGIN = re.compile(rf"\s*(?:{beginnings(END)})?\Z")
# the end of a text that may become _XML_CALL
_XML_BEGIN = re.compile(
    rf"(?:(?:{START}\s*)?(?:{FUNCTION}[^<>\n]*|{beginnings(FUNCTION)})|{START}\s*"
    rf"|{beginnings(START)})\Z"
)


def _qwen3_coder(text: str, names: Collection[str], is_final: bool) -> Parsed:
    content, calls, at = "", list[ToolCall](), 0
    while begin := _XML_CALL.search(text, at):
        name = begin[1]
        arguments, end = read_arguments(text, begin.end(), _parameters(names, name))
        if end >= 0 and arguments is not None:
            if tag := _XML_END.match(text, end):
                end = tag.end()
            elif not is_final and _XML_END_BEGIN.match(text, end):
                end = -1
        if end < 0:
            return content + text[at : None if is_final else begin.start()], calls
        written = _dump(arguments) if arguments is not None and name in names else None
        content += text[at : end if written is None else begin.start()]
        calls += _after(content, None if written is None else ToolCall(name, written))
        at = end
    held = None if is_final else _XML_BEGIN.search(text, at)
    return content + text[at : held.start() if held else None], calls


def _parameters(names: Collection[str], name: str) -> Parameters:
    found = names.get(name) if isinstance(names, Mapping) else None
    return found if isinstance(found, Parameters) else Parameters(found)


_TAGS = CallForm(f"{START}\n", between=f"\n{END}\n{START}\n", end=f"\n{END}")
_OBJECT = CallForm("", "parameters", "", "")
HERMES = ToolFormat(_hermes, _TAGS, _TAGS)
QWEN3_CODER = ToolFormat(_qwen3_coder, XmlForm(*_TAGS))
NO_FORMAT = ToolFormat(lambda text, names, is_final: (text, []))
FORMATS = {
    "hermes": HERMES,
    "qwen25": HERMES,
    "llama3": ToolFormat(_llama3, _OBJECT, _OBJECT),
    # templates of Mistral demand ids of nine letters or digits
    "mistral": ToolFormat(_mistral, LIST, CallForm(f"{MISTRAL_TAG} [", between=""), True, "{:.9}"),
    "pythonic": ToolFormat(_pythonic),
    "qwen3_coder": QWEN3_CODER,
    # its reader finds calls by tokens, not in the text
    harmony.NAME: NO_FORMAT._replace(required=HarmonyForm("", between="", end="")),
}


def _python_call(node: ast.expr, names: Collection[str]) -> ToolCall:
    """Raises ValueError for anything but a call of a known function with constant keywords."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("not a call with keywords only")
    values = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords if word.arg}
    text = _dump(values)
    if node.func.id not in names or text is None or len(values) < len(node.keywords):
        raise ValueError("an unknown function, or arguments that are not JSON")
    return ToolCall(node.func.id, text)


def _json(text: str) -> Any:
    """A JSON value with nothing after it; ``None`` if the text is not one."""
    value, end = _read(text, 0)
    return value if end == len(text) else None


def _read(text: str, at: int) -> tuple[Any, int]:
    """Read a JSON value and the white space around it; return the value and its end, or -1."""
    try:
        value, end = _DECODER.raw_decode(text, _skip(_SPACE, text, at))
    except (ValueError, RecursionError):
        return None, -1
    return value, _skip(_SPACE, text, end)


def _skip(space: re.Pattern[str], text: str, at: int) -> int:
    return space.match(text, at).end()  # type: ignore[union-attr]


def _object_calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """Calls with semicolons between them; none if anything else is there."""
    values, at = [], 0
    while at >= 0 and (at := _skip(_SEPARATORS, text, at)) < len(text):
        value, at = _read(text, at)
        values.append(value)
    return _calls_of(values, names)


def _calls_of(value: Any, names: Collection[str]) -> list[ToolCall]:
    """The calls that a list of objects describes; none if anything else is in it."""
    calls = [_call_of(item, names) for item in value] if isinstance(value, list) else []
    return [] if None in calls else [call for call in calls if call is not None]


def _call_of(value: Any, names: Collection[str]) -> ToolCall | None:
    """The call that an object describes, if it is one of a known function."""
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if arguments is None:
        arguments = {}
    elif isinstance(arguments, str):  # some models write JSON text
        arguments = _json(arguments)
    if not isinstance(arguments, dict) or (text := _dump(arguments)) is None:
        return None
    return ToolCall(value["name"], text)


def _dump(value: dict[str, Any]) -> str | None:
    """JSON text that every client can read; ``None`` for NaN, infinity and lone surrogates."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        return None
    return text

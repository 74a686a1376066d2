"""Functions called in XML form, whose values have no quotes: their schema says what they are.

``<function=name>``, then ``<parameter=key>``, the value and ``</parameter>`` for each argument, and
``</function>``. A string is taken as it is, without the line breaks next to its tags. Other values
are JSON, or ``True``, ``False`` and ``None``; a value of another type than its schema is a string.
A value ends at the first ``</parameter>`` before a parameter or the end of the function, so that
it may contain tags.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"


def beginnings(mark: str) -> str:
    """A pattern of the texts that a mark begins with, without the whole mark."""
    return "|".join(mark[:n] for n in range(1, len(mark)))


_KEY = re.compile(rf"\s*{PARAMETER}([^<>\n]+)>\n?")
_VALUE_END = re.compile(rf"\n?{PARAMETER_END}(?=\s*(?:{PARAMETER}[^<>\n]+>|{FUNCTION_END}))")
_END = re.compile(rf"\s*{FUNCTION_END}")
# the end of a text that may become a parameter or the end of the function
_UNDECIDED = re.compile(
    rf"\s*(?:{PARAMETER}[^<>\n]*|{beginnings(PARAMETER)}|{beginnings(FUNCTION_END)})?\Z"
)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES: dict[type, set[str]] = {
    dict: {"object"},
    list: {"array"},
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
}
MAX_REFERENCES = 16  # from one schema to the next


class Parameters:
    """The types of the parameters of a function, found once: a stream reads a text many times."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._types: dict[str, set[str]] = {}

    def types(self, key: str) -> set[str]:
        if key not in self._types:
            self._types[key] = types_of(parameter_schema(self._schema, key), self._schema)
        return self._types[key]


def read_arguments(text: str, at: int, parameters: Parameters) -> tuple[dict[str, Any] | None, int]:
    """Read the arguments of a function from the end of its first tag on; return the end too.

    If the text ends before the function does, the end is -1, and the arguments are those so far. If
    the text has another form, there are none, and the end is where it begins.
    """
    arguments: dict[str, Any] = {}
    while key := _KEY.match(text, at):
        if (end := _VALUE_END.search(text, key.end())) is None:
            return arguments, -1
        value = text[key.end() : end.start()]
        arguments.setdefault(key[1], _typed(value, parameters.types(key[1])))
        at = end.end()
    if last := _END.match(text, at):
        return arguments, last.end()
    return (arguments, -1) if _UNDECIDED.match(text, at) else (None, at)


def body_of(schema: Any) -> Any:
    """The schema that has the parameters of a function: its own, or the one that it refers to."""
    has_properties = _get(schema, "properties") is not None
    return schema if has_properties else _resolved(schema, schema)


def parameter_schema(schema: Any, key: str) -> Any:
    """The schema of a parameter of a function; None if it is not known."""
    return _resolved(_get(_get(body_of(schema), "properties"), key), schema)


def _resolved(found: Any, root: Any) -> Any:
    """The schema to which another refers in the end; None if it is not found."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(reference := _get(found, "$ref"), str):
            return found
        found = root
        for step in reference.removeprefix("#/").split("/"):
            found = _get(found, step)
    return None


def _get(schema: Any, key: str) -> Any:
    return schema.get(key) if isinstance(schema, Mapping) else None


def types_of(found: Any, root: Any) -> set[str]:
    """The JSON types that a parameter of the schema ``root`` permits; none if it does not say."""
    options = _get(found, "anyOf") or _get(found, "oneOf")
    options = options if isinstance(options, list) else [found]
    each = [_own_types(_resolved(option, root)) for option in options]
    return set[str]().union(*each) if all(each) else set()


def _own_types(schema: Any) -> set[str]:
    if isinstance(values := _get(schema, "enum"), list):
        return set[str]().union(*(_TYPES.get(type(value), set()) for value in values))
    kinds = _get(schema, "type")
    return {x for x in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(x, str)}


def _typed(text: str, types: set[str]) -> Any:
    if types <= {"string"}:
        return text
    written = text.strip()
    try:
        value = json.loads(_WORDS.get(written, written))
        # clients cannot read NaN, infinity and lone surrogates
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value if _TYPES[type(value)] & types else text

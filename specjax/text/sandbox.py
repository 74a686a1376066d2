"""Renders chat templates in a separate process, which imports nothing else from the package.

The process runs this file. Requests come on standard input: 8 bytes of length, then a pickle of the
template, the variables and the time limit in seconds. Answers are lines of JSON: a success flag,
and the text or the error message. A rendering that takes too long ends the process.
"""

import contextlib
import datetime
import functools
import json
import pickle
import resource
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_BYTES, _MAX_CHARACTERS = 2**30, 2**23


class _GenerationBlock(Extension):
    """Renders the body of ``{% generation %}``, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    # jinja2's filter escapes <, > and &; the model would see the escapes
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
)
_ENVIRONMENT.filters["tojson"] = _to_json
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
_compile = functools.lru_cache(maxsize=16)(_ENVIRONMENT.from_string)


class _Arguments(dict[str, Any]):
    """Arguments of a tool call: an object, and JSON text if a template prints or joins it."""

    def __init__(self, items: Iterable[tuple[str, Any]], text: str, uses: set[str]) -> None:
        super().__init__(items)
        self._text, self._uses = text, uses  # templates cannot read names with an underscore

    def __str__(self) -> str:
        self._uses.add("text")
        return self._text

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)

    def __missing__(self, key: Any) -> str:
        if isinstance(key, int):  # names of arguments are texts
            return str(self)[key]
        raise KeyError(key)

    def __len__(self) -> int:
        self._uses.add("object or text")
        return super().__len__()

    def __contains__(self, item: object) -> bool:
        self._uses.add("object or text")
        return super().__contains__(item)


def _adapt(messages: Iterable[Any], uses: set[str]) -> Iterator[dict[str, Any]]:
    """Let templates use arguments of tool calls as objects and as text; yield the functions."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            with contextlib.suppress(
                AttributeError, KeyError, TypeError, ValueError, RecursionError
            ):
                function = call.get("function", call)
                value = function["arguments"]
                text = value if isinstance(value, str) else _to_json(value)
                values = json.loads(text or "{}") if text is value else value
                function["arguments"] = _Arguments(values.items(), text, uses)
                yield function


def _render(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template, with arguments of tool calls as text alone if it needs that.

    It does if it fails with objects, or if it prints arguments and also asks for their length or
    for what is in them, which an object and its text answer differently.
    """
    uses: set[str] = set()
    functions = list(_adapt(variables["messages"], uses))
    compiled, text, failure = _compile(template), "", None
    try:
        text = compiled.render(variables)
    except Exception as error:
        failure = error
    if functions and (failure or len(uses) == 2):
        for function in functions:
            function["arguments"] = str(function["arguments"])
        with contextlib.suppress(Exception):  # the template needs objects
            return compiled.render(variables)
    if failure:
        raise failure
    return text


def _answer(request: bytes) -> tuple[bool, str]:
    try:
        template, variables, seconds = pickle.loads(request)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        text = _render(template, variables)
        if len(text) > _MAX_CHARACTERS:
            raise ValueError("the rendered text is too long")
        return True, text
    except Exception as error:  # a template can cause any exception
        is_own = isinstance(error, jinja2.TemplateError | ValueError)
        return False, str(error) if is_own else f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _serve() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    while size := sys.stdin.buffer.read(8):
        print(json.dumps(_answer(sys.stdin.buffer.read(int.from_bytes(size)))), flush=True)


if __name__ == "__main__":
    _serve()

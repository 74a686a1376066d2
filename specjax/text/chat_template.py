"""Rendering of chat templates: Jinja in its immutable sandbox, since they come with checkpoints.

The helpers that templates rely on (``raise_exception``, ``tojson``, ``strftime_now``, loop
controls, ``{% generation %}``) behave as in transformers.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlock(Extension):
    """``{% generation %}`` marks assistant text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and &, which would reach the model
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def render_chat_template(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Text of a conversation.

    Args:
        template: Jinja source.
        messages: the turns, each at least ``{"role": ..., "content": ...}``.
        variables: what else the template sees, for example ``add_generation_prompt``.

    Raises:
        ValueError: if there is no message, one is malformed, or the template refuses them.
    """
    if not messages:
        raise ValueError("messages=[] is a conversation without turns; give at least one")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"messages[{i}]={message!r} must be a mapping with a 'role' string and a 'content'"
            )
    try:
        plain = [dict(message) for message in messages]
        return _compile(template).render(messages=plain, **variables)
    # a template that adds content to a string meets content of another type with a TypeError
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refused the conversation: {error}") from error

"""Conversations as OpenAI writes them."""

from dataclasses import dataclass
from typing import Any

import msgspec

from specjax.checks import short
from specjax.engine.requests import encode_conversation
from specjax.server.body import Body
from specjax.server.errors import ApiError
from specjax.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
# fields of the request itself
_RESERVED = ("messages", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True)
class Conversation:
    """Messages with plain text, and what else the chat template is told."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]

    def ids(self, tokenizer: Tokenizer | None, context_length: int) -> list[int]:
        """Token ids of what the chat template makes of it."""
        if tokenizer is None:
            raise ApiError(400, "the server has no tokenizer; give /v1/completions token ids")
        return encode_conversation(tokenizer, context_length, self.messages, **self.variables)


def take_conversation(body: Body) -> Conversation:
    """The messages of a request, with what concerns the chat template."""
    messages = body.take("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    variables = body.take("chat_template_kwargs", {})
    if not isinstance(variables, dict) or any(name in _RESERVED for name in variables):
        raise ApiError(
            400,
            f"chat_template_kwargs must be an object without {', '.join(_RESERVED)}",
            param="chat_template_kwargs",
        )
    if body.peek("tool_choice") == "none" and "tools" in body:
        variables["tools"] = tools = body.take("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ApiError(400, f"tools={short(tools)} must be a list of objects", param="tools")
    for name, default in zip(_RESERVED[1:], (True, False), strict=True):
        variables[name] = body.flag(name, default)
    if all(variables[name] for name in _RESERVED[1:]):
        message = "continue_final_message=true needs add_generation_prompt=false"
        raise ApiError(400, message, param="continue_final_message")
    return Conversation([_message(i, m) for i, m in enumerate(messages)], variables)


def _message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} must be an object", param=where)
    fields = Body(message)
    role = fields.take("role")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role must be one of {', '.join(ROLES)}", param=where)
    plain = {
        # the newer name of the same role, which templates do not know
        "role": "system" if role == "developer" else role,
        "content": _text(where, fields.take("content")),
    }
    if (name := fields.take("name")) is not None:
        if not isinstance(name, str):
            raise ApiError(400, f"{where}.name must be a string", param=where)
        plain["name"] = name
    if calls := fields.take("tool_calls"):
        plain["tool_calls"] = _tool_calls(where, calls)
    for neutral in ("refusal", "annotations", "audio", "function_call"):
        if value := fields.take(neutral):
            raise ApiError(400, f"{where}.{neutral}={short(value)} is not supported", param=where)
    # of a template's own making, such as the reasoning of an earlier answer
    return plain | {name: fields.take(name) for name in fields.left}


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Calls of an earlier answer; templates want arguments as objects, and clients send JSON."""
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        message = f"{where}.tool_calls={short(calls)} must be a list of calls with a function"
        raise ApiError(400, message, param=where)
    return [call | {"function": _with_object(call["function"])} for call in calls]


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return function
    return function | {"arguments": arguments} if isinstance(arguments, dict) else function


def _text(where: str, content: Any) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content must be a string or a list of parts", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            message = f"{where}.content has a part of type {short(kind)}; only text is supported"
            raise ApiError(400, message, param=where)
        texts.append(text)
    return "\n".join(texts)

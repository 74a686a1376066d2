"""Conversations as OpenAI writes them."""

from dataclasses import dataclass
from typing import Any

from specjax.server.body import Body
from specjax.server.errors import ApiError
from specjax.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
# fields of the request itself
_RESERVED = ("messages", "add_generation_prompt")


class TooSlowError(Exception):
    """The chat template cannot be waited for here."""


@dataclass(frozen=True)
class Conversation:
    """Messages with plain text, and what else the chat template is told."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    variables: dict[str, Any]

    def ids(self, tokenizer: Tokenizer | None, *, is_quick: bool = False) -> list[int]:
        """Token ids of what the chat template makes of it; TooSlowError if ``is_quick`` fails."""
        if tokenizer is None:
            raise ApiError(400, "the server has no tokenizer; give /v1/completions token ids")
        scope = self.variables | {"add_generation_prompt": self.add_generation_prompt}
        text = tokenizer.try_chat_template(self.messages, scope, is_quick=is_quick)
        if text is None:
            raise TooSlowError
        return tokenizer.encode(text, add_special_tokens=False)


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
    adds = body.flag("add_generation_prompt", True)
    return Conversation([_message(i, m) for i, m in enumerate(messages)], adds, variables)


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
    for neutral in ("refusal", "annotations", "audio", "tool_calls", "function_call"):
        if value := fields.take(neutral):
            raise ApiError(400, f"{where}.{neutral}={value!r} is not supported", param=where)
    # of a template's own making, such as the reasoning of an earlier answer
    return plain | {name: fields.take(name) for name in fields.left}


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
            message = f"{where}.content has a part of type {kind!r}; only text is supported"
            raise ApiError(400, message, param=where)
        texts.append(text)
    return "\n".join(texts)

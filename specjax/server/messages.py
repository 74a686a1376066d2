"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from specjax.checks import CONTEXT_EXCEEDED
from specjax.scheduling.loop import Call
from specjax.server.answers import Result
from specjax.server.blocks import Block, BlocksAnswer, make_call
from specjax.server.conversation import Conversation, effort_variables, merge_system, texts_of
from specjax.server.exchange import dump
from specjax.server.fields import (
    SAMPLING,
    ApiError,
    Body,
    bad_value,
    client_names,
    finish_fields,
    get,
)
from specjax.server.service import Service

# a block of agents that differs in every request, so that no prefix would be found in the cache
BILLING = "x-anthropic-billing-header:"
SIGNATURE = "unsigned"  # clients keep no block of thinking without a signature
_IGNORED = (
    "betas cache_control container context_management inference_geo mcp_servers speed".split()
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none", None: "auto"}
# field of a function in chat completions -> a tool's, in the order that templates show
_FUNCTION = {
    "name": "name",
    "description": "description",
    "parameters": "input_schema",
    "strict": "strict",
}
_STOPS = {"call": "tool_use", "length": "max_tokens", "abort": "pause_turn"}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def read_message(service: Service, body: Body) -> tuple[Call, "MessageAnswer"]:
    """Check a request, render its chat template and tokenise the text."""
    model = service.check_model(body)
    thinking, tags = body.take("thinking"), service.engine.reasoning
    conversation = take_conversation(service, body, thinking)
    has_budget = tags is not None and service.engine.has_grammars
    if has_budget and get(thinking, "type") == "enabled":
        body.put("thinking_token_budget", thinking.get("budget_tokens"))
    for name in _IGNORED:
        body.take(name)
    if body.take("n", 1) != 1:
        raise ApiError(400, "n is not supported: a message has one answer", param="n")
    body.put("stop", body.take("stop_sequences"))
    names = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "thinking_token_budget": "thinking.budget_tokens",
    }
    call, common = make_call(
        service, body, model, conversation, id_prefix="msg", prompt="messages", names=names
    )
    return call, MessageAnswer(**common, num_prompt_tokens=len(call.requests[0].input_ids))


def count_tokens(service: Service, body: Body) -> bytes:
    """Count the tokens of a prompt."""
    service.check_model(body)
    conversation = take_conversation(service, body, body.take("thinking"))
    for name in (*_IGNORED, *SAMPLING, "stop_sequences", "stream"):
        body.take(name)
    finish_fields(body, service.ignored_fields)
    with client_names("messages"):
        return dump({"input_tokens": len(conversation.encode())}).encode()


def take_conversation(service: Service, body: Body, thinking: Any) -> Conversation:
    """Take the messages, the system prompt, the tools, and the options of thinking and output."""
    choice = body.take("tool_choice", {})
    kind = get(choice, "type")
    named: Any
    if kind == "tool":
        named = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str | None) and kind in _CHOICES and isinstance(choice, dict):
        named = _CHOICES[kind]
    else:
        raise bad_value("tool_choice", choice, "must have the type auto, any, tool or none")
    output = body.take("output_config", {})
    if not isinstance(output, dict):
        raise bad_value("output_config", output, "must be an object")
    if (form := body.take("output_format", output.get("format"))) is not None:
        if get(form, "type") != "json_schema" or get(form, "schema") is None:
            raise bad_value("output_config.format", form, "must be json_schema with a schema")
        body.put("response_format", {"type": "json_schema", "json_schema": form})
    variables = effort_variables("output_config.effort", output.get("effort"))
    if (kind := get(thinking, "type")) in ("enabled", "adaptive", "disabled"):
        variables["enable_thinking"] = kind != "disabled"
    elif thinking is not None:
        raise bad_value("thinking", thinking, "must have the type enabled, adaptive or disabled")
    messages = _read_messages(body.take("messages"))
    if system := _system(body.take("system")):
        messages.insert(0, {"role": "system", "content": system})
    last = messages[-1]
    is_text = "tool_calls" not in last and bool(last["content"].strip())
    is_continued = last["role"] == "assistant" and is_text
    variables |= {"add_generation_prompt": not is_continued, "continue_final_message": is_continued}
    return Conversation(
        service,
        merge_system(messages),
        variables,
        tools=read_tools(service, body.take("tools", [])),
        choice=named,
        is_parallel=choice.get("disable_parallel_tool_use") is not True,
    )


def read_tools(service: Service, tools: Any) -> Any:
    """Bring tools into the form of chat completions; those that a server runs are left out."""
    if not isinstance(tools, list):
        return tools
    functions = []
    for tool in tools:
        kind = get(tool, "type") or "custom"
        if kind != "custom":
            service.ignored_fields.add(f"tools.{kind}")
            continue
        items = ((ours, get(tool, theirs)) for ours, theirs in _FUNCTION.items())
        function = {name: value for name, value in items if value is not None}
        functions.append({"type": "function", "function": function})
    return functions


def _texts(where: str, content: Any) -> list[str]:
    return texts_of(f"{where}.content", content, param="messages", noun="block")


def _system(system: Any) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "\n".join(
        text for text in texts_of("system", system, noun="block") if not text.startswith(BILLING)
    )


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    """Turn messages into the form of chat completions; a result of a tool is a message there."""
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    plain: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where, role = f"messages[{i}]", get(message, "role")
        content = get(message, "content")
        if role == "assistant":
            converted = [_assistant(where, content)]
        elif role == "user":
            converted = list(_user(where, content))
        elif role == "system":
            converted = [{"role": role, "content": _system(content)}]
        else:
            raise ApiError(400, f"{where}.role must be user, assistant or system", param="messages")
        # adjacent messages of the user are one turn
        if converted and plain and converted[0]["role"] == plain[-1]["role"] == "user":
            plain[-1]["content"] += f"\n{converted.pop(0)['content']}"
        plain += converted
    if not plain:
        raise ApiError(400, "messages have no content", param="messages")
    return plain


def _user(where: str, content: Any) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content must be a string or a list", param="messages")
    texts = []
    for block in content:
        if get(block, "type") != "tool_result":
            texts.append(block)
            continue
        result = "\n".join(_texts(where, block.get("content") or []))
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
    if texts:
        yield {"role": "user", "content": "\n".join(_texts(where, texts))}


def _assistant(where: str, content: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise ApiError(400, f"{where}.content must be a string or a list", param="messages")
    texts = []
    for block in blocks:
        if (kind := get(block, "type")) == "thinking":
            if isinstance(text := block.get("thinking"), str) and text:
                message["reasoning_content"] = message.get("reasoning_content", "") + text
        elif kind == "tool_use":
            name, value = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(value, dict):
                raise ApiError(400, f"{where} needs tool_use.name and .input", param="messages")
            function = {"name": name, "arguments": json.dumps(value, ensure_ascii=False)}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            texts.append(block)
    message["content"] = "".join(_texts(where, texts))
    return message


@dataclass(eq=False, kw_only=True)
class MessageAnswer(BlocksAnswer):
    """A message with blocks of content, and its events."""

    num_prompt_tokens: int

    def response(self, meta: Result, num_reasoning: int) -> Result:
        content = [content_of(block) for block in self.blocks]
        return self._message(content, usage=_usage(meta), **self._stop(meta), **self.token_ids())

    def begin(self) -> Iterator[Result]:
        usage = {"input_tokens": self.num_prompt_tokens, "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], usage=usage)}

    def begin_block(self, block: Block) -> Iterator[Result]:
        content = content_of(block)
        if block.kind == "reasoning":  # its signature is the last delta
            content["signature"] = ""
        yield {"type": "content_block_start", "index": block.index, "content_block": content}

    def grow_block(self, block: Block, text: str) -> Result:
        kind, name = {
            "reasoning": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        return _delta(block, {"type": kind, name: text})

    def end_block(self, block: Block) -> Iterator[Result]:
        if block.kind == "reasoning":
            yield _delta(block, {"type": "signature_delta", "signature": SIGNATURE})
        yield {"type": "content_block_stop", "index": block.index}

    def end(self, meta: Result, num_reasoning: int) -> Iterator[Result]:
        delta = {"type": "message_delta", "delta": self._stop(meta), "usage": _usage(meta)}
        yield delta | self.token_ids()
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> bytes:
        return self.event(_error(error))

    def _message(self, content: list[Result], **fields: Any) -> Result:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **fields,
        }

    def _stop(self, meta: Result) -> Result:
        matched = meta["finish_reason"].get("matched")
        stop_sequence = matched if isinstance(matched, str) else None
        reason = "end_turn" if stop_sequence is None else "stop_sequence"
        reason = _STOPS.get(self.stop_kind(meta), reason)
        return {"stop_reason": reason, "stop_sequence": stop_sequence}


def content_of(block: Block) -> Result:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
        case "text":
            return {"type": "text", "text": block.text}
    assert block.call is not None
    try:
        value = msgspec.json.decode(block.text or "{}")
    except (RecursionError, ValueError):  # cut by max_tokens, or nothing that clients can read
        value = {}
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": value}


def _delta(block: Block, delta: Result) -> Result:
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _usage(meta: Result) -> Result:
    """Count tokens; the cached ones are not among ``input_tokens``."""
    cached = meta["cached_tokens"]
    return {
        "input_tokens": meta["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": meta["completion_tokens"],
    }


def _error(error: ApiError) -> Result:
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else _KINDS[400])
    message = error.message
    if error.code == CONTEXT_EXCEEDED:  # clients recognise these words, then shorten the prompt
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_json(error: ApiError) -> bytes:
    """Return the body of an error response in this API's form."""
    return dump(_error(error)).encode()

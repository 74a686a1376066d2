"""``/v1/responses``: OpenAI's Responses API, without state between requests.

The whole history comes in ``input``. With ``include=["reasoning.encrypted_content"]``, items of
reasoning carry their text in a form that clients send back.
"""

import base64
import binascii
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from specjax.scheduling.loop import Call
from specjax.server.answers import MAX_LOGPROBS, Result
from specjax.server.blocks import Block, BlocksAnswer, make_call
from specjax.server.conversation import (
    Conversation,
    effort_variables,
    make_message,
    merge_system,
    texts_of,
)
from specjax.server.fields import ApiError, Body, bad_value, get
from specjax.server.service import Service

_ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_STATELESS = "this server keeps no responses; send the whole history in input"
# fields of a request that need what the server does not have, and values that ask for nothing
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "previous_response_id": (_STATELESS, ()),
    "conversation": (_STATELESS, ()),
    "prompt": ("this server keeps no prompts; send instructions and input", ()),
    "background": ("requests are synchronous", (False,)),
    "n": ("a response has one answer; use /v1/chat/completions", (1,)),
}
_IGNORED = (
    "client_metadata context_management max_tool_calls moderation stream_options truncation".split()
)


def read_response(service: Service, body: Body) -> tuple[Call, "ResponseAnswer"]:
    """Check a request, render its chat template and tokenise the text."""
    model = service.check_model(body)
    for name, (reason, neutral) in _REFUSED.items():
        value = body.take(name)
        if value is not None and value not in neutral:
            raise bad_value(name, value, f"is not supported: {reason}", code="unsupported_field")
    for name in _IGNORED:
        body.take(name)
    fields = {name: body.take(name) for name in ("instructions", "tools", "tool_choice", "text")}
    fields |= {name: body.take(name) for name in ("reasoning", "metadata", "store", "user")}
    for name in ("text", "reasoning"):
        if not isinstance(fields[name], dict | None):
            raise bad_value(name, fields[name], "must be an object")
    include = body.take("include", [])
    if not isinstance(include, list):
        raise bad_value("include", include, "must be a list")
    wants_logprobs = _LOGPROBS in include
    num_top = body.integer("top_logprobs", 0, at_least=0, at_most=MAX_LOGPROBS)
    if num_top and not wants_logprobs:
        message = f"top_logprobs={num_top} needs include=[{_LOGPROBS!r}]"
        raise ApiError(400, message, param="top_logprobs")
    is_parallel = body.flag("parallel_tool_calls", True)
    tools = read_tools(service, fields["tools"] or [])
    variables = effort_variables("reasoning.effort", get(fields["reasoning"], "effort"))
    conversation = Conversation(
        service,
        merge_system(read_input(body.take("input", []), fields["instructions"])),
        variables | {"add_generation_prompt": True},
        tools=tools,
        choice=read_choice(service, fields["tool_choice"] or "auto"),
        is_parallel=is_parallel,
    )
    if wants_logprobs and conversation.tools.names:
        demand = "is not supported with tools; set tool_choice='none' or use /v1/chat/completions"
        raise bad_value("include", include, demand)
    limit = body.take("max_output_tokens")
    body.put("max_tokens", limit)
    body.put("response_format", _response_format(get(fields["text"], "format")))
    names = {"max_new_tokens": "max_output_tokens", "response_format": "text.format"}
    call, common = make_call(
        service,
        body,
        model,
        conversation,
        id_prefix="resp",
        prompt="input",
        names=names | {"top_logprobs_num": "top_logprobs"},
        num_top=num_top if wants_logprobs else None,
    )
    params = call.requests[0].params
    return call, ResponseAnswer(
        **common,
        encrypts=_ENCRYPTED in include,
        request={
            "instructions": fields["instructions"],
            "max_output_tokens": limit,
            "metadata": fields["metadata"] or {},
            "parallel_tool_calls": is_parallel,
            "reasoning": fields["reasoning"] or {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": fields["text"] or {"format": {"type": "text"}},
            "tool_choice": fields["tool_choice"] or "auto",
            "tools": fields["tools"] or [],
            "top_logprobs": num_top,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": fields["user"],
        },
    )


def read_tools(service: Service, tools: Any) -> Any:
    """Bring functions into the form of chat completions; other tools are left out."""
    if not isinstance(tools, list):
        return tools
    functions = []
    for tool in tools:
        if (kind := get(tool, "type")) == "function":
            keys = ("name", "description", "parameters", "strict")
            function = {key: tool[key] for key in keys if tool.get(key) is not None}
            functions.append({"type": "function", "function": function})
        elif isinstance(kind, str):
            service.ignored_fields.add(f"tools.{kind}")
        else:
            raise bad_value("tools", tools, "must be a list of objects with a type")
    return functions


def read_choice(service: Service, choice: Any) -> Any:
    """Bring ``tool_choice`` into the form of chat completions."""
    if not isinstance(choice, dict):
        return choice
    if (kind := choice.get("type")) == "function":
        return {"type": kind, "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        tools = read_tools(service, choice.get("tools"))
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": tools}}
    demand = "must be none, auto, required, a function or allowed_tools"
    raise bad_value("tool_choice", choice, demand)


def _response_format(text_format: Any) -> Any:
    kind, schema = (get(text_format, key) for key in ("type", "schema"))
    if kind == "json_schema" and schema is not None:
        return {"type": kind, "json_schema": {"schema": schema}}
    if text_format is None or kind in ("text", "json_object"):
        return text_format
    demand = "must have the type text, json_object, or json_schema with a schema"
    raise bad_value("text.format", text_format, demand)


def read_input(items: Any, instructions: Any = None) -> list[dict[str, Any]]:
    """Turn the items of a history into messages in the form of chat completions.

    Adjacent items of the assistant become one message.
    """
    if not isinstance(instructions, str | None):
        raise bad_value("instructions", instructions, "must be a string")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str) or items == []:  # clients probe with an empty list
        return [*messages, {"role": "user", "content": items or ""}]
    if not isinstance(items, list):
        raise bad_value("input", items, "must be a string or a list of items")
    turn: dict[str, Any] | None = None  # the assistant's message that further items belong to

    def assistant() -> dict[str, Any]:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        return turn

    for i, item in enumerate(items):
        where, kind = f"input[{i}]", get(item, "type") or "message"
        if kind == "reasoning":
            if text := _reasoning(item):
                message = assistant()
                message["reasoning_content"] = message.get("reasoning_content", "") + text
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not all(isinstance(value, str) for value in function.values()):
                raise ApiError(400, f"{where} must have name and arguments", param="input")
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            turn = None
            content = _text(where, item.get("output"))
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            messages.append(result)
        elif kind == "message":
            message = make_message(where, {"role": get(item, "role")})
            message["content"] = _text(where, get(item, "content"))
            if message["role"] == "assistant" and turn is not None:
                turn["content"] += message["content"]
                continue
            messages.append(message)
            turn = message if message["role"] == "assistant" else None
        else:
            demand = f"is not supported in {where}; send messages, function calls and reasoning"
            if kind == "item_reference":  # clients name earlier items that a server has stored
                demand = (
                    f"in {where} names nothing: {_STATELESS}, which clients do with store=false"
                )
            raise bad_value("input.type", kind, demand, code="unsupported_field")
    return messages or [{"role": "user", "content": ""}]


def _text(where: str, content: Any) -> str:
    return "\n".join(texts_of(where, content, param="input", kinds=_TEXTS))


def _reasoning(item: dict[str, Any]) -> str:
    """The text of an item of reasoning; empty if another server has encrypted it."""
    if content := item.get("content") or item.get("summary"):
        return _text("reasoning", content)
    try:
        return base64.b64decode(item.get("encrypted_content") or "", validate=True).decode()
    except (binascii.Error, TypeError, ValueError):
        return ""


@dataclass(eq=False, kw_only=True)
class ResponseAnswer(BlocksAnswer):
    """A response with items, and its events, which are numbered."""

    request: Result  # the fields of the request that a response repeats
    encrypts: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._num_events = 0

    def response(self, meta: Result, num_reasoning: int) -> Result:
        reason = {"length": "max_output_tokens", "abort": "abort"}.get(self.stop_kind(meta))
        status = "completed" if reason is None else "incomplete"
        details = None if reason is None else {"reason": reason}
        items = [self._item(block) for block in self.blocks]
        prompt, output = meta["prompt_tokens"], meta["completion_tokens"]
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": meta["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": prompt + output,
        }
        fields: Result = {"output": items, "incomplete_details": details, "usage": usage}
        return self._response(status, completed=True, **fields, **self.token_ids())

    def begin(self) -> Iterator[Result]:
        for kind in ("created", "in_progress"):
            yield _event(f"response.{kind}", response=self._response("in_progress"))

    def begin_block(self, block: Block) -> Iterator[Result]:
        item = self._item(block, is_new=True)
        yield _event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._of_part(
                block, "response.content_part.added", part=_part(block, is_new=True)
            )

    def grow_block(self, block: Block, text: str) -> Result:
        return self._of_part(block, f"response.{_NAMES[block.kind]}.delta", delta=text)

    def end_block(self, block: Block) -> Iterator[Result]:
        done = f"response.{_NAMES[block.kind]}.done"
        if block.kind == "call":
            assert block.call is not None
            yield self._of_part(block, done, arguments=block.text, name=block.call.name)
        else:
            yield self._of_part(block, done, text=block.text)
            yield self._of_part(block, "response.content_part.done", part=_part(block))
        item = self._item(block)
        yield _event("response.output_item.done", output_index=block.index, item=item)

    def end(self, meta: Result, num_reasoning: int) -> Iterator[Result]:
        response = self.response(meta, num_reasoning)
        yield _event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        reason = {"code": "server_error", "message": error.message}
        response = self._response("failed", error=reason)
        return self.event(_event("response.failed", response=response))

    def tail(self) -> str:
        number = self._num_events
        self._num_events += 1
        return f',"sequence_number":{number}}}'

    def _response(self, status: str, *, completed: bool = False, **fields: Any) -> Result:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if completed else None,
            "status": status,
            "model": self.model,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "previous_response_id": None,
            "usage": None,
            **self.request,
            **fields,
        }

    def _of_part(self, block: Block, kind: str, **fields: Any) -> Result:
        place = {"item_id": _item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        if kind.startswith("response.output_text"):
            is_delta = kind.endswith(".delta")
            fields["logprobs"] = block.new_logprobs if is_delta else block.logprobs
        return _event(kind, **place, **fields)

    def _item(self, block: Block, *, is_new: bool = False) -> Result:
        """An item of the output; a new one has no text yet."""
        status = "in_progress" if is_new else "incomplete" if block.is_cut else "completed"
        kind, content = _TYPES[block.kind][0], [] if is_new else [_part(block)]
        item: Result = {"id": _item_id(block), "type": kind, "status": status}
        if block.kind == "text":
            return item | {"role": "assistant", "content": content}
        if block.kind == "reasoning":
            encrypted = base64.b64encode(block.text.encode()).decode() if self.encrypts else None
            return item | {"summary": [], "content": content, "encrypted_content": encrypted}
        assert block.call is not None
        names = {"call_id": block.call.id, "name": block.call.name}
        return item | names | {"arguments": block.text}


# the type and the prefix of the id of an item, and the names of its events
_TYPES = {
    "reasoning": ("reasoning", "rs"),
    "text": ("message", "msg"),
    "call": ("function_call", "fc"),
}
_NAMES = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _item_id(block: Block) -> str:
    return f"{_TYPES[block.kind][1]}_{block.id}"


def _event(kind: str, **fields: Any) -> Result:
    return {"type": kind, **fields}


def _part(block: Block, *, is_new: bool = False) -> Result:
    """The content of an item; a new one has no text yet."""
    text, logprobs = ("", []) if is_new else (block.text, block.logprobs)
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

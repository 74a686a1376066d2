"""``/v1/chat/completions``: the fields of a request, and answers with messages."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specjax.checks import short
from specjax.scheduling.loop import Call
from specjax.scheduling.request import TokenLogprob, new_id
from specjax.server.answers import (
    MAX_LOGPROBS,
    ChoicesAnswer,
    Cursor,
    Result,
    Tops,
    token_logprobs,
)
from specjax.server.conversation import Conversation, effort_variables, make_message
from specjax.server.fields import ApiError, Body, client_names
from specjax.server.parameters import take_output, take_routes
from specjax.server.service import Service
from specjax.text.parts import TextParts
from specjax.text.tool_formats import ToolCall

# template variables that other fields of the request set
_RESERVED = ("messages", "add_generation_prompt", "continue_final_message")


def read_chat(service: Service, body: Body) -> tuple[Call, ChoicesAnswer]:
    """Check a request, render its chat template and tokenise the text."""
    model = service.check_model(body)
    conversation = take_conversation(service, body)
    wants_logprobs = body.flag("logprobs")
    num_top = body.integer("top_logprobs", 0, at_least=0, at_most=MAX_LOGPROBS)
    if num_top and not wants_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    is_stream, flags = take_output(body)
    is_separate = body.flag("separate_reasoning", True)
    newer = body.take("max_completion_tokens")  # the newer name of max_tokens
    older = body.take("max_tokens", newer)
    if newer is not None and older != newer:
        values = f"max_tokens={short(older)} and max_completion_tokens={short(newer)}"
        raise ApiError(400, f"{values} differ; set one", param="max_completion_tokens")
    body.put("max_tokens", older)
    request_id = f"chatcmpl-{new_id()}"
    options = {"is_stream": is_stream, "is_separate": is_separate, **take_routes(body)}
    with client_names("messages", body.sources, top_logprobs_num="top_logprobs"):
        call, new_parts = conversation.make_call(
            body, request_id, num_top=num_top if wants_logprobs else None, **options
        )
    return call, ChatAnswer(
        id=request_id,
        model=model,
        texts=service.texts,
        params=call.requests[0].params,
        prompt_ids=[call.requests[0].input_ids],
        wants_logprobs=wants_logprobs,
        new_parts=TextParts if flags["include_drafts"] else new_parts,
        **flags,
    )


def take_conversation(service: Service, body: Body) -> Conversation:
    """Take the messages, the variables of their template, and the tools."""
    messages = body.take("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    variables = body.take("chat_template_kwargs", {})
    if not isinstance(variables, dict) or any(name in _RESERVED for name in variables):
        message = f"chat_template_kwargs must be an object without {', '.join(_RESERVED)}"
        raise ApiError(400, message, param="chat_template_kwargs")
    if "enable_thinking" in body:
        variables["enable_thinking"] = body.flag("enable_thinking")
    variables |= effort_variables("reasoning_effort", body.text("reasoning_effort"))
    for name, default in zip(_RESERVED[1:], (True, False), strict=True):
        variables[name] = body.flag(name, default)
    if all(variables[name] for name in _RESERVED[1:]):
        message = "continue_final_message=true needs add_generation_prompt=false"
        raise ApiError(400, message, param="continue_final_message")
    return Conversation(
        service,
        [make_message(f"messages[{i}]", message) for i, message in enumerate(messages)],
        variables,
        tools=body.take("tools", []),
        choice=body.take("tool_choice", "auto"),
        is_parallel=body.flag("parallel_tool_calls", True),
    )


@dataclass(eq=False, kw_only=True)
class ChatAnswer(ChoicesAnswer):
    """A choice has a ``message`` or, in a stream, a ``delta``, with the parts of the text."""

    new_parts: Callable[[], TextParts] = TextParts

    has_one_prompt = True
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parsed = defaultdict[int, TextParts](self.new_parts)

    def message(self, index: int, result: Result) -> Result:
        parsed = self._parsed[index]
        parsed.read(result["text"], result["output_ids"], is_final=True)
        content = parsed.content if parsed.content or not parsed.calls else None
        message: Result = {"role": "assistant", "content": content, "refusal": None}
        if parsed.may_reason and parsed.is_separate:
            message["reasoning_content"] = parsed.reasoning or None
        if parsed.calls:
            message["tool_calls"] = [_call(call) for call in parsed.calls]
        return {"message": message}

    def finish_reason(self, index: int, reason: str) -> str:
        is_call = reason == "stop" and self._parsed[index].ends_with_call
        return "tool_calls" if is_call else reason

    def new_text(self, sent: Cursor, index: int, result: Result) -> tuple[str, str]:
        parsed, meta = self._parsed[index], result.get("meta_info")
        if not parsed.tools.names and not parsed.may_reason:  # most requests: nothing to parse
            return super().new_text(sent, index, result)
        is_final = meta is not None and meta["finish_reason"] is not None
        ids = result["output_ids"]
        reasoning, content, calls = parsed.read(result["text"], ids, is_final=is_final)
        events = self._delta(index, reasoning_content=reasoning) if reasoning else ""
        if not calls:
            return events, content
        events += self._delta(index, content=content) if content else ""
        deltas = [_call(call) | {"index": i} for i, call in calls]
        return events + self._delta(index, tool_calls=deltas), ""

    def _delta(self, index: int, **delta: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event([choice])

    def opening(self, index: int) -> Result | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> Result:
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, sent: Cursor, chosen: Sequence[TokenLogprob], tops: Tops) -> Result:
        return {"content": token_logprobs(self.texts, chosen, tops), "refusal": None}


def _call(call: ToolCall) -> Result:
    """A call or, without an id, more arguments of one that was sent before."""
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}

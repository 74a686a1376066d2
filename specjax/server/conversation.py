"""A conversation, whichever API it came by: messages, tools and variables of the chat template.

An API's file brings them into the form of chat completions, which templates read. It passes what is
left of the body, with OpenAI's names of sampling parameters, to :meth:`Conversation.make_call`.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from specjax.checks import ParameterError, short
from specjax.engine.requests import encode_conversation
from specjax.sampling.grammar import LAYOUT, OPTIONS
from specjax.scheduling.loop import Call
from specjax.scheduling.request import new_id
from specjax.server.fields import ApiError, Body, bad_value, finish_fields, get
from specjax.server.parameters import answer_format, take_params
from specjax.server.service import MAX_REPORTED, Service
from specjax.text.parts import TextParts, Tools
from specjax.text.tool_formats import END, FORMATS, HERMES, NO_FORMAT, START, ToolFormat, is_json

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_TOOLS, MAX_NAME = 128, 64  # OpenAI's limits
# For templates without tools: the prompt of Qwen2.5 and Hermes, in our words.
PROMPT = """You can call these functions. Each line is the JSON schema of one:
{tools}
To call a function, answer with a JSON object with its name and arguments between these tags:
{start}
{{"name": "the function", "arguments": {{"the parameter": "the value"}}}}
{end}"""


class Conversation:
    """The prompt of one request, from messages of :func:`make_message` and fields of tools.

    Raises ApiError if a value is not accepted, or if the model cannot be told about the tools.
    """

    def __init__(
        self,
        service: Service,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        *,
        tools: Any,
        choice: Any,
        is_parallel: bool,
    ) -> None:
        tool_format = FORMATS.get(service.engine.tool_call_parser or "", NO_FORMAT)
        if service.engine.reasoning is not None:
            try:
                messages = service.engine.reasoning.history(messages, variables)
            except ValueError as error:
                raise ApiError(400, str(error), param="messages") from error
        tokenizer = service.tokenizer
        token_id = tokenizer.backend.token_to_id
        token_ids = {x: i for x in (START, END) if (i := token_id(x)) is not None}
        checked_tools = _check_tools(tools, choice, is_parallel, tool_format)
        self.tools = checked_tools._replace(token_ids=token_ids)
        has_tags, special_ids = START in tool_format.required.begin, tokenizer.special_ids
        has_special = has_tags and bool(special_ids.keys() & token_ids)
        self._has_special_marks = tool_format.is_special or has_special
        if tools and "tools" in (tokenizer.chat_template or ""):
            variables["tools"] = tools
        elif self.tools.names and tool_format in (NO_FORMAT, HERMES):
            messages = with_default_prompt(messages, tools)
        elif self.tools.names:
            message = "the chat template does not read tools, so tool_call_parser must be hermes"
            raise ApiError(400, message, param="tools")
        self._service, self._messages, self._variables = service, messages, variables

    def encode(self) -> list[int]:
        """Render the chat template, and return the token ids."""
        length, tokenizer = self._service.engine.context_length, self._service.tokenizer
        encode = partial(encode_conversation, tokenizer, length, **self._variables)
        try:
            return encode(self._messages)
        except ParameterError:  # the conversation is too long
            raise
        except ValueError:
            # many templates refuse a system message that is not the first
            opening, *later_messages = self._messages
            if all(message["role"] != "system" for message in later_messages):
                raise
            return encode([opening, *map(_from_user, later_messages)])

    def make_call(
        self,
        body: Body,
        request_id: str,
        *,
        is_stream: bool,
        is_separate: bool,
        num_top: int | None = None,
        **options: Any,
    ) -> tuple[Call, Callable[[], TextParts]]:
        """Take the parameters from the fields that are left, and make the engine's call.

        ``is_separate``: the reasoning is not in the content. ``num_top`` is the number of top
        log-probabilities; with ``None`` there are none at all. ``options`` are others of the
        engine. Also returns a function that makes the reader of one choice's text.
        """
        service, engine, tools = self._service, self._service.engine, self.tools
        length, tags, wants_logprobs = engine.context_length, engine.reasoning, num_top is not None
        if tools.names and tools.format is NO_FORMAT:
            message = "tools need the engine option tool_call_parser, or tool_choice='none'"
            raise ApiError(400, message, param="tools")
        is_bounded = wants_logprobs and "max_tokens" not in body
        limits = answer_format(body) if engine.has_grammars else {}
        answer, can_limit = limits.get("json_schema"), engine.has_grammars and not limits
        grammar = tools.grammar({OPTIONS: LAYOUT}, answer=answer, is_possible=can_limit)
        default = min(length, service.default_max_tokens or length)
        params = take_params(body, default, grammar)
        if (tools.names and self._has_special_marks) or (tags is not None and tags.is_special):
            params = replace(params, skip_special_tokens=False)  # these mark calls and reasoning
        finish_fields(body, service.ignored_fields)
        service.check_count(params.n)
        if is_bounded:
            most = MAX_REPORTED // (params.n * (1 + (num_top or 0)))
            params = replace(params, max_new_tokens=min(default, most))
        ids = self.encode()
        call = engine.make_call(
            stream=is_stream,
            sampling_params=params,
            rid=request_id,
            input_ids=ids,
            return_logprob=wants_logprobs,
            top_logprobs_num=num_top or 0,
            **options,
        )
        if tags is None:
            return call, partial(TextParts, tools=tools)
        is_continued = self._variables.get("continue_final_message")
        text = self._messages[-1]["content"] if is_continued else ""
        fields = tags.parts(ids, text)
        return call, partial(TextParts, tools=tools, is_separate=is_separate, **fields)


def effort_variables(name: str, effort: str | None) -> dict[str, Any]:
    """Return the template's variables for the effort of reasoning in the field ``name``."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise bad_value(name, effort, f"must be one of {', '.join(EFFORTS)}")
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def _check_tools(tools: Any, choice: Any, is_parallel: bool, tool_format: ToolFormat) -> Tools:
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise bad_value("tools", tools, f"must be a list of at most {MAX_TOOLS} functions")
    names = []
    for i, tool in enumerate(tools):
        name, parameters = (get(tool, "function", key) for key in ("name", "parameters"))
        is_valid = isinstance(name, str) and 0 < len(name) <= MAX_NAME
        if not is_valid or not isinstance(parameters, dict | None):
            message = (
                f"tools[{i}]={short(tool)} must have function.name, of 1 to {MAX_NAME} characters, "
                "and function.parameters, a JSON schema"
            )
            raise ApiError(400, message, param="tools")
        names.append(name)
    if len(set(names)) < len(names):
        raise ApiError(400, f"tools must not repeat a name; got {short(names)}", param="tools")
    if get(choice, "type") == "allowed_tools":
        choice, names = _take_allowed(choice, names)
    is_required = choice == "required" or isinstance(choice, dict)
    if isinstance(choice, dict):
        if (name := get(choice, "function", "name")) not in names:
            raise bad_value("tool_choice", choice, f"must name one of the tools {short(names)}")
        names, is_parallel = [name], False
    elif choice not in ("none", "auto", "required"):
        demand = "must be none, auto, required, a function or allowed_tools"
        raise bad_value("tool_choice", choice, demand)
    elif is_required and not names:
        raise ApiError(400, "tool_choice='required' needs tools", param="tool_choice")
    names = [] if choice == "none" else names
    return Tools(tools, names, is_required, is_parallel, tool_format, new_id)


def _take_allowed(choice: dict[str, Any], names: Sequence[str]) -> tuple[str, list[str]]:
    """The mode of a choice among some of the tools, and their names."""
    mode, tools = (get(choice, "allowed_tools", key) for key in ("mode", "tools"))
    chosen = [get(tool, "function", "name") for tool in tools] if isinstance(tools, list) else [0]
    if mode not in ("auto", "required") or not all(name in names for name in chosen):
        demand = f"must have the mode auto or required, and only tools of {short(names)}"
        raise bad_value("tool_choice", choice, demand)
    return mode, [name for name in names if name in chosen]


def merge_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the system messages at the beginning; most templates read only one."""
    system = list(takewhile(lambda message: message["role"] == "system", messages))
    if len(system) < 2:
        return list(messages)
    content = "\n\n".join(message["content"] for message in system)
    return [{"role": "system", "content": content}, *messages[len(system) :]]


def _from_user(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": "user"} if message["role"] == "system" else message


def with_default_prompt(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Tell a model about tools if its template does not; calls and results become text."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    prompt = PROMPT.format(tools=lines, start=START, end=END)
    system, *later_messages = map(_as_text, messages)
    if system["role"] == "system":
        return [system | {"content": f"{system['content']}\n\n{prompt}"}, *later_messages]
    return [{"role": "system", "content": prompt}, system, *later_messages]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = []
    for function in (call["function"] for call in message.get("tool_calls", ())):
        arguments = function.get("arguments")
        is_text = isinstance(arguments, str) and is_json(arguments)
        text = arguments if is_text else json.dumps(arguments)
        name = json.dumps(function.get("name"))
        calls.append(f'{START}\n{{"name": {name}, "arguments": {text}}}\n{END}')
    if not calls:
        return message
    content = "\n".join([message["content"], *calls]).lstrip("\n")
    return {"role": message["role"], "content": content}


def make_message(where: str, message: Any) -> dict[str, Any]:
    """Check a message in the form of chat completions; its content becomes plain text."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} must be an object", param=where)
    fields = Body(message)
    role = fields.take("role")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role must be one of {', '.join(ROLES)}", param=where)
    plain = {
        # templates do not support developer, the newer name of the same role
        "role": "system" if role == "developer" else role,
        "content": _text(where, fields.take("content")),
    }
    if (name := fields.take("name")) is not None:
        if not isinstance(name, str):
            raise ApiError(400, f"{where}.name must be a string", param=where)
        plain["name"] = name
    if calls := fields.take("tool_calls"):
        functions = [get(call, "function") for call in calls] if isinstance(calls, list) else [None]
        if not all(isinstance(function, dict) for function in functions):
            raise bad_value(f"{where}.tool_calls", calls, "must be a list of calls with a function")
        plain["tool_calls"] = calls
    for neutral in ("refusal", "annotations", "audio", "function_call"):
        if value := fields.take(neutral):
            raise bad_value(f"{where}.{neutral}", value, "is not supported")
    # the template may use more fields, for example the reasoning of an earlier message
    return plain | {name: fields.take(name) for name in fields.unread}


def _text(where: str, content: Any) -> str:
    if content is None:
        return ""
    return "\n".join(texts_of(f"{where}.content", content, param=where))


def texts_of(
    where: str,
    content: Any,
    *,
    param: str | None = None,
    kinds: Collection[str] = ("text",),
    noun: str = "part",
) -> list[str]:
    """The texts of a content, which is a string or a list of parts of these ``kinds``.

    Raises ApiError if it is neither. ``param`` is the field to name, by default ``where``, and
    ``noun`` is the API's word for a part.
    """
    param = where if param is None else param
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a string or a list of {noun}s", param=param)
    for item in content:
        if (kind := get(item, "type")) not in kinds or not isinstance(item.get("text"), str):
            message = f"{where} has a {noun} of type {short(kind)}; only text is supported"
            raise ApiError(400, message, param=param)
    return [item["text"] for item in content]

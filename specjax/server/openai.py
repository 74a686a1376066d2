"""OpenAI's routes: ``/v1/completions`` and ``/v1/chat/completions``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specjax.checks import is_integer, short
from specjax.engine.requests import encode_conversation
from specjax.sampling.params import SamplingParams
from specjax.scheduling.loop import Call
from specjax.scheduling.request import TokenLogprob, new_id
from specjax.server.answers import LEAST, Answer, Result, Sent, Tops, finite
from specjax.server.fields import INPUTS, NAMES, ApiError, Body, client_names, finish_fields
from specjax.server.service import MAX_REPORTED, Service
from specjax.server.structured import take_grammar
from specjax.server.tools import NO_TOOLS, Tools, is_json, take_tools, with_default_prompt
from specjax.text.reasoning import END, START, split_reasoning
from specjax.text.tool_calls import ToolCall, parse_tool_calls

DEFAULT_TOKENS = 16
MAX_LOGPROBS = 20


def read_completion(service: Service, body: Body) -> tuple[Call, Answer]:
    with client_names("prompt", body.sources, top_logprobs_num="logprobs", input_ids="prompt"):
        return _completion(service, body)


def _completion(service: Service, body: Body) -> tuple[Call, Answer]:
    model = service.check_model(body)
    prompt = service.take_inputs(body, "prompt")
    if not prompt and prompt != "":
        raise ApiError(400, f"prompt must be {INPUTS}", param="prompt")
    prompts = prompt if isinstance(prompt, list) and not is_integer(prompt[0]) else [prompt]
    is_text = isinstance(prompts[0], str)
    echo, logprobs = body.flag("echo"), body.integer("logprobs", at_least=0, at_most=MAX_LOGPROBS)
    is_stream, shown = take_shown(body)
    params = take_params(body, DEFAULT_TOKENS)
    finish_fields(body, service.ignored_fields)
    service.check_count(len(prompts) * params.n)
    request_id = f"cmpl-{new_id()}"
    is_batch = len(prompts) > 1
    call = service.engine.make_call(
        stream=is_stream,
        sampling_params=params,
        rid=[f"{request_id}-{i}" for i in range(len(prompts))] if is_batch else request_id,
        return_logprob=logprobs is not None,
        top_logprobs_num=logprobs or 0,
        logprob_start_len=0 if echo and logprobs is not None else -1,
        **{"prompt" if is_text else "input_ids": prompts if is_batch else prompts[0]},
    )
    prompt_ids = [request.input_ids for request in call.requests[:: params.n]]
    echoed = None
    if echo:
        echoed = list(prompts) if is_text else [service.texts.decode(ids) for ids in prompt_ids]
    return call, CompletionAnswer(
        id=request_id,
        model=model,
        texts=service.texts,
        params=params,
        prompt_ids=prompt_ids,
        wants_logprobs=logprobs is not None,
        echoed=echoed,
        **shown,
    )


def take_shown(body: Body) -> tuple[bool, dict[str, bool]]:
    """Take ``stream`` and the flags of optional output: usage, drafts and token ids."""
    is_stream = body.flag("stream")
    has_options = "stream_options" in body
    options = body.fields("stream_options")
    if has_options and not is_stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    shown = {name: options.flag(name) for name in ("include_usage", "include_drafts")}
    for ignored in ("include_obfuscation", "continuous_usage_stats"):
        options.take(ignored)
    if options.left:
        message = f"stream_options: unknown field {options.left[0]!r}"
        raise ApiError(400, message, param="stream_options", code="unknown_field")
    return is_stream, shown | {"return_ids": body.flag("return_token_ids")}


def take_params(
    body: Body, max_tokens: int, more: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Read sampling parameters from OpenAI's fields; ``max_tokens`` is used if none is sent.

    ``more`` are a grammar that the tools demand.
    """
    given: dict[str, Any] = {NAMES[name]: body.take(name) for name in NAMES if name in body}
    given |= take_grammar(body, given, more or {})
    given.setdefault("max_new_tokens", max_tokens)
    if given.get("top_k") == 0 and is_integer(given["top_k"]):
        given["top_k"] = -1  # vLLM also accepts 0 to turn it off
    seed = given.get("sampling_seed")
    if isinstance(seed, int) and -(2**63) <= seed < 0:
        given["sampling_seed"] = seed % 2**64
    params = SamplingParams(**given)
    best_of = body.take("best_of", params.n)
    if best_of != params.n or isinstance(best_of, bool):
        message = f"best_of={short(best_of)} must equal n={params.n}; samples are not ranked"
        raise ApiError(400, message, param="best_of", code="unsupported_field")
    return params


@dataclass(eq=False, kw_only=True)
class CompletionAnswer(Answer):
    """A choice has a ``text``. If ``echoed`` lists the prompts, the text begins with its prompt."""

    echoed: Sequence[str] | None = None

    kind = chunk_kind = "text_completion"

    def message(self, index: int, text: str) -> Result:
        return {"text": self._prompt(index) + text}

    def opening(self, index: int) -> Result | None:
        return None if self.echoed is None else {"text": self._prompt(index)}

    def part(self, text: str) -> Result:
        return {"text": text}

    def logprobs(self, sent: Sent, chosen: Sequence[TokenLogprob], tops: Tops) -> Result:
        """Return lists with an entry per token; the first prompt token has no value."""
        rows: list[tuple[Any, ...]] = []
        for i, (value, token, _) in enumerate(chosen):
            text, data = self.texts.of(token)
            best: dict[str, float] | None = None
            if value is not None:
                value, best = finite(value), {}
                for top, other, _ in (tops[i] or ()) if tops else ():
                    assert top is not None
                    best.setdefault(self.texts.of(other)[0], finite(top))
                # if two tokens have the same text, the more likely one counts
                best[text] = max(best.get(text, LEAST), value)
            rows.append((text, value, best, sent.offset))
            if not self.texts.is_special(token):
                # count bytes that begin a character: all except UTF-8 continuation bytes
                sent.offset += sum(byte & 0xC0 != 0x80 for byte in data)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}

    def _prompt(self, index: int) -> str:
        return "" if self.echoed is None else self.echoed[index // self.params.n]


ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# template variables that other fields of the request set
_RESERVED = ("messages", "add_generation_prompt", "continue_final_message")


def read_chat(service: Service, body: Body) -> tuple[Call, Answer]:
    """Check a request, render its chat template and tokenise the text."""
    with client_names("messages", body.sources, top_logprobs_num="top_logprobs"):
        return _chat(service, body)


def _chat(service: Service, body: Body) -> tuple[Call, Answer]:
    model = service.check_model(body)
    messages, variables, tools = take_conversation(service, body)
    parser = service.engine.tool_call_parser
    if tools.names and parser is None:
        message = "tools need the engine option tool_call_parser, or tool_choice='none'"
        raise ApiError(400, message, param="tools")
    wants_logprobs = body.flag("logprobs")
    num_top = body.integer("top_logprobs", 0, at_least=0, at_most=MAX_LOGPROBS)
    if num_top and not wants_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    is_stream, shown = take_shown(body)
    tags, is_apart = service.engine.reasoning, body.flag("separate_reasoning", True)
    new = body.take("max_completion_tokens")  # the newer name of max_tokens
    old = body.take("max_tokens", new)
    if new is not None and old != new:
        message = f"max_tokens={short(old)} and max_completion_tokens={short(new)} differ; set one"
        raise ApiError(400, message, param="max_completion_tokens")
    body.put("max_tokens", old)
    length = service.engine.context_length
    is_cut = wants_logprobs and "max_tokens" not in body
    is_free = service.engine.runner.config.has_grammars and "response_format" not in body
    grammar = tools.grammar(parser or "", is_possible=is_free)
    params = take_params(body, length, grammar)
    if (tools.names and parser == "mistral") or (tags is not None and tags.is_special):
        params = replace(params, skip_special_tokens=False)  # these mark calls and reasoning
    finish_fields(body, service.ignored_fields)
    service.check_count(params.n)
    if is_cut:
        most = MAX_REPORTED // (params.n * (1 + num_top))
        params = replace(params, max_new_tokens=min(length, most))
    ids = encode_conversation(service.tokenizer, length, messages, **variables)
    request_id = f"chatcmpl-{new_id()}"
    call = service.engine.make_call(
        stream=is_stream,
        sampling_params=params,
        rid=request_id,
        input_ids=ids,
        return_logprob=wants_logprobs,
        top_logprobs_num=num_top,
    )
    return call, ChatAnswer(
        id=request_id,
        model=model,
        texts=service.texts,
        params=params,
        prompt_ids=[ids],
        wants_logprobs=wants_logprobs,
        reasons=tags is not None,
        is_apart=is_apart,
        parser=parser,
        tools=tools,
        is_open=tags is not None
        and (tags.last(ids) == START or is_in_reasoning(variables, messages)),
        **shown,
    )


def take_conversation(
    service: Service, body: Body
) -> tuple[list[dict[str, Any]], dict[str, Any], Tools]:
    """Take the messages, whose content becomes plain text, the template's variables, and tools."""
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
    if "enable_thinking" in body:
        variables["enable_thinking"] = body.flag("enable_thinking")
    if (effort := body.text("reasoning_effort")) is not None:
        if effort not in EFFORTS:
            message = f"reasoning_effort={short(effort)} must be one of {', '.join(EFFORTS)}"
            raise ApiError(400, message, param="reasoning_effort")
        variables["reasoning_effort"] = effort
        if effort == "none":
            variables["enable_thinking"] = False
    for name, default in zip(_RESERVED[1:], (True, False), strict=True):
        variables[name] = body.flag(name, default)
    if all(variables[name] for name in _RESERVED[1:]):
        message = "continue_final_message=true needs add_generation_prompt=false"
        raise ApiError(400, message, param="continue_final_message")
    taken, tools = [_message(i, m) for i, m in enumerate(messages)], take_tools(body)
    if tools.given and "tools" in (service.tokenizer.chat_template or ""):
        variables["tools"] = tools.given
    elif tools.names and service.engine.tool_call_parser in (None, "hermes", "qwen25"):
        taken = with_default_prompt(taken, tools.given)
    elif tools.names:
        message = "the chat template does not read tools, so tool_call_parser must be hermes"
        raise ApiError(400, message, param="tools")
    return taken, variables, tools


def is_in_reasoning(variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message, which the answer continues, ends within reasoning."""
    text = messages[-1]["content"]
    return bool(variables["continue_final_message"]) and text.rfind(START) > text.rfind(END)


def _message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
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
        plain["tool_calls"] = _tool_calls(where, calls)
    for neutral in ("refusal", "annotations", "audio", "function_call"):
        if value := fields.take(neutral):
            raise ApiError(400, f"{where}.{neutral}={short(value)} is not supported", param=where)
    # the template may use more fields, for example the reasoning of an earlier message
    return plain | {name: fields.take(name) for name in fields.left}


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        message = f"{where}.tool_calls={short(calls)} must be a list of calls with a function"
        raise ApiError(400, message, param=where)
    return calls


def _text(where: str, content: Any) -> str:
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


@dataclass(eq=False, kw_only=True)
class ChatAnswer(Answer):
    """A choice has a ``message`` or, in a stream, a ``delta``.

    Calls of ``tools`` and, if the model ``reasons``, its reasoning if ``is_apart``, come apart from
    the content, unless drafts are shown. ``is_open`` if the prompt has opened the reasoning.
    """

    reasons: bool = False
    is_apart: bool = True
    is_open: bool = False
    parser: str | None = None
    tools: Tools = NO_TOOLS

    has_one_prompt = True
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_apart = self.reasons and self.is_apart
        self._splits = (self._is_apart or bool(self.tools.names)) and not self.include_drafts
        self._num_reasoned: dict[int, int] = {}  # characters of reasoning sent, by choice
        self._calls: dict[int, list[Result]] = {}  # by choice
        # characters of the arguments of calls that were sent, by choice
        self._num_sent: dict[int, list[int]] = {}

    def message(self, index: int, text: str) -> Result:
        message: Result = {"role": "assistant", "content": text, "refusal": None}
        if self._splits:
            reasoning, content, calls = self._parts(index, text, is_final=True)
            message["content"] = content if content or not calls else None
            if self._is_apart:
                message["reasoning_content"] = reasoning or None
            if calls:
                message["tool_calls"] = calls
        return {"message": message}

    def whole(self, results: Sequence[Result]) -> bytes:
        if self._splits:
            for i, result in enumerate(results):
                self._parts(i, result["text"], is_final=True)
        return super().whole([self._with_reason(i, one) for i, one in enumerate(results)])

    def chunk(self, result: Result) -> bytes:
        if not self._splits:
            return super().chunk(result)
        index, meta, events = result.get("index", 0), result.get("meta_info"), b""
        is_final = meta is not None and meta["finish_reason"] is not None
        done, sent = self._num_reasoned.get(index, 0), self._num_sent.setdefault(index, [])
        reasoning, content, calls = self._parts(index, result["text"], is_final=is_final)
        if index not in self._sent:
            events += super().chunk({"index": index, "text": ""})
        if len(reasoning) > done:
            self._num_reasoned[index] = len(reasoning)
            events += self._delta(index, reasoning_content=reasoning[done:])
        lengths = [len(call["function"]["arguments"]) for call in calls]
        if lengths != sent:
            events += super().chunk({"index": index, "text": content})
            new = [call | {"index": i} for i, call in enumerate(calls) if i >= len(sent)]
            for i, (begin, end) in enumerate(zip(sent, lengths, strict=False)):
                if begin < end:  # the rest of a call whose name was sent before
                    more = calls[i]["function"]["arguments"][begin:]
                    new.insert(0, {"index": i, "function": {"arguments": more}})
            self._num_sent[index] = lengths
            events += self._delta(index, tool_calls=new)
        return events + super().chunk(self._with_reason(index, result) | {"text": content})

    def _delta(self, index: int, **delta: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event([choice]).encode()

    def _parts(self, index: int, text: str, *, is_final: bool) -> tuple[str, str, list[Result]]:
        """Reasoning, content and tool calls of a text; each only grows with the text."""
        reasoning, rest = "", text
        if self.reasons:
            reasoning, rest = split_reasoning(text, is_open=self.is_open, is_final=is_final)
        before = "" if self._is_apart else text[: len(text) - len(rest)]
        calls = self._calls.setdefault(index, [])
        if self.parser is not None and self.tools.names:
            names, found = self.tools.names, list[ToolCall]()
            if self.tools.is_required and (found := self.tools.calls(self.parser, rest)):
                rest = ""
            else:
                rest, found = parse_tool_calls(self.parser, rest, names, is_final=is_final)
            for i, call in enumerate(found[: None if self.tools.is_parallel else 1]):
                if i == len(calls):
                    # templates of Mistral demand nine letters or digits
                    name = new_id()[:9] if self.parser == "mistral" else f"call_{new_id()}"
                    calls.append({"id": name, "type": "function"})
                calls[i]["function"] = call._asdict()
        return "" if before else reasoning, before + rest, calls

    def _with_reason(self, index: int, result: Result) -> Result:
        """Set the finish reason of a text, parsed before, that ends with tool calls."""
        meta = result.get("meta_info")
        if meta is None or (meta["finish_reason"] or {}).get("type") != "stop":
            return result
        if not (calls := self._calls.get(index)) or not is_json(calls[-1]["function"]["arguments"]):
            return result
        reason = meta["finish_reason"] | {"type": "tool_calls"}
        return result | {"meta_info": meta | {"finish_reason": reason}}

    def opening(self, index: int) -> Result | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def part(self, text: str) -> Result:
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, sent: Sent, chosen: Sequence[TokenLogprob], tops: Tops) -> Result:
        """Return one entry per completion token."""

        def entry(value: float | None, token: int) -> Result:
            assert value is not None
            text, data = self.texts.of(token)
            return {"token": text, "logprob": finite(value), "bytes": list(data)}

        content = []
        for i, (value, token, _) in enumerate(chosen):
            best = (tops[i] or ()) if tops else ()
            others = [entry(top, other) for top, other, _ in best]
            content.append(entry(value, token) | {"top_logprobs": others})
        return {"content": content, "refusal": None}

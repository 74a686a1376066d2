"""Tools in chat requests: which functions a model may call, how it is told, and when it must."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.checks import short
from specjax.sampling.grammar import LAYOUT, OPTIONS
from specjax.server.fields import ApiError, Body
from specjax.text.tool_calls import END, MISTRAL_TAG, START, ToolCall

# its limit for the digits of an integer is lower than a text may have
_DECODER = json.JSONDecoder(parse_int=float)
MAX_TOOLS, MAX_NAME = 128, 64  # OpenAI's limits
# For templates without tools: the prompt of Qwen2.5 and Hermes, in our words.
PROMPT = """You can call these functions. Each line is the JSON schema of one:
{tools}
To call a function, answer with a JSON object with its name and arguments between these tags:
{start}
{{"name": "the function", "arguments": {{"the parameter": "the value"}}}}
{end}"""

# of a parser: text before the calls, name of the arguments, text between two calls, and after them
_HERMES = f"{START}\n", "arguments", f"\n{END}\n{START}\n", f"\n{END}"
_FORMS = {"hermes": _HERMES, "qwen25": _HERMES, "llama3": ("", "parameters", "", "")}
_LIST = "[", "arguments", ", ", "]"  # of the others, if a call is required
# of a call that the model begins itself; a list of Python calls has no schema
_OWN_FORMS = _FORMS | {"mistral": (f"{MISTRAL_TAG} [", "arguments", "", "]")}


class Tools(NamedTuple):
    """The functions of a request, and whether one must be called."""

    given: Sequence[dict[str, Any]] = ()  # as the client sent them, for the template
    names: Sequence[str] = ()  # those that may be called
    is_required: bool = False
    is_parallel: bool = True  # whether there may be several calls

    def grammar(self, kind: str, *, is_possible: bool = True) -> dict[str, Any]:
        """Sampling parameters that force a call, or the arguments of calls of strict functions.

        Without ``is_possible``, strict functions are like others.
        """
        functions = [tool["function"] for tool in self.given]
        functions = [one for one in functions if one["name"] in self.names]
        is_strict = is_possible and any(one.get("strict") is True for one in functions)
        forms = _FORMS if self.is_required else _OWN_FORMS
        begin, key, between, end = forms.get(kind, _LIST)
        calls = [_start(one["name"], key) for one in functions]
        if not self.is_required:
            if not is_strict or kind not in forms:
                return {}
            schemas = [_schema(x) if x.get("strict") else {"type": "object"} for x in functions]
            tags = [
                {"begin": begin + call, "schema": schema, "end": f"}}{end}"}
                for call, schema in zip(calls, schemas, strict=True)
            ]
            trigger = begin.split()[0] if begin else '{"name": "'
            return {"structural_tag": json.dumps({"structures": tags, "triggers": [trigger]})}
        many = f" ({json.dumps(between)} call)*" if self.is_parallel and between else ""
        start = f"start: {json.dumps(begin)} call{many} {json.dumps(end)}"
        # each schema is a rule of its own, so that its references keep their root
        rules = [start, f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
        for i, (call, one) in enumerate(zip(calls, functions, strict=True)):
            rules += [f'call_{i}: {json.dumps(call)} values_{i} "}}"']
            rules += [f"values_{i}: %json {json.dumps(_schema(one))}"]
        return {"ebnf": "\n".join([*rules, ""])}

    def calls(self, kind: str, text: str) -> list[ToolCall]:
        """The calls in a text that must be calls; the arguments of the last may be incomplete."""
        begin, key, between, _ = _FORMS.get(kind, _LIST)
        starts = {_start(name, key): name for name in self.names}
        text, at, calls = text.lstrip(), len(begin), list[ToolCall]()
        while text.startswith(begin):
            start = next((start for start in starts if text.startswith(start, at)), None)
            if start is None:
                break
            at += len(start)
            try:
                _, end = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                end = len(text)
            calls.append(ToolCall(starts[start], text[at:end]))
            at = end + len("}")
            if not between or not text.startswith(between, at):
                break
            at += len(between)
        return calls if self.is_parallel else calls[:1]


NO_TOOLS = Tools()


def _start(name: str, key: str) -> str:
    """The text of a forced call before its arguments."""
    return f'{{"name": {json.dumps(name)}, "{key}": '


def is_json(text: str) -> bool:
    """Whether the arguments of a call are complete, which those of a forced call may not be."""
    try:
        return _DECODER.raw_decode(text)[1] == len(text)
    except (ValueError, RecursionError):
        return False


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments."""
    return (function.get("parameters") or {"type": "object"}) | {OPTIONS: LAYOUT}


def take_tools(body: Body) -> Tools:
    """Take ``tools``, ``tool_choice`` and ``parallel_tool_calls``."""
    tools, choice = body.take("tools", []), body.take("tool_choice", "auto")
    is_parallel = body.flag("parallel_tool_calls", True)
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        message = f"tools={short(tools)} must be a list of at most {MAX_TOOLS} functions"
        raise ApiError(400, message, param="tools")
    names = [_name(i, tool) for i, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise ApiError(400, f"tools must not repeat a name; got {short(names)}", param="tools")
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            message = f"tool_choice={short(choice)} must name one of the tools {short(names)}"
            raise ApiError(400, message, param="tool_choice")
        return Tools(tools, [name], True, False)
    if choice not in ("none", "auto", "required"):
        message = f"tool_choice={short(choice)} must be none, auto, required or a function"
        raise ApiError(400, message, param="tool_choice")
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice='required' needs tools", param="tool_choice")
    return Tools(tools, [] if choice == "none" else names, choice == "required", is_parallel)


def _name(index: int, tool: Any) -> str:
    """Check a tool, and return its function's name."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    parameters = function.get("parameters") if isinstance(function, dict) else None
    is_valid = isinstance(name, str) and 0 < len(name) <= MAX_NAME
    if not is_valid or not isinstance(parameters, dict | None):
        message = (
            f"tools[{index}]={short(tool)} must have function.name, of 1 to {MAX_NAME} characters, "
            "and function.parameters, a JSON schema"
        )
        raise ApiError(400, message, param="tools")
    return str(name)


def with_default_prompt(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Tell a model about tools if its template does not; calls and results become text."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    prompt = PROMPT.format(tools=lines, start=START, end=END)
    found = [_as_text(message) for message in messages]
    if found[0]["role"] == "system":
        first = found[0] | {"content": f"{found[0]['content']}\n\n{prompt}"}
        return [first, *found[1:]]
    return [{"role": "system", "content": prompt}, *found]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = []
    for function in (call["function"] for call in message.get("tool_calls", ())):
        given = function.get("arguments")
        text = given if isinstance(given, str) and is_json(given) else json.dumps(given)
        name = json.dumps(function.get("name"))
        calls.append(f'{START}\n{{"name": {name}, "arguments": {text}}}\n{END}')
    if not calls:
        return message
    content = "\n".join([message["content"], *calls]).lstrip("\n")
    return {"role": message["role"], "content": content}

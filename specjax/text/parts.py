"""The parts of an answer's text: reasoning, content and tool calls, whole or as they grow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specjax.text.reasoning import split_reasoning
from specjax.text.tool_formats import Parsed, ToolCall, ToolFormat, is_json

ANY_OBJECT = {"type": "object"}


class Tools(NamedTuple):
    """The functions of a request, and whether one must be called."""

    declared: Sequence[dict[str, Any]] = ()  # as templates read them: each has a ``function``
    names: Sequence[str] = ()  # those that may be called
    is_required: bool = False
    is_parallel: bool = True  # whether there may be several calls
    format: ToolFormat | None = None  # without one, no call is recognised
    new_id: Callable[[], str] = str  # makes a unique text for the id of a call

    def grammar(self, layout: dict[str, Any], *, is_possible: bool = True) -> dict[str, Any]:
        """Sampling parameters that force a call, or the arguments of calls of strict functions.

        Args:
            layout: options of the JSON text, which each schema gets.
            is_possible: whether arguments can be limited; else strict functions are like others.
        """
        declared = {tool["function"]["name"]: tool["function"] for tool in self.declared}
        functions = {name: tool for name, tool in declared.items() if name in self.names}
        if self.format is None or not functions:
            return {}
        schemas = {
            name: (tool.get("parameters") or ANY_OBJECT) | layout
            for name, tool in functions.items()
        }
        if self.is_required:
            return {"ebnf": self.format.require(schemas, is_parallel=self.is_parallel)}
        if not is_possible or all(tool.get("strict") is not True for tool in functions.values()):
            return {}
        schemas |= {name: ANY_OBJECT for name, tool in functions.items() if not tool.get("strict")}
        tag = self.format.limit(schemas)
        return {} if tag is None else {"structural_tag": tag}

    def parse(self, text: str, *, is_final: bool) -> Parsed:
        """Return the content of a text so far, and its calls."""
        if self.format is None or not self.names:
            return text, []
        content = ""
        calls = self.format.parse_required(text, self.names) if self.is_required else []
        if not calls:
            content, calls = self.format.parse(text, self.names, is_final=is_final)
        return content, calls[: None if self.is_parallel else 1]

    def call_id(self) -> str:
        """Make the id of a call."""
        assert self.format is not None
        return self.format.id_form.format(self.new_id())


NO_TOOLS = Tools()


class NewParts(NamedTuple):
    """Text that a client does not have yet."""

    reasoning: str
    content: str
    # positions of calls with the new text of their arguments; a call that continues has no id
    calls: list[tuple[int, ToolCall]]


@dataclass(kw_only=True)
class TextParts:
    """Parts of one choice's text; each only grows with the text.

    Attributes:
        reasons: whether the text may begin with reasoning.
        is_open: whether the prompt already contains the opening reasoning tag.
        is_apart: if ``False``, the reasoning with its tags is a part of the content.
    """

    tools: Tools = NO_TOOLS
    reasons: bool = False
    is_open: bool = False
    is_apart: bool = True
    reasoning: str = field(default="", init=False)
    content: str = field(default="", init=False)
    calls: list[ToolCall] = field(default_factory=list, init=False)

    def read(self, text: str, *, is_final: bool) -> NewParts:
        """Read the text so far; return what the earlier texts did not have."""
        reasoning, answer = "", text
        if self.reasons:
            reasoning, answer = split_reasoning(text, is_open=self.is_open, is_final=is_final)
        content, calls = self.tools.parse(answer, is_final=is_final)
        if not self.is_apart:
            reasoning, content = "", text[: len(text) - len(answer)] + content
        new_calls = []
        for i, call in enumerate(calls):
            sent = self.calls[i] if i < len(self.calls) else None
            calls[i] = call._replace(id=sent.id if sent else self.tools.call_id())
            if sent is None:
                new_calls.append((i, calls[i]))
            elif len(call.arguments) > len(sent.arguments):
                new_calls.append((i, ToolCall("", call.arguments[len(sent.arguments) :])))
        new = NewParts(reasoning[len(self.reasoning) :], content[len(self.content) :], new_calls)
        self.reasoning, self.content, self.calls = reasoning, content, calls
        return new

    @property
    def ends_with_call(self) -> bool:
        """Whether there are calls, and the last one is complete."""
        return bool(self.calls) and is_json(self.calls[-1].arguments)

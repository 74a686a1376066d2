"""The parts of an answer's text: reasoning, content and tool calls, whole or as they grow."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from specjax.text import harmony
from specjax.text.reasoning import PARSERS, ReasoningTags, split_reasoning
from specjax.text.tokenizer import Tokenizer
from specjax.text.tool_formats import NO_FORMAT, Parsed, ToolCall, ToolFormat, is_json
from specjax.text.xml_calls import Parameters

ANY_OBJECT = {"type": "object"}
Reasoning = ReasoningTags | harmony.Harmony
# what a ``reasoning_parser`` makes of a tokenizer
REASONING: dict[str, Callable[[Tokenizer], Reasoning]] = dict.fromkeys(PARSERS, ReasoningTags.of)
REASONING[harmony.NAME] = harmony.Harmony.of


class Tools(NamedTuple):
    """The functions of a request, and whether one must be called."""

    declared: Sequence[dict[str, Any]] = ()  # as templates read them: each has a ``function``
    names: Sequence[str] = ()  # those that may be called
    is_required: bool = False
    is_parallel: bool = True  # whether there may be several calls
    format: ToolFormat = NO_FORMAT
    new_id: Callable[[], str] = str  # makes a unique text for the id of a call
    token_ids: Mapping[str, int] = MappingProxyType({})  # of marks of calls that are tokens

    def grammar(
        self, layout: dict[str, Any], *, answer: Any = None, is_possible: bool = True
    ) -> dict[str, Any]:
        """Sampling parameters that force a call, or the arguments of calls of strict functions.

        Each of these functions' schemas gets the options of ``layout``. With ``answer``, the schema
        of a text without calls, the text is either calls or an object of it, except with
        ``llama3``; if no call is forced, schemas of functions that are not strict are not read.
        Without ``is_possible``, strict functions are like others.
        """
        functions = {tool["function"]["name"]: tool["function"] for tool in self.declared}
        functions = {name: functions[name] for name in functions if name in self.names}
        schemas = {n: (f.get("parameters") or ANY_OBJECT) | layout for n, f in functions.items()}
        form = self.format.required
        options: dict[str, Any] = {"is_parallel": self.is_parallel, "token_ids": self.token_ids}
        if self.is_required:
            return {"ebnf": form.grammar(schemas, **options)}
        schemas |= {n: ANY_OBJECT for n, f in functions.items() if not f.get("strict")}
        # the first character has to tell an answer from a call
        is_object = isinstance(answer, dict) and answer.get("type") == "object"
        if self.names and form.begin and is_object:
            return {"ebnf": form.grammar(schemas, answer=answer, **options)}
        is_strict = is_possible and any(f.get("strict") is True for f in functions.values())
        if self.format.optional is None or not is_strict:
            return {}
        return {"structural_tag": self.format.optional.tag(schemas)}

    def parameters(self) -> dict[str, Parameters]:
        """The parameters of the functions that may be called."""
        functions = (tool["function"] for tool in self.declared)
        schemas = {function["name"]: function.get("parameters") for function in functions}
        return {name: Parameters(schemas.get(name)) for name in self.names}

    def parse(
        self, text: str, *, is_final: bool, parameters: Mapping[str, Parameters] | None = None
    ) -> Parsed:
        """Return the content of a text so far, and its calls.

        ``parameters`` is the result of :meth:`parameters`, to be kept from one text to the next.
        """
        if not self.names:
            return text, []
        names, content = self.parameters() if parameters is None else parameters, ""
        calls = self.format.required.calls(text, names) if self.is_required else []
        if not calls:
            content, calls = self.format.parse(text, names, is_final=is_final)
        return content, calls[: None if self.is_parallel else 1]


NO_TOOLS = Tools()


@dataclass(kw_only=True)
class TextParts:
    """Parts of one choice's text; each only grows with the text.

    Attributes:
        may_reason: whether the text may begin with reasoning.
        is_inside: whether the prompt already contains the opening reasoning tag.
        is_separate: if ``False``, the reasoning with its tags is a part of the content.
        end_token: the token that ends the reasoning.
        new_reader: makes what finds the parts by tokens, not in the text.
        has_reasoned: whether the text so far has reasoning, which may be empty between its tags.
    """

    tools: Tools = NO_TOOLS
    may_reason: bool = False
    is_inside: bool = False
    is_separate: bool = True
    end_token: int | None = None
    new_reader: Callable[[], harmony.MessageReader] | None = None
    has_reasoned: bool = field(default=False, init=False)
    reasoning: str = field(default="", init=False)
    content: str = field(default="", init=False)
    calls: list[ToolCall] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._parameters = self.tools.parameters()
        self._reader = None if self.new_reader is None else self.new_reader()
        self._messages: list[harmony.Message] = []
        self._num_chars = 0  # of the last text

    def read(
        self, text: str, ids: Sequence[int] = (), *, is_final: bool
    ) -> tuple[str, str, list[tuple[int, ToolCall]]]:
        """Read the text so far; return what is new of the reasoning, the content and the calls.

        ``ids`` are its tokens, which ``new_reader`` needs. Calls come with their index. More
        arguments of an earlier call have no name and no id.
        """
        if self._reader is not None:
            self._messages = self._reader.read(text, ids, is_final=is_final)
            reasoning, content, calls = self._join(text)
        else:
            reasoning, content, calls = self._split(text, is_final)
        self._num_chars, new_calls = len(text), []
        for i, call in enumerate(calls):
            if i == len(self.calls):
                call_id = self.tools.format.id_form.format(self.tools.new_id())
                self.calls.append(call._replace(id=call_id))
                new_calls.append((i, self.calls[i]))
            elif new_arguments := call.arguments[len(self.calls[i].arguments) :]:
                self.calls[i] = self.calls[i]._replace(arguments=call.arguments)
                new_calls.append((i, ToolCall("", new_arguments)))
        begin, self.reasoning = len(self.reasoning), reasoning
        at, self.content = len(self.content), content
        return reasoning[begin:], content[at:], new_calls

    def _split(self, text: str, is_final: bool) -> tuple[str, str, list[ToolCall]]:
        """The parts around tags."""
        reasoning, answer = "", text
        if self.may_reason:
            reasoning, answer = split_reasoning(text, is_inside=self.is_inside, is_final=is_final)
        self.has_reasoned = answer != text
        content, calls = self.tools.parse(answer, is_final=is_final, parameters=self._parameters)
        if not self.is_separate:
            reasoning, content = "", text[: len(text) - len(answer)] + content
        return reasoning, content, calls

    def _join(self, text: str) -> tuple[str, str, list[ToolCall]]:
        """The parts that the messages in a text make."""
        gap, reasoning, content, calls = "\n\n", "", "", list[ToolCall]()
        for message in self._messages:
            body = text[message.begin : message.end]
            if name := message.function(self.tools.names):
                calls.append(ToolCall(name, body.strip(), at=len(content)))
            elif not self.is_separate:
                content += text[message.start : message.stop]
            elif message.is_reasoning:
                reasoning += gap * bool(reasoning and body) + body
            else:  # a call of no known function keeps its header
                body = text[message.start : message.end] if message.recipient else body
                content += gap * bool(content and body) + body
        return reasoning, content, calls[: None if self.tools.is_parallel else 1]

    def cuts(self, text: str, ids: Sequence[int]) -> Iterator[str]:
        """Longer and longer parts of a text, to be read in turn, so that messages come in order."""
        if self._reader is not None:
            stops = [message.stop for message in self._reader.read(text, ids, is_final=False)]
            stops = [stop for stop in stops if stop and self._num_chars < stop < len(text)]
            yield from (text[:stop] for stop in stops)
        yield text

    def count(self, ids: Sequence[int]) -> tuple[int, int]:
        """Count the tokens of the reasoning with its marks, and those before the content."""
        if self._reader is None:
            num_reasoning = len(ids) if self.has_reasoned else 0
            if num_reasoning and self.end_token in ids:
                num_reasoning = ids.index(self.end_token) + 1
            return num_reasoning, num_reasoning
        num_reasoning, begin = 0, len(ids)
        for message in reversed(self._messages):
            if message.is_reasoning:
                num_reasoning += (message.stop_token or len(ids)) - message.first_token
            else:
                begin = message.content_token
        return num_reasoning, begin

    @property
    def ends_with_call(self) -> bool:
        """Whether there are calls, and the last one is complete."""
        return bool(self.calls) and is_json(self.calls[-1].arguments)

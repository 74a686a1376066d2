"""Answers in blocks, one after another: reasoning, text and calls, as in Responses and Messages."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specjax.scheduling.loop import Call
from specjax.scheduling.request import new_id
from specjax.server.answers import HOLE, Answer, Result, quote, token_logprobs
from specjax.server.conversation import Conversation
from specjax.server.exchange import dump
from specjax.server.fields import Body, client_names
from specjax.server.service import Service
from specjax.text.completion import TokenTexts
from specjax.text.parts import TextParts
from specjax.text.tool_formats import ToolCall

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of the answer that the client sees as an item of its own."""

    kind: Kind
    index: int  # in the answer
    call: ToolCall | None = None  # without its arguments
    text: str = ""  # of a call, the arguments
    id: str = field(default_factory=new_id)
    is_cut: bool = False  # it ends because the answer must
    logprobs: list[Result] = field(default_factory=list)  # of the tokens of a text, if requested
    new_logprobs: list[Result] = field(default_factory=list)  # those that no event has had
    template: tuple[str, str] | None = None  # the parts of an event before and after its text


@dataclass(eq=False, kw_only=True)
class BlocksAnswer(Answer):
    """The answer to a request for one completion.

    A subclass writes the whole response, and the events for what is new of a block.
    """

    id: str
    model: str
    new_parts: Callable[[], TextParts]
    texts: TokenTexts
    wants_logprobs: bool = False
    prompt_ids: Sequence[int] | None = None  # if token ids are returned

    def __post_init__(self) -> None:
        self.text_only = not self.wants_logprobs
        self.blocks: list[Block] = []
        self._parsed = self.new_parts()
        self._is_open = self._has_begun = False
        self._num_scored = 0  # number of tokens that need no log-probability any more

    @abstractmethod
    def response(self, meta: Result, num_reasoning: int) -> Result:
        """Return the whole response, from the ``meta_info`` of its last result."""

    @abstractmethod
    def begin(self) -> Iterator[Result]:
        """Yield the events of a stream before any block."""

    @abstractmethod
    def begin_block(self, block: Block) -> Iterator[Result]:
        """Yield the events for a new block without text."""

    @abstractmethod
    def grow_block(self, block: Block, text: str) -> Result:
        """Return the event for new text of a block."""

    @abstractmethod
    def end_block(self, block: Block) -> Iterator[Result]:
        """Yield the events for the end of a block."""

    @abstractmethod
    def end(self, meta: Result, num_reasoning: int) -> Iterator[Result]:
        """Yield the last events of a stream."""

    def tail(self) -> str:
        """Return the end of the next event's JSON object: what no template can hold."""
        return "}"

    def event(self, event: Result) -> bytes:
        """Return a server-sent event that has the name of its type."""
        return f"event: {event['type']}\ndata: {dump(event)[:-1]}{self.tail()}\n\n".encode()

    def body(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        for _ in self._new_events(result):
            pass
        return dump(self.response(result["meta_info"], self._num_reasoning(result))).encode()

    def chunk(self, result: Result) -> bytes:
        events: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            events += map(self.event, self.begin())
        events += self._new_events(result)
        if _is_final(result):
            num_reasoning = self._num_reasoning(result)
            events += map(self.event, self.end(result["meta_info"], num_reasoning))
        return b"".join(events)

    def closing(self) -> bytes:
        return b""

    def token_ids(self) -> Result:
        """Return the token ids of the prompt and of the answer, if they are requested."""
        if self.prompt_ids is None:
            return {}
        return {"prompt_token_ids": self.prompt_ids, "token_ids": self._result["output_ids"]}

    def stop_kind(self, meta: Result) -> str:
        """Return ``call``, or why the text ended: ``stop``, ``length`` or ``abort``."""
        reason: str = meta["finish_reason"]["type"]
        return "call" if reason == "stop" and self._parsed.ends_with_call else reason

    def _new_events(self, result: Result) -> Iterator[bytes]:
        self._result = result
        text, ids = result["text"], result["output_ids"]
        for part in self._parsed.cuts(text, ids):
            yield from self._read(part, ids, is_final=_is_final(result) and part == text)
        if _is_final(result):
            if not self.blocks:
                yield from self._grow("text", "")
            self._score(self.blocks[-1])
            if self.blocks[-1].new_logprobs:  # of tokens without text: a stop string, or the end
                yield self._delta(self.blocks[-1], "")
            self.blocks[-1].is_cut = result["meta_info"]["finish_reason"]["type"] != "stop"
            yield from self._close()

    def _read(self, text: str, ids: Sequence[int], *, is_final: bool) -> Iterator[bytes]:
        reasoning, content, calls = self._parsed.read(text, ids, is_final=is_final)
        if reasoning:
            yield from self._grow("reasoning", reasoning)
        for _, call in calls:
            num_before = max(0, call.at - len(self._parsed.content) + len(content))
            if before := content[:num_before]:
                yield from self._grow("text", before)
            content = content[num_before:]
            yield from self._grow("call", call.arguments, call if call.id else None)
        if content:
            yield from self._grow("text", content)

    def _grow(self, kind: Kind, text: str, call: ToolCall | None = None) -> Iterator[bytes]:
        if not self._is_open or call is not None or self.blocks[-1].kind != kind:
            yield from self._close()
            self.blocks.append(Block(kind, len(self.blocks), call))
            self._is_open = True
            yield from map(self.event, self.begin_block(self.blocks[-1]))
        block = self.blocks[-1]
        block.text += text
        if text:
            self._score(block)
            yield self._delta(block, text)

    def _delta(self, block: Block, text: str) -> bytes:
        """Return the event for new text, which a template of the block needs only to hold."""
        if self.wants_logprobs:
            return self.event(self.grow_block(block, text))
        if block.template is None:
            event = self.grow_block(block, HOLE)
            before, _, after = dump(event)[:-1].rpartition(quote(HOLE))
            block.template = f"event: {event['type']}\ndata: {before}", after
        before, after = block.template
        return f"{before}{quote(text)}{after}{self.tail()}\n\n".encode()

    def _score(self, block: Block) -> None:
        """Give a block of text the log-probabilities of tokens from the content on."""
        if not self.wants_logprobs or block.kind != "text":
            return
        meta = self._result["meta_info"]
        _, num_before = self._parsed.count(self._result["output_ids"])
        begin = max(self._num_scored, num_before)
        chosen = meta["output_token_logprobs"][begin:]
        tops = meta.get("output_top_logprobs", [])[begin:]
        self._num_scored = begin + len(chosen)
        block.new_logprobs = token_logprobs(self.texts, chosen, tops)
        block.logprobs += block.new_logprobs

    def _close(self) -> Iterator[bytes]:
        if self._is_open:
            self._is_open = False
            yield from map(self.event, self.end_block(self.blocks[-1]))

    def _num_reasoning(self, result: Result) -> int:
        return self._parsed.count(result["output_ids"])[0]


def make_call(
    service: Service,
    body: Body,
    model: str,
    conversation: Conversation,
    *,
    id_prefix: str,
    prompt: str,
    names: dict[str, str],
    num_top: int | None = None,
) -> tuple[Call, dict[str, Any]]:
    """Make the engine's call for one answer; also return the fields of a :class:`BlocksAnswer`.

    ``prompt`` is the field of the history, and ``names`` are the client's names of parameters.
    ``num_top`` is the number of top log-probabilities; with ``None`` there are none at all.
    """
    is_stream, request_id = body.flag("stream"), f"{id_prefix}_{new_id()}"
    return_ids = body.flag("return_token_ids")
    with client_names(prompt, body.sources, **names):
        call, new_parts = conversation.make_call(
            body, request_id, is_stream=is_stream, is_separate=True, num_top=num_top
        )
    return call, {
        "id": request_id,
        "model": model,
        "new_parts": new_parts,
        "texts": service.texts,
        "wants_logprobs": num_top is not None,
        "prompt_ids": call.requests[0].input_ids if return_ids else None,
    }


def _is_final(result: Result) -> bool:
    meta: Any = result.get("meta_info")
    return meta is not None and meta["finish_reason"] is not None

"""Answers in OpenAI's formats: a whole one, or the chunks of a stream."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from typing import Any, ClassVar

import specjax
from specjax.server.figures import choice_meta, speculative_metrics, usage
from specjax.server.tokens import TokenTexts
from specjax.text.completion import AcceptPieces

Result = dict[str, Any]  # of the engine
_HOLE = "\0"


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@dataclass
class Sent:
    """How much of a choice its client has."""

    chars: int = 0
    tokens: int = 0
    offset: int = 0  # in the text, of the next token with a log-probability
    ids: int = 0  # of tokens, where they are reported
    pieces: AcceptPieces | None = None  # where drafts are told


@dataclass(eq=False, kw_only=True)
class Answer(ABC):
    """One request's answer. Chunks carry what is new; most of them are a template with a text."""

    id: str
    model: str
    texts: TokenTexts
    num_samples: int
    wants_logprobs: bool = False
    include_usage: bool = False
    include_drafts: bool = False
    skips_special: bool = True  # special tokens are not in the text
    # ids of each prompt, where token ids are reported
    prompt_ids: Sequence[Sequence[int]] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    # whether prompt token ids are in the answer itself or in each choice, as vLLM has it
    has_one_prompt: ClassVar[bool] = False
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __post_init__(self) -> None:
        self._sent: dict[int, Sent] = {}
        self._templates: dict[int, tuple[str, str]] = {}
        self._last: dict[int, Result] = {}  # meta_info of choices that have ended

    @property
    def is_brief(self) -> bool:
        return not (self.wants_logprobs or self.include_drafts or self.prompt_ids is not None)

    @abstractmethod
    def choice(self, index: int, result: Result) -> Result:
        """What a whole answer has of a choice, beside what all have."""

    @abstractmethod
    def opening(self, index: int, sent: Sent, result: Result) -> Result | None:
        """The fields of a choice's first chunk, if there is one before its text."""

    @abstractmethod
    def part(self, text: str) -> Result:
        """The fields of a choice that carry a piece of text."""

    @abstractmethod
    def logprobs(self, sent: Sent, chosen: Sequence[Any], tops: Sequence[Any]) -> Result:
        """``logprobs`` of tokens that come next."""

    def whole(self, results: Sequence[Result]) -> bytes:
        """The whole answer."""
        metas = [result["meta_info"] for result in results]
        choices = [self._ended(i, result) for i, result in enumerate(results)]
        head = self._head(self.kind) | self._prompt_ids(0, is_top=True)
        return dump(head | {"choices": choices} | self._closing(metas)).encode()

    def chunk(self, result: Result) -> bytes:
        """The events of a cumulative result; none where nothing has come that can be sent."""
        index = result.get("index", 0)
        sent = self._sent.get(index)
        events = ""
        if sent is None:
            pieces = self.texts.accept_pieces(self.skips_special) if self.include_drafts else None
            sent = self._sent[index] = Sent(pieces=pieces)
            opening = self.opening(index, sent, result)
            if opening is not None:
                events = self._event([{"index": index} | opening | {"finish_reason": None}])
        text = result["text"]
        new = text[sent.chars :]
        sent.chars = len(text)
        meta = result.get("meta_info")  # brief where only the text is asked for
        if meta is None:
            if new:
                before, behind = self._templates.get(index) or self._template(index)
                events += before + quote(new) + behind
            return events.encode()
        is_final = meta["finish_reason"] is not None
        told: Result = {}
        top = {} if sent.ids else self._prompt_ids(index, is_top=True)
        if sent.pieces is not None:
            ids, flags = result["output_ids"], meta["output_is_draft"]
            parts = sent.pieces.take(text, ids, flags, final=is_final)
            told["pieces"] = [{"text": part, "is_draft": flag} for part, flag in parts]
            new = "".join(part for part, _ in parts)
        if self.prompt_ids is not None:
            told["token_ids"] = result["output_ids"][sent.ids :]
            if not sent.ids:
                told |= self._prompt_ids(index)
            sent.ids = len(result["output_ids"])
        logprobs = self._new_logprobs(sent, meta)
        choice = {"index": index} | self.part(new) | told | {"logprobs": logprobs}
        if not is_final:
            events += self._event([choice | {"finish_reason": None}], **top)
        else:
            self._last[index] = meta
            events += self._event([choice | _end(meta)], **top)
        return events.encode()

    def closing(self) -> bytes:
        """The last event, with usage where it is asked for."""
        if not self.include_usage:
            return b""
        metas = [self._last[i] for i in sorted(self._last)]
        body = self._head(self.chunk_kind) | {"choices": []} | self._closing(metas)
        return f"data: {dump(body)}\n\n".encode()

    def _closing(self, metas: Sequence[Result]) -> Result:
        counts, metrics = usage(metas, self.num_samples), speculative_metrics(metas)
        return {"usage": counts} | ({} if metrics is None else {"metrics": metrics})

    def _ended(self, index: int, result: Result) -> Result:
        ids = self._prompt_ids(index)
        if self.prompt_ids is not None:
            ids["token_ids"] = result["output_ids"]
        return {"index": index} | self.choice(index, result) | ids | _end(result["meta_info"])

    def _prompt_ids(self, index: int, *, is_top: bool = False) -> Result:
        if self.prompt_ids is None or is_top != self.has_one_prompt:
            return {}
        return {"prompt_token_ids": self.prompt_ids[index // self.num_samples]}

    def _head(self, kind: str) -> Result:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"specjax-{specjax.__version__}",
        }

    def _event(self, choices: list[Result], **top: Any) -> str:
        body = self._head(self.chunk_kind) | {"choices": choices} | top
        if self.include_usage:
            body["usage"] = None
        return f"data: {dump(body)}\n\n"

    def _template(self, index: int) -> tuple[str, str]:
        choice = {"index": index} | self.part(_HOLE) | {"logprobs": None, "finish_reason": None}
        before, _, behind = self._event([choice]).rpartition(quote(_HOLE))
        self._templates[index] = before, behind
        return before, behind

    def _new_logprobs(self, sent: Sent, meta: Result) -> Result | None:
        if not self.wants_logprobs:
            return None
        chosen = meta["output_token_logprobs"][sent.tokens :]
        tops = meta.get("output_top_logprobs", [])[sent.tokens :]
        sent.tokens += len(chosen)
        return self.logprobs(sent, chosen, tops)


def _end(meta: Result) -> Result:
    reason = meta["finish_reason"]
    return {
        "finish_reason": reason["type"],
        "matched_stop": reason.get("matched"),
        "meta_info": choice_meta(meta),
    }

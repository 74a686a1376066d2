"""Responses, whole or as events of a stream; those with choices, as OpenAI's; and token usage."""

import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from json.encoder import encode_basestring_ascii as quote
from typing import Any, ClassVar

import numpy as np

import specjax
from specjax.sampling.params import SamplingParams
from specjax.scheduling.request import TokenLogprob
from specjax.server.exchange import dump
from specjax.server.fields import ApiError
from specjax.text.completion import AcceptPieces, TokenTexts

Result = dict[str, Any]  # a result of the engine, or a part of a response
Tops = Sequence[Sequence[TokenLogprob] | None]
# JSON has no infinity; a token that a filter has removed gets this log-probability.
LEAST = -9999.0
MAX_LOGPROBS = 20
HOLE = "\0"
_DONE = b"data: [DONE]\n\n"
# ``meta_info`` fields to omit: the response has them elsewhere, or they are as long as the text.
_LONG = frozenset(
    "id finish_reason output_token_logprobs output_top_logprobs input_token_logprobs "
    "input_top_logprobs output_is_draft routed_experts".split()
)


class Answer(ABC):
    """Writes the response to one request, in the format of an API."""

    text_only: bool  # whether results of a stream, except the last, need only their text
    wants_logprobs: bool

    @abstractmethod
    def body(self, results: Sequence[Result]) -> bytes:
        """Return the body of a response that is not a stream."""

    @abstractmethod
    def chunk(self, result: Result) -> bytes:
        """Return the events for a cumulative result; empty if it has nothing new."""

    def closing(self) -> bytes:
        """Return the last events of a stream."""
        return _DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the last events of a stream that cannot go on."""
        return b"data: " + error.json() + b"\n\n" + _DONE


@dataclass
class Cursor:
    """How much of a choice the client already has."""

    chars: int = 0
    tokens: int = 0
    offset: int = 0  # text offset of the next token with a log-probability
    ids: int = 0  # number of sent token ids, if they are reported
    pieces: AcceptPieces | None = None  # if drafts are reported
    template: tuple[str, str] | None = None  # the parts of a chunk before and after its text
    last: Result | None = None  # meta_info of a finished choice


@dataclass(eq=False, kw_only=True)
class ChoicesAnswer(Answer):
    """A response with choices. A chunk has only new text, which most chunks put in a template."""

    id: str
    model: str
    texts: TokenTexts
    params: SamplingParams
    prompt_ids: Sequence[Sequence[int]]
    wants_logprobs: bool = False
    include_usage: bool = False
    include_drafts: bool = False
    return_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    # prompt token ids are at the top level if True, else in each choice (as in vLLM)
    has_one_prompt: ClassVar[bool] = False
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __post_init__(self) -> None:
        self._sent: dict[int, Cursor] = {}
        self.text_only = not (self.wants_logprobs or self.include_drafts or self.return_ids)

    @abstractmethod
    def message(self, index: int, result: Result) -> Result:
        """Return the fields of a choice that contain its whole text."""

    @abstractmethod
    def opening(self, index: int) -> Result | None:
        """Return the fields of a chunk to send before a choice's text; ``None`` for no chunk."""

    @abstractmethod
    def piece(self, text: str) -> Result:
        """Return the fields of a chunk that contain a piece of a choice's text."""

    def finish_reason(self, index: int, reason: str) -> str:
        """Return the finish reason of a choice whose text has ended for the engine's ``reason``."""
        return reason

    def new_text(self, sent: Cursor, index: int, result: Result) -> tuple[str, str]:
        """Return events to send first, and the text that the client does not have."""
        text: str = result["text"]
        begin, sent.chars = sent.chars, len(text)
        return "", text[begin:]

    @abstractmethod
    def logprobs(self, sent: Cursor, chosen: Sequence[TokenLogprob], tops: Tops) -> Result:
        """Return the ``logprobs`` field for the next tokens."""

    def body(self, results: Sequence[Result]) -> bytes:
        choices = []
        for i, result in enumerate(results):
            choice = {"index": i} | self.message(i, result)
            choice |= self._tokens(i, Cursor(), result, with_prompt=True)
            choices.append(choice | self._end(i, result["meta_info"]))
        head = self._head(self.kind) | self._prompt_ids(0, is_top=True)
        metas = [result["meta_info"] for result in results]
        usage = self._usage(metas)
        return dump(head | {"choices": choices} | usage | reported_experts(metas)).encode()

    def chunk(self, result: Result) -> bytes:
        index = result.get("index", 0)
        sent, events = self._sent.get(index), ""
        if sent is None:
            sent = self._sent[index] = Cursor()
            if self.include_drafts:
                sent.pieces = self.texts.accept_pieces(self.params.skip_special_tokens)
            opening = self.opening(index)
            if opening is not None:
                end: Result = {"logprobs": None, "finish_reason": None}
                prompt_meta = result.get("meta_info", {})
                if scored := prompt_meta.get("input_token_logprobs"):
                    tops = prompt_meta.get("input_top_logprobs", [])
                    end["logprobs"] = self.logprobs(sent, scored, tops)
                top = self._prompt_ids(index, is_top=True)
                events = self._event([{"index": index} | opening | end], **top)
        new_events, new_text = self.new_text(sent, index, result)
        events += new_events
        meta = result.get("meta_info")  # text-only results have no meta_info
        if meta is None:
            if new_text:
                before, after = sent.template or self._template(index, sent)
                events += before + quote(new_text) + after
            return events.encode()
        is_final = meta["finish_reason"] is not None
        choice: Result = {"index": index}
        if sent.pieces is not None:
            ids, flags = result["output_ids"], meta["output_is_draft"]
            pieces = sent.pieces.take(result["text"], ids, flags, final=is_final)
            choice["pieces"] = [{"text": piece, "is_draft": flag} for piece, flag in pieces]
            new_text = "".join(piece for piece, _ in pieces)
        choice |= self.piece(new_text) | self._tokens(index, sent, result)
        if is_final:
            sent.last = meta
        end = self._end(index, meta) if is_final else {"finish_reason": None}
        return (events + self._event([choice | end], **reported_experts([meta]))).encode()

    def closing(self) -> bytes:
        """Return the usage, if it was requested, and the mark of the end."""
        if not self.include_usage:
            return _DONE
        lasts = [self._sent[i].last for i in sorted(self._sent)]
        metas = [meta for meta in lasts if meta is not None]
        body = self._head(self.chunk_kind) | {"choices": []} | self._usage(metas)
        return f"data: {dump(body)}\n\n".encode() + _DONE

    def _tokens(
        self, index: int, sent: Cursor, result: Result, *, with_prompt: bool = False
    ) -> Result:
        """Return the fields of a choice for tokens that the client does not have."""
        fields: Result = {"logprobs": None}
        if self.return_ids:
            fields |= {} if sent.ids else self._prompt_ids(index)
            fields["token_ids"] = result["output_ids"][sent.ids :]
            sent.ids = len(result["output_ids"])
        if self.wants_logprobs:
            meta, begin = result["meta_info"], sent.tokens
            chosen = meta["output_token_logprobs"][begin:]
            tops = meta.get("output_top_logprobs", [])[begin:]
            sent.tokens += len(chosen)
            if with_prompt:
                chosen = meta.get("input_token_logprobs", []) + chosen
                tops = meta.get("input_top_logprobs", []) + tops
            fields["logprobs"] = self.logprobs(sent, chosen, tops)
        return fields

    def _usage(self, metas: Sequence[Result]) -> Result:
        counts, metrics = usage(metas, self.params.n), speculative_metrics(metas)
        return {"usage": counts} | ({} if metrics is None else {"metrics": metrics})

    def _prompt_ids(self, index: int, *, is_top: bool = False) -> Result:
        if not self.return_ids or is_top != self.has_one_prompt:
            return {}
        return {"prompt_token_ids": self.prompt_ids[index // self.params.n]}

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

    def _end(self, index: int, meta: Result) -> Result:
        reason = meta["finish_reason"]
        return {
            "finish_reason": self.finish_reason(index, reason["type"]),
            "matched_stop": reason.get("matched"),
            "meta_info": {name: value for name, value in meta.items() if name not in _LONG},
        }

    def _template(self, index: int, sent: Cursor) -> tuple[str, str]:
        choice = {"index": index} | self.piece(HOLE) | {"logprobs": None, "finish_reason": None}
        before, _, after = self._event([choice]).rpartition(quote(HOLE))
        sent.template = before, after
        return before, after


def usage(metas: Sequence[Result], num_samples: int) -> Result:
    """Count the tokens of a request. Each prompt counts once; its samples are adjacent."""
    firsts = metas[::num_samples]
    prompt = sum(meta["prompt_tokens"] for meta in firsts)
    completion = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(meta["cached_tokens"] for meta in firsts)},
    }


def speculative_metrics(metas: Sequence[Result]) -> Result | None:
    """Return acceptance metrics over all choices, as vLLM does; ``None`` without speculation."""
    metas = [meta for meta in metas if "spec_verify_ct" in meta]
    if not metas:
        return None
    verifies = sum(meta["spec_verify_ct"] for meta in metas)
    accepted = sum(meta["spec_num_correct_drafts"] for meta in metas)
    proposed = sum(meta["spec_num_proposed_drafts"] for meta in metas)
    counts = [meta["spec_correct_drafts_histogram"] for meta in metas]
    histogram = [sum(column) for column in zip_longest(*counts, fillvalue=0)]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / verifies if verifies else 0.0,
            "draft_acceptance_rate": accepted / proposed if proposed else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": verifies,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": proposed,
            "num_spec_tokens": len(histogram) - 1,
        }
    }


def reported_experts(metas: Sequence[Result]) -> Result:
    """The field ``sglext`` of SGLang, if experts are reported: a text, or a list for choices."""
    texts = [encoded(meta["routed_experts"]) for meta in metas if "routed_experts" in meta]
    return {"sglext": {"routed_experts": texts if texts[1:] else texts[0]}} if texts else {}


def encoded(experts: np.ndarray) -> str:
    """Base64 of i32 values, little endian and in C order."""
    return b64encode(experts.astype("<i4").tobytes()).decode()


def token_logprobs(texts: TokenTexts, chosen: Sequence[TokenLogprob], tops: Tops) -> list[Result]:
    """Return an entry per token, with its best alternatives if there are ``tops``."""

    def entry(value: float | None, token: int) -> Result:
        assert value is not None
        text, data = texts.of(token)
        return {"token": text, "logprob": finite(value), "bytes": list(data)}

    entries = []
    for i, (value, token, _) in enumerate(chosen):
        best = (tops[i] or ()) if tops else ()
        alternatives = [entry(top, other) for top, other, _ in best]
        entries.append(entry(value, token) | {"top_logprobs": alternatives})
    return entries


def finite(value: float) -> float:
    return value if value > LEAST else LEAST  # for NaN too

"""``POST /generate`` and ``/abort_request``: SGLang's native routes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specjax.sampling.params import SamplingParams
from specjax.scheduling.loop import Call
from specjax.server.answers import Answer, encoded, finite
from specjax.server.exchange import Exchange, dump
from specjax.server.fields import REFUSED, ApiError, Body, client_names, finish_fields, is_neutral
from specjax.server.service import Service
from specjax.text.completion import TokenTexts

_LOGPROBS = {"output_token_logprobs", "input_token_logprobs"}
_TOPS = {"output_top_logprobs", "input_top_logprobs"}
_OF_PROMPT = {"input_token_logprobs", "input_top_logprobs"}
_GROWING = {"output_token_logprobs", "output_top_logprobs", "output_is_draft"}


@client_names()
def read_generate(service: Service, body: Body) -> "tuple[Call, NativeAnswer]":
    """Check and tokenise a request. Its fields are those of :meth:`specjax.Engine.generate`."""
    service.check_model(body)
    text, ids = (service.take_inputs(body, name) for name in ("text", "input_ids"))
    if (text is None) == (ids is None):
        raise ApiError(400, "set exactly one of text and input_ids", param="text")
    inputs = text if ids is None else ids
    if inputs == []:
        raise ApiError(400, "text or input_ids is an empty list; give at least one input")
    # the engine refuses other lists and states the reason
    is_batch = isinstance(inputs, list) and isinstance(inputs[0], str | list)
    count = len(inputs) if is_batch else 1
    sampling = body.take("sampling_params")
    is_stream, is_incremental = body.flag("stream"), body.flag("incremental")
    names = (
        "rid return_logprob top_logprobs_num logprob_start_len return_routed_experts "
        "routed_experts_start_len"
    )
    options = {name: body.take(name) for name in names.split() if name in body}
    has_texts = body.flag("return_text_in_logprobs")
    finish_fields(body, service.ignored_fields)
    service.check_count(count)
    values = sampling if isinstance(sampling, list) else [sampling]
    if values is sampling and len(values) != count:
        message = f"sampling_params has {len(values)} values for {count} inputs; give one per input"
        raise ApiError(400, message, param="sampling_params")
    params_list = [_sampling(value, service.default_max_tokens) for value in values]
    service.check_count(count * max((params.n for params in params_list), default=1))
    params = params_list if isinstance(sampling, list) else params_list[0]
    call = service.engine.make_call(text, params, input_ids=ids, stream=is_stream, **options)
    has_logprobs = any(request.top_logprobs is not None for request in call.requests)
    texts = service.texts if has_texts else None
    return call, NativeAnswer(call.is_batch, has_logprobs, texts, is_incremental)


def _sampling(sampling: Any, max_tokens: int | None) -> SamplingParams:
    """Read sampling parameters; ignore nulls and neutral values of unsupported fields.

    ``max_tokens`` is the limit of those that set none, if it is not ``None``.
    """
    if isinstance(sampling, dict | None):
        sampling = ({} if max_tokens is None else {"max_new_tokens": max_tokens}) | {
            name: value
            for name, value in (sampling or {}).items()
            if value is not None and not (name in REFUSED and is_neutral(name, value))
        }
    return SamplingParams.of(sampling)


@dataclass
class NativeAnswer(Answer):
    """Sends engine results unchanged; streamed results are cumulative or incremental."""

    is_batch: bool
    wants_logprobs: bool
    texts: TokenTexts | None  # set if log-probabilities include the text of tokens
    is_incremental: bool = False
    # characters and tokens that the client already has, by choice
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    text_only = False

    def body(self, results: Sequence[dict[str, Any]]) -> bytes:
        plain_results = [self._plain(result) for result in results]
        return dump(plain_results if self.is_batch else plain_results[0]).encode()

    def chunk(self, result: dict[str, Any]) -> bytes:
        unsent = self._new(result) if self.is_incremental else result
        return f"data: {dump(self._plain(unsent))}\n\n".encode()

    def _new(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a result that earlier chunks do not have."""
        index, text, ids = result.get("index", 0), result["text"], result["output_ids"]
        chars, tokens = self.sent.get(index, (0, 0))
        self.sent[index] = len(text), len(ids)
        items, sent = result["meta_info"].items(), _OF_PROMPT if tokens else ()
        meta = {name: value[tokens:] if name in _GROWING else value for name, value in items}
        meta = {name: value for name, value in meta.items() if name not in sent}
        return result | {"text": text[chars:], "output_ids": ids[tokens:], "meta_info": meta}

    def _plain(self, result: dict[str, Any]) -> dict[str, Any]:
        meta = dict(result["meta_info"])
        if (experts := meta.get("routed_experts")) is not None:
            meta["routed_experts"] = encoded(experts)
        if not self.wants_logprobs:
            return result | {"meta_info": meta}
        for name in _LOGPROBS & meta.keys():
            meta[name] = self._triples(meta[name])
        for name in _TOPS & meta.keys():
            meta[name] = [best and self._triples(best) for best in meta[name]]
        return result | {"meta_info": meta}

    def _triples(self, triples: Sequence[Any]) -> list[Any]:
        return [
            (value and finite(value), token, self.texts and self.texts.of(token)[0])
            for value, token, _ in triples
        ]


async def answer_abort(service: Service, exchange: Exchange) -> dict[str, Any]:
    body = await exchange.read_object(service.max_body_bytes, service.large_bodies)
    rid, abort_all = body.text("rid", ""), body.flag("abort_all")
    finish_fields(body, service.ignored_fields)
    if abort_all:
        service.access.check_admin(exchange)
    with client_names():
        service.engine.abort_request(rid, abort_all)
    return {"success": True}

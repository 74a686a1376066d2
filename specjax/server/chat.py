"""``POST /v1/chat/completions``: the next message of a conversation."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specjax.checks import short
from specjax.server.answers import Answer, Result, Sent
from specjax.server.body import Body
from specjax.server.completions import MAX_LOGPROBS, check_best_of, take_shown
from specjax.server.errors import ApiError
from specjax.server.exchange import Exchange
from specjax.server.fields import finish_fields
from specjax.server.generating import MAX_REPORTED, Job, generate
from specjax.server.logprobs import chat_logprobs
from specjax.server.messages import take_conversation
from specjax.server.sampling import client_names, take_sampling
from specjax.server.service import Service


async def answer_chat(service: Service, exchange: Exchange) -> None:
    # the chat template is rendered by another process
    await generate(service, exchange, read_chat, renders=True)


def read_chat(service: Service, body: Body) -> Job:
    """Check a request, put it through the chat template and tokenise it."""
    model = service.check_model(body)
    conversation = take_conversation(body)
    wants_logprobs = body.flag("logprobs")
    num_top = body.integer("top_logprobs", 0, at_least=0, at_most=MAX_LOGPROBS)
    if num_top and not wants_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    is_stream, shown = take_shown(body)
    _merge_limits(body)
    length = service.engine.context_length
    is_cut = wants_logprobs and "max_tokens" not in body
    params = take_sampling(body, length)
    check_best_of(body, params)
    finish_fields(body, service.ignored_fields)
    service.check_count(params.n)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    with client_names("messages", top_logprobs_num="top_logprobs"):
        if is_cut:
            most = MAX_REPORTED // (params.n * (1 + num_top))
            params = replace(params, max_new_tokens=min(length, most))
        ids = conversation.ids(service.engine.tokenizer, length)
        call = service.engine.make_call(
            stream=is_stream,
            sampling_params=params,
            rid=request_id,
            input_ids=ids,
            return_logprob=wants_logprobs,
            top_logprobs_num=num_top,
        )
    answer = ChatAnswer(
        id=request_id,
        model=model,
        texts=service.texts,
        num_samples=params.n,
        wants_logprobs=wants_logprobs,
        skips_special=params.skip_special_tokens,
        prompt_ids=[ids] if shown.pop("ids") else None,
        **shown,
    )
    return Job(call, answer)


def _merge_limits(body: Body) -> None:
    """``max_completion_tokens`` is the newer name of ``max_tokens``."""
    newer = body.take("max_completion_tokens")
    if newer is None:
        return
    older = body.take("max_tokens", newer)
    if older != newer:
        message = (
            f"max_tokens={short(older)} and max_completion_tokens={short(newer)}: give one of them"
        )
        raise ApiError(400, message, param="max_completion_tokens")
    body.put("max_tokens", newer)


@dataclass(eq=False, kw_only=True)
class ChatAnswer(Answer):
    """Choices with a ``message``, or with a ``delta`` of one."""

    has_one_prompt = True
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, index: int, result: Result) -> Result:
        meta, logprobs = result["meta_info"], None
        if self.wants_logprobs:
            tops = meta.get("output_top_logprobs", [])
            logprobs = self.logprobs(Sent(), meta["output_token_logprobs"], tops)
        message = {"role": "assistant", "content": result["text"], "refusal": None}
        return {"message": message, "logprobs": logprobs}

    def opening(self, index: int, sent: Sent, result: Result) -> Result | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def part(self, text: str) -> Result:
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, sent: Sent, chosen: Sequence[Any], tops: Sequence[Any]) -> Result:
        return chat_logprobs(self.texts, chosen, tops)

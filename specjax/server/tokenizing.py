"""``POST /tokenize`` and ``/detokenize``, with the fields of vLLM and of SGLang."""

import asyncio
from collections.abc import Callable
from typing import Any

from specjax.checks import ParameterError, is_integer
from specjax.server.answers import dump
from specjax.server.body import Body, parse_object
from specjax.server.errors import ApiError
from specjax.server.exchange import Exchange
from specjax.server.fields import finish_fields
from specjax.server.messages import take_conversation
from specjax.server.sampling import client_names
from specjax.server.service import Service
from specjax.text.tokenizer import Tokenizer

# ids of one text, and bytes of a body of ids
MAX_DETOKENIZED, MAX_IDS_BYTES = 2**20, 2**23


async def answer_tokenize(service: Service, exchange: Exchange) -> None:
    await _answer(service, exchange, _tokenize, service.max_body_bytes)


async def answer_detokenize(service: Service, exchange: Exchange) -> None:
    await _answer(service, exchange, _detokenize, min(service.max_body_bytes, MAX_IDS_BYTES))


async def _answer(
    service: Service, exchange: Exchange, read: Callable[[Service, Body], bytes], max_bytes: int
) -> None:
    async with exchange.body(max_bytes, service.large_bodies) as data:
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(
            service.renderers, lambda: read(service, Body(parse_object(data)))
        )
    await exchange.reply(result)


def _tokenize(service: Service, body: Body) -> bytes:
    """Ids of a ``prompt``, of several or of ``messages``."""
    service.check_model(body)
    tokenizer = _tokenizer(service)
    conversation = take_conversation(body) if "messages" in body else None
    with client_names("prompt"):
        prompt = service.take_inputs(body, "prompt")
    adds_special = body.flag("add_special_tokens", True)
    wants_texts = body.flag("return_token_strs")
    finish_fields(body, service.ignored_fields)
    is_batch = isinstance(prompt, list)
    length = service.engine.context_length
    with client_names("prompt" if conversation is None else "messages"):
        if conversation is not None:
            ids = [conversation.ids(tokenizer, length)]
        else:
            texts = prompt if is_batch else [prompt]
            if not all(isinstance(text, str) for text in texts):
                raise ApiError(400, "prompt must be a text or a list of texts", param="prompt")
            for text in texts:
                tokenizer.check_length(len(text), length)
            ids = [tokenizer.encode(text, adds_special) for text in texts]
    names = None
    if wants_texts:
        names = [[tokenizer.backend.id_to_token(i) for i in row] for row in ids]

    def shown(rows: list[Any] | None) -> Any:
        return rows if rows is None or is_batch else rows[0]

    return dump(
        {
            "count": shown([len(row) for row in ids]),
            "max_model_len": service.engine.context_length,
            "tokens": shown(ids),
            "token_strs": shown(names),
        }
    ).encode()


def _detokenize(service: Service, body: Body) -> bytes:
    """The text of ``tokens``, or the texts of several lists of them."""
    service.check_model(body)
    tokenizer = _tokenizer(service)
    try:
        tokens = body.inputs("tokens", max_ids=MAX_DETOKENIZED, max_rows=service.max_requests)
    except ParameterError:
        message = f"tokens has a list of more than {MAX_DETOKENIZED} ids"
        raise ApiError(400, message, param="tokens") from None
    skips_special = body.flag("skip_special_tokens", False)
    finish_fields(body, service.ignored_fields)
    is_batch = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)
    rows = tokens if is_batch else [tokens]
    size = service.engine.target.config.vocab_size
    for row in rows:
        if not isinstance(row, list) or not all(is_integer(i) and 0 <= i < size for i in row):
            message = f"tokens must be a list of ids below {size}, or a list of such lists"
            raise ApiError(400, message, param="tokens")
    texts = [tokenizer.decode(row, skips_special) for row in rows]
    shown = texts if is_batch else texts[0]
    return dump({"prompt": shown, "text": shown}).encode()


def _tokenizer(service: Service) -> Tokenizer:
    tokenizer = service.engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, "the server has no tokenizer (skip_tokenizer_init)")
    return tokenizer

"""``POST /tokenize`` and ``/detokenize``, with the fields of vLLM and of SGLang."""

import asyncio
from typing import Any

from specjax.checks import is_integer
from specjax.server.answers import dump
from specjax.server.body import Body
from specjax.server.errors import ApiError
from specjax.server.exchange import Exchange
from specjax.server.fields import refuse_rest
from specjax.server.messages import take_conversation
from specjax.server.sampling import client_names
from specjax.server.service import Service
from specjax.text.tokenizer import Tokenizer


async def answer_tokenize(service: Service, exchange: Exchange) -> None:
    body = await exchange.read_object(service.max_body_bytes)
    result = await asyncio.to_thread(_tokenize, service, body)
    await exchange.reply(result)


async def answer_detokenize(service: Service, exchange: Exchange) -> None:
    body = await exchange.read_object(service.max_body_bytes)
    result = await asyncio.to_thread(_detokenize, service, body)
    await exchange.reply(result)


def _tokenize(service: Service, body: Body) -> bytes:
    """Ids of a ``prompt``, of several or of ``messages``."""
    service.check_model(body)
    tokenizer = _tokenizer(service)
    conversation = take_conversation(body) if "messages" in body else None
    prompt = body.take("prompt")
    adds_special = body.flag("add_special_tokens", True)
    wants_texts = body.flag("return_token_strs")
    refuse_rest(body)
    is_batch = isinstance(prompt, list)
    with client_names():
        if conversation is not None:
            ids = [conversation.ids(tokenizer)]
        else:
            texts = prompt if is_batch else [prompt]
            if not all(isinstance(text, str) for text in texts):
                raise ApiError(400, "prompt must be a text or a list of texts", param="prompt")
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
    tokens = body.take("tokens")
    skips_special = body.flag("skip_special_tokens", False)
    refuse_rest(body)
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

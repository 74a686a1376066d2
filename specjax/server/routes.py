"""Routes that generate no text: page, health, models, metrics, tokens and administration."""

import asyncio
import base64
import hashlib
import os
import re
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

import specjax
from specjax.checks import ParameterError, is_integer
from specjax.server.chat import take_conversation
from specjax.server.exchange import Exchange, Header, dump
from specjax.server.fields import ApiError, Body, bad_value, client_names, finish_fields
from specjax.server.service import Service

HEALTH_SECONDS = 20.0
MAX_DETOKENIZED, MAX_IDS_BYTES = 2**20, 2**23  # maximum ids per text, and bytes of a body
_STARTED = int(time.time())

Json = dict[str, Any]


async def page(service: Service, exchange: Exchange) -> None:
    body, headers = load_page()
    await exchange.reply(body, kind=b"text/html; charset=utf-8", headers=headers)


@cache
def load_page() -> tuple[bytes, list[Header]]:
    """Return the page and headers that allow only its own script and requests to this server."""
    body = files(__package__).joinpath("page.html").read_bytes()

    def digest(tag: bytes) -> str:
        """Return the content security policy's hash of the page's only ``tag`` element."""
        (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {digest(b'script')}; style-src {digest(b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return body, [
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    ]


async def health(service: Service, exchange: Exchange) -> Json:
    """Answer 200 if requests are accepted, else 503."""
    service.check_open()
    return {}


async def health_generate(service: Service, exchange: Exchange) -> Json:
    """Answer 200 if the engine generates a token."""
    service.check_open()
    output_ids: list[int] = []
    with service.refusals(), suppress(TimeoutError):
        async with asyncio.timeout(HEALTH_SECONDS):  # the engine's thread may not respond
            probe = service.engine.make_probe(HEALTH_SECONDS)
            output_ids = (await service.engine.async_run(probe))["output_ids"]
    if not output_ids:
        raise ApiError(503, f"no token generated in {HEALTH_SECONDS:g} s", code="engine_slow")
    return {}


async def version(service: Service, exchange: Exchange) -> Json:
    return {"version": specjax.__version__}


async def models(service: Service, exchange: Exchange) -> Json:
    # Codex needs the field "models"; an entry there would replace its system prompt
    return {"object": "list", "data": [_model_card(service)], "models": []}


async def model(service: Service, exchange: Exchange) -> Json:
    name = exchange.scope["path_params"]["name"]
    if name != service.name:
        raise service.unknown_model(name)
    return _model_card(service)


def _model_card(service: Service) -> Json:
    return {
        "id": service.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "specjax",
        "root": service.engine.target.name,
        "parent": None,
        "max_model_len": service.engine.context_length,
    }


async def kv_event_sources(service: Service, exchange: Exchange) -> None:
    await exchange.reply(dump(service.engine.kv_event_sources).encode())


async def server_info(service: Service, exchange: Exchange) -> Json:
    return service.engine.get_server_info() | {"served_model_name": service.name}


async def model_info(service: Service, exchange: Exchange) -> Json:
    target, tokenizer = service.engine.target, service.engine.tokenizer
    return {
        "model_path": target.name,
        "tokenizer_path": target.name,
        "served_model_name": service.name,
        "model_type": target.config.model_type,
        "is_generation": True,
        "has_chat_template": tokenizer is not None and tokenizer.chat_template is not None,
        "max_model_len": service.engine.context_length,
    }


async def tokenizer_info(service: Service, exchange: Exchange) -> Json:
    tokenizer = service.engine.tokenizer
    if tokenizer is None:
        raise ApiError(404, "the server has no tokenizer (skip_tokenizer_init); send input_ids")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": service.engine.context_length,
        "chat_template": tokenizer.chat_template,
        "eos_token_ids": tokenizer.eos_token_ids,
        **tokenizer.special_tokens,
    }


async def loads(service: Service, exchange: Exchange) -> Json:
    totals = service.engine.metrics.snapshot()
    load = {
        "dp_rank": 0,
        "num_running_reqs": totals.num_running,
        "num_waiting_reqs": totals.num_waiting,
        "num_used_tokens": totals.num_used_tokens,
        "max_total_num_tokens": totals.max_total_tokens,
        "max_running_requests": service.engine.config.num_slots - 1,
        "token_usage": totals.token_usage,
        "gen_throughput": totals.gen_throughput,
        "cache_hit_rate": totals.cache_hit_rate,
    }
    timestamp = datetime.now(UTC).isoformat()
    return {"timestamp": timestamp, "version": specjax.__version__, "loads": [load]}


@client_names("prompt")
def tokenize(service: Service, body: Body) -> bytes:
    """Tokenise ``messages``, a ``prompt`` or a list of prompts (vLLM's and SGLang's fields)."""
    service.check_model(body)
    tokenizer, length = service.tokenizer, service.engine.context_length
    conversation = take_conversation(service, body) if "messages" in body else None
    prompt = service.take_inputs(body, "prompt")
    adds_special = body.flag("add_special_tokens", True)
    wants_texts = body.flag("return_token_strs")
    finish_fields(body, service.ignored_fields)
    is_batch = isinstance(prompt, list)
    if conversation is not None:
        with client_names("messages"):
            ids = [conversation.encode()]
    else:
        texts = prompt if is_batch else [prompt]
        if not all(isinstance(text, str) for text in texts):
            raise ApiError(400, "prompt must be a string or a list of strings", param="prompt")
        for text in texts:
            tokenizer.check_length(len(text), length)
        ids = [tokenizer.encode(text, adds_special) for text in texts]
    names = None
    if wants_texts:
        names = [[tokenizer.backend.id_to_token(i) for i in row] for row in ids]

    def unbatched(rows: list[Any] | None) -> Any:
        return rows if rows is None or is_batch else rows[0]

    answer = {"count": unbatched([len(row) for row in ids]), "max_model_len": length}
    return dump(answer | {"tokens": unbatched(ids), "token_strs": unbatched(names)}).encode()


def detokenize(service: Service, body: Body) -> bytes:
    service.check_model(body)
    tokenizer = service.tokenizer
    try:
        tokens = body.inputs("tokens", max_ids=MAX_DETOKENIZED, max_rows=service.max_requests)
    except ParameterError:
        message = f"tokens must have at most {MAX_DETOKENIZED} ids per list"
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
    answer = texts if is_batch else texts[0]
    return dump({"prompt": answer, "text": answer}).encode()


async def flush_cache(service: Service, exchange: Exchange) -> Json:
    """Drop all cached KV; running requests recompute theirs."""
    await service.administrate(service.engine.flush_cache)
    return {"success": True, "message": "the cache is empty"}


async def update_weights(service: Service, exchange: Exchange) -> Json:
    """Replace the weights by those of a checkpoint on the server's disk."""
    body = await exchange.read_object(service.max_body_bytes, service.large_bodies)
    paths = {name: body.text(name) for name in ("model_path", "draft_path")}
    for name, path in paths.items():
        # a remote caller must not make the server download from the hub
        if path is not None and not os.path.exists(path):
            raise bad_value(name, path, "does not exist on the server")
    finish_fields(body, service.ignored_fields)
    if service.is_updating:
        raise ApiError(409, "a weight update is running; wait until it ends", code="updating")
    service.is_updating = True
    try:
        await service.administrate(service.engine.update_weights_from_disk, *paths.values())
    except OSError as error:
        raise ApiError(400, str(error)) from error
    finally:
        service.is_updating = False
    return {"success": True, "message": "the weights were replaced"}

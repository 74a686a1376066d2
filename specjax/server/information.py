"""What the server says of itself: models, health, load, figures."""

import time
from datetime import UTC, datetime
from typing import Any

import specjax
from specjax.metrics.totals import Totals
from specjax.server.answers import dump
from specjax.server.errors import ApiError
from specjax.server.exchange import Exchange
from specjax.server.service import Service

HEALTH_SECONDS = 20.0
_STARTED = int(time.time())


async def answer_health(service: Service, exchange: Exchange) -> None:
    """200 where a request would be served now, else 503."""
    service.check_open()
    await exchange.reply(b"{}")


async def answer_version(service: Service, exchange: Exchange) -> None:
    await exchange.reply(dump({"version": specjax.__version__}).encode())


async def answer_tokenizer_info(service: Service, exchange: Exchange) -> None:
    """The chat template and what texts are made of."""
    tokenizer = service.engine.tokenizer
    if tokenizer is None:
        raise ApiError(404, "the server has no tokenizer (skip_tokenizer_init)")
    info = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": service.engine.context_length,
        "chat_template": tokenizer.chat_template,
        "eos_token_ids": tokenizer.eos_token_ids,
        **tokenizer.special_tokens,
    }
    await exchange.reply(dump(info).encode())


async def answer_health_generate(service: Service, exchange: Exchange) -> None:
    """200 where a token has come out of the engine."""
    service.check_open()
    with service.refusals():
        result = await service.engine.async_run(service.engine.make_probe(HEALTH_SECONDS))
    if not result["output_ids"]:
        raise ApiError(503, f"no token came within {HEALTH_SECONDS:g} s", code="engine_slow")
    await exchange.reply(b"{}")


async def answer_models(service: Service, exchange: Exchange) -> None:
    await exchange.reply(dump({"object": "list", "data": [model_card(service)]}).encode())


async def answer_model(service: Service, exchange: Exchange) -> None:
    name = exchange.scope["path_params"]["name"]
    if name != service.name:
        message = f"the model {name!r} does not exist; there is {service.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    await exchange.reply(dump(model_card(service)).encode())


def model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "specjax",
        "root": service.engine.target.name,
        "parent": None,
        "max_model_len": service.engine.context_length,
    }


async def answer_server_info(service: Service, exchange: Exchange) -> None:
    info = service.engine.get_server_info() | {"served_model_name": service.name}
    await exchange.reply(dump(info).encode())


async def answer_model_info(service: Service, exchange: Exchange) -> None:
    target, tokenizer = service.engine.target, service.engine.tokenizer
    info = {
        "model_path": target.name,
        "tokenizer_path": target.name,
        "served_model_name": service.name,
        "model_type": target.config.model_type,
        "is_generation": True,
        "has_chat_template": tokenizer is not None and tokenizer.chat_template is not None,
        "max_model_len": service.engine.context_length,
    }
    await exchange.reply(dump(info).encode())


async def answer_loads(service: Service, exchange: Exchange) -> None:
    totals = service.engine.metrics.snapshot()
    slots = service.engine.runner.config.num_slots - 1
    body = {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": specjax.__version__,
        "loads": [loads(totals, slots)],
    }
    await exchange.reply(dump(body).encode())


def loads(totals: Totals, max_running: int) -> dict[str, Any]:
    """Load of an engine, as gateways compare it."""
    return {
        "dp_rank": 0,
        "num_running_reqs": totals.num_running,
        "num_waiting_reqs": totals.num_waiting,
        "num_used_tokens": totals.num_used_tokens,
        "max_total_num_tokens": totals.max_total_tokens,
        "max_running_requests": max_running,
        "token_usage": totals.token_usage,
        "gen_throughput": totals.gen_throughput,
        "cache_hit_rate": totals.cache_hit_rate,
    }

"""Routes that change the server, for administrators."""

import asyncio
import os

from specjax.checks import short
from specjax.server.answers import dump
from specjax.server.errors import ApiError
from specjax.server.exchange import Exchange
from specjax.server.fields import finish_fields
from specjax.server.service import Service


async def answer_flush_cache(service: Service, exchange: Exchange) -> None:
    """Forget all KV; running requests compute theirs again."""
    with service.refusals():
        await asyncio.to_thread(service.engine.flush_cache)
    await exchange.reply(dump({"success": True, "message": "the cache is empty"}).encode())


async def answer_update_weights(service: Service, exchange: Exchange) -> None:
    """Put the weights of a checkpoint on the server's disk in place of those that run."""
    body = await exchange.read_object(service.max_body_bytes)
    paths = {name: body.text(name) for name in ("model_path", "draft_path")}
    for name, path in paths.items():
        # a caller from elsewhere must not make the server ask the hub
        if path is not None and not os.path.exists(path):
            message = f"{name}={short(path)} does not exist on the server"
            raise ApiError(400, message, param=name)
    finish_fields(body, service.ignored_fields)
    if service.is_updating:
        raise ApiError(409, "weights are being replaced already; wait for that", code="updating")
    service.is_updating = True
    try:
        with service.refusals():
            update = service.engine.update_weights_from_disk
            await asyncio.to_thread(update, *paths.values())
    except OSError as error:
        raise ApiError(400, str(error)) from error
    finally:
        service.is_updating = False
    await exchange.reply(dump({"success": True, "message": "the weights are replaced"}).encode())

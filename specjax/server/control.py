"""Routes that change the server, for administrators."""

import asyncio

from specjax.server.answers import dump
from specjax.server.errors import ApiError
from specjax.server.exchange import Exchange
from specjax.server.fields import refuse_rest
from specjax.server.service import Service


async def answer_flush_cache(service: Service, exchange: Exchange) -> None:
    """Forget all KV; running requests compute theirs again."""
    await asyncio.to_thread(service.engine.flush_cache)
    await exchange.reply(dump({"success": True, "message": "the cache is empty"}).encode())


async def answer_update_weights(service: Service, exchange: Exchange) -> None:
    """Put the weights of a checkpoint on the server's disk in place of those that run."""
    body = await exchange.read_object(service.max_body_bytes)
    model_path, draft_path = body.text("model_path"), body.text("draft_path")
    refuse_rest(body)
    update = service.engine.update_weights_from_disk
    try:
        await asyncio.to_thread(update, model_path, draft_path)
    except (ValueError, OSError) as error:
        service.engine  # noqa: B018 - raises where it has failed
        raise ApiError(400, str(error), code="weights_refused") from error
    await exchange.reply(dump({"success": True, "message": "the weights are replaced"}).encode())

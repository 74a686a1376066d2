"""A route as an ASGI application: who may use it, and what becomes of its errors."""

import logging
from collections.abc import Awaitable, Callable, Collection

from specjax.server.errors import ApiError, api_error
from specjax.server.exchange import ClientGoneError, Exchange, Receive, Scope, Send
from specjax.server.service import Service

logger = logging.getLogger(__name__)

Handler = Callable[[Service, Exchange], Awaitable[None]]


class Endpoint:
    """Calls a handler for every request of a route.

    ``is_open`` needs no API key, ``is_admin`` is for those who may change the server, and
    ``needs_engine`` is false for what is answered before there is one.
    """

    def __init__(
        self,
        service: Service,
        handler: Handler,
        methods: Collection[str],
        *,
        is_open: bool = False,
        is_admin: bool = False,
        needs_engine: bool = True,
    ) -> None:
        self._service, self._handler, self._methods = service, handler, methods
        self._is_open, self._is_admin = is_open, is_admin
        self._needs_engine = needs_engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            if scope["method"] not in self._methods:
                raise unknown_route(exchange, 405)
            if not self._is_open:
                self._service.access.check(exchange)
            if self._is_admin:
                self._service.access.check_admin(exchange)
            if self._needs_engine:
                self._service.engine  # noqa: B018 - raises where there is none
            await self._handler(self._service, exchange)
        except ClientGoneError:
            return
        except Exception as error:
            known = api_error(error)
            if known is None:
                logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
                known = ApiError(500, "the server failed; its log says why")
            await exchange.fail(known)


async def no_route(scope: Scope, receive: Receive, send: Send) -> None:
    """What answers where there is no endpoint."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close"})
        return
    exchange = Exchange(scope, receive, send)
    await exchange.fail(unknown_route(exchange, 404))


def unknown_route(exchange: Exchange, status: int) -> ApiError:
    message = f"{exchange.scope['method']} {exchange.scope['path']} is no route of this server"
    return ApiError(status, message, code="unknown_route")

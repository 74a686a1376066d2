"""A route as an ASGI application: who may use it, and what becomes of its errors."""

import logging
from collections.abc import Awaitable, Callable

from specjax.server.errors import ApiError, api_error
from specjax.server.exchange import ClientGoneError, Exchange, Receive, Scope, Send
from specjax.server.service import Service

logger = logging.getLogger(__name__)

Handler = Callable[[Service, Exchange], Awaitable[None]]


class Endpoint:
    """Calls a handler for every request of a route.

    ``is_open`` needs no API key, ``is_admin`` is for those who may change the server.
    """

    def __init__(
        self, service: Service, handler: Handler, *, is_open: bool = False, is_admin: bool = False
    ) -> None:
        self._service, self._handler = service, handler
        self._is_open, self._is_admin = is_open, is_admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            if not self._is_open:
                self._service.check_key(exchange)
            if self._is_admin:
                self._service.check_admin(exchange)
            self._service.engine  # noqa: B018 - raises where there is none
            await self._handler(self._service, exchange)
        except ClientGoneError:
            return
        except Exception as error:
            known = api_error(error)
            if known is None or known.code == "engine_failed":
                logger.error("%s %s", scope["method"], scope["path"], exc_info=error)
            await exchange.fail(known or ApiError(500, "the server failed; its log says why"))

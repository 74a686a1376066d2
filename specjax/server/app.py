"""ASGI application: routes of one engine, access control and error responses."""

import logging
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from specjax.engine.engine import Engine
from specjax.engine.names import ROUTES
from specjax.scheduling.loop import EngineFault
from specjax.scheduling.scheduler import QueueFullError
from specjax.server import routes
from specjax.server.chat import read_chat
from specjax.server.completions import read_completion
from specjax.server.decisions import read_decision
from specjax.server.exchange import ClientGoneError, Exchange, Receive, Scope, Send, dump
from specjax.server.fields import ApiError
from specjax.server.generating import generate, read_body
from specjax.server.messages import count_tokens, error_json, read_message
from specjax.server.native import answer_abort, read_generate
from specjax.server.responses import read_response
from specjax.server.scrape import metrics
from specjax.server.service import MAX_BODY_BYTES, MAX_REQUESTS, Access, Service

logger = logging.getLogger(__name__)

# paths that clients add to a base URL that ends in /v1
_OPENAI = ("/chat/completions", "/completions", "/responses", "/messages", "/decisions", "/models")
# A handler returns a JSON value (or its bytes), or sends the response itself and returns None.
Handler = Callable[[Service, Exchange], Awaitable[Any]]


def make_app(
    engine: Engine | Future[Engine],
    *,
    served_model_name: str | None = None,
    api_key: str | None = None,
    admin_api_key: str | None = None,
    max_requests: int = MAX_REQUESTS,
    max_body_bytes: int = MAX_BODY_BYTES,
    default_max_tokens: int | None = None,
    cors_allow_origins: Sequence[str] = (),
) -> Router:
    """Make an ASGI application that serves an engine; the caller closes the engine.

    Args:
        engine: the engine, or a future that resolves to it. Until it resolves, requests get 503.
        served_model_name: model name for clients. Default: the name of the engine's target.
        api_key: key that clients must send, except for ``/``, ``/health`` and ``/metrics``. Without
            a key all callers are accepted, and those on this host are administrators.
        admin_api_key: key that replaces ``api_key`` for flushing the cache and weight updates.
        max_requests: maximum completions that run or wait; further requests get 429.
        max_body_bytes: maximum size of a request body; longer bodies get 413.
        default_max_tokens: maximum completion tokens of requests that set none. Default: 16 in
            ``/v1/completions``, 128 in ``/generate``, and in chats the rest of the context.
        cors_allow_origins: origins whose pages may call from a browser; ``"*"`` allows all.

    Raises:
        ValueError: if a limit is below 1, or a key has whitespace or is empty.
    """
    service = Service(
        engine,
        name=served_model_name,
        access=Access(api_key=api_key, admin_api_key=admin_api_key, origins=cors_allow_origins),
        max_requests=max_requests,
        max_body_bytes=max_body_bytes,
        default_max_tokens=default_max_tokens,
    )
    return route(service)


def route(service: Service) -> Router:
    """Make a bare router with all routes; a full Starlette application slows down streams."""

    table: list[Route] = []

    def to(paths: str, handler: Handler, *methods: str, **options: Any) -> None:
        for path in paths.split():
            table.append(Route(path, Endpoint(service, path, handler, methods, **options)))

    get, post = ("GET", "HEAD"), "POST"
    to("/", routes.page, *get, is_public=True, needs_engine=False)
    to("/v1/completions", partial(generate, read=read_completion), post)
    to("/v1/chat/completions", partial(generate, read=read_chat, renders=True), post)
    respond = partial(generate, read=read_response, renders=True, grammars=("text",))
    to("/v1/responses", respond, post)
    respond = partial(generate, read=read_message, renders=True, grammars=("thinking",))
    to("/v1/messages", respond, post, error=error_json)
    count = partial(read_body, read=count_tokens, renders=True)
    to("/v1/messages/count_tokens", count, post, error=error_json)
    to("/v1/decisions", partial(generate, read=read_decision, renders=True), post)
    to("/generate", partial(generate, read=read_generate), post)
    to("/v1/models", routes.models, *get)
    to("/v1/models/{name:path}", routes.model, *get)
    to("/health", routes.health, *get, is_public=True)
    to("/health_generate", routes.health_generate, *get)
    to("/ping", routes.health, *get, post, is_public=True)
    to("/version", routes.version, *get, needs_engine=False)
    to("/metrics", metrics, *get, is_public=True, needs_engine=False)
    to("/v1/loads", routes.loads, *get)
    to("/kv_event_sources", routes.kv_event_sources, *get)
    to("/get_server_info /server_info", routes.server_info, *get)
    to("/get_model_info /model_info", routes.model_info, *get)
    to("/tokenizer_info", routes.tokenizer_info, *get)
    to("/tokenize", partial(read_body, read=routes.tokenize, renders=True), post)
    read = partial(read_body, read=routes.detokenize, renders=True, max_bytes=routes.MAX_IDS_BYTES)
    to("/detokenize", read, post)
    to("/abort_request", answer_abort, post)
    to("/flush_cache", routes.flush_cache, *get, post, is_admin=True)
    to("/update_weights_from_disk", routes.update_weights, post, is_admin=True)
    origins = list(service.access.origins)
    cors = Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
    )
    return Router(
        table,
        redirect_slashes=False,
        default=partial(no_route, service),
        middleware=[cors] if origins else None,
    )


@dataclass(frozen=True, eq=False)
class Endpoint:
    """ASGI application that calls a handler for every request to a route."""

    service: Service
    path: str  # of the route
    handler: Handler
    methods: Collection[str]
    is_public: bool = False  # needs no API key
    is_admin: bool = False  # needs the admin key
    needs_engine: bool = True  # if False, the route also works before the engine is ready
    error: Callable[[ApiError], bytes] = ApiError.json  # the body of an error response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        # at level INFO, probes and scrapes would fill the access log
        with exchange.logged(logging.DEBUG if self.is_public else logging.INFO):
            try:
                if scope["method"] not in self.methods:
                    raise _unknown_route(exchange, 405)
                if not self.is_public:
                    self.service.access.check(exchange)
                if self.is_admin:
                    self.service.access.check_admin(exchange)
                if self.needs_engine:
                    self.service.engine  # noqa: B018 - raises if there is none
                value = await self.handler(self.service, exchange)
                if value is not None:
                    is_json = isinstance(value, bytes)
                    await exchange.reply(value if is_json else dump(value).encode())
            except ClientGoneError:
                exchange.status = ClientGoneError.status
            except CancelledError:
                exchange.status = ClientGoneError.status
                raise
            except Exception as error:
                await exchange.fail(_api_error(scope, error), self.error)
            finally:
                method = scope["method"] if scope["method"] in self.methods else "other"
                self.service.responses[self.path, method, exchange.status] += 1


def _api_error(scope: Scope, error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full")
        case EngineFault():
            message = "the engine has failed; see the server log"
            return ApiError(503, message, code="engine_failed")
        case RecursionError():  # also raised while an error message quotes a nested value
            return ApiError(400, "the request is nested too deeply")
    logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    return ApiError(500, "internal error; see the server log")


async def no_route(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close"})
        return
    exchange = Exchange(scope, receive, send)
    with exchange.logged(logging.INFO):
        await exchange.fail(_unknown_route(exchange, 404))
    service.responses["unknown", "other", exchange.status] += 1


def _unknown_route(exchange: Exchange, status: int) -> ApiError:
    reason = "Not found" if status == 404 else "Method not allowed"
    path = exchange.scope["path"]
    message = f"{reason}: {exchange.scope['method']} {path}"
    if status == 404 and (instead := _replacement(path)):
        message += f"; {instead}"
    return ApiError(status, message, code="unknown_route")


def _replacement(path: str) -> str:
    """Return what to use instead of an unknown path, or ""."""
    path = path.rstrip("/")
    if path.startswith("/v1/v1") and path.removeprefix("/v1/v1") in _OPENAI:
        return "the base URL has /v1 twice"
    if path in _OPENAI:
        return f"use /v1{path}: the base URL must end in /v1"
    if path.startswith("/v1/responses/"):
        return "responses are not stored; send the whole input to /v1/responses"
    return ROUTES.get(path, "")

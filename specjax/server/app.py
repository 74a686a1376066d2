"""The application: all routes over one engine."""

from collections.abc import Sequence
from concurrent.futures import Future

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specjax.engine import Engine
from specjax.server.chat import answer_chat
from specjax.server.completions import answer_completion
from specjax.server.control import answer_flush_cache, answer_update_weights
from specjax.server.endpoint import Endpoint, Handler
from specjax.server.errors import ApiError
from specjax.server.information import (
    answer_health,
    answer_health_generate,
    answer_loads,
    answer_model,
    answer_model_info,
    answer_models,
    answer_server_info,
)
from specjax.server.metrics import answer_metrics
from specjax.server.native import answer_abort, answer_generate
from specjax.server.service import Service
from specjax.server.tokenizing import answer_detokenize, answer_tokenize

MAX_REQUESTS = 4096
MAX_BODY_BYTES = 32 * 2**20


def make_app(
    engine: Engine | Future[Engine],
    *,
    served_model_name: str | None = None,
    api_key: str | None = None,
    max_requests: int = MAX_REQUESTS,
    max_body_bytes: int = MAX_BODY_BYTES,
    cors_allow_origins: Sequence[str] = (),
) -> Starlette:
    """An ASGI application that serves an engine; whoever made the engine closes it.

    Args:
        engine: the engine, or a future of one that is being made: until then everything is
            answered with 503.
        served_model_name: what clients call the model; by default as the engine was told.
        api_key: clients have to show it, except for ``/health`` and ``/metrics``. Without one
            everybody who reaches the application may use it, and callers on the same host may
            flush the cache and replace weights.
        max_requests: completions in hand at once, those that wait included; more are answered
            with 429.
        max_body_bytes: longer bodies are answered with 413.
        cors_allow_origins: pages of these origins (``"*"``: of all) may call from a browser.

    Returns:
        The application; its ``state.service`` is the
        :class:`~specjax.server.service.Service` behind it.
    """
    service = Service(
        engine,
        name=served_model_name,
        api_key=api_key,
        max_requests=max_requests,
        max_body_bytes=max_body_bytes,
    )

    def route(path: str, handler: Handler, *methods: str, **access: bool) -> Route:
        return Route(path, Endpoint(service, handler, **access), methods=methods or ["GET"])

    routes = [
        route("/v1/completions", answer_completion, "POST"),
        route("/v1/chat/completions", answer_chat, "POST"),
        route("/generate", answer_generate, "POST"),
        route("/v1/models", answer_models),
        route("/v1/models/{name:path}", answer_model),
        route("/health", answer_health, is_open=True),
        route("/health_generate", answer_health_generate),
        route("/metrics", answer_metrics, is_open=True),
        route("/v1/loads", answer_loads),
        route("/get_server_info", answer_server_info),
        route("/server_info", answer_server_info),
        route("/get_model_info", answer_model_info),
        route("/model_info", answer_model_info),
        route("/tokenize", answer_tokenize, "POST"),
        route("/detokenize", answer_detokenize, "POST"),
        route("/abort_request", answer_abort, "POST"),
        route("/flush_cache", answer_flush_cache, "GET", "POST", is_admin=True),
        route("/update_weights_from_disk", answer_update_weights, "POST", is_admin=True),
    ]
    middleware = []
    if cors_allow_origins:
        middleware = [
            Middleware(
                CORSMiddleware,
                allow_origins=list(cors_allow_origins),
                allow_methods=["*"],
                allow_headers=["*"],
            )
        ]
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: _no_route}
    )
    app.state.service = service
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405 in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is no route of this server"
    known = ApiError(error.status_code, message, code="unknown_route")
    return Response(known.json(), known.status, error.headers, media_type="application/json")

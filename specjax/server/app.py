"""The application: all routes over one engine."""

from collections.abc import Sequence
from concurrent.futures import Future

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from specjax.engine import Engine
from specjax.server.access import Access
from specjax.server.chat import answer_chat
from specjax.server.completions import answer_completion
from specjax.server.control import answer_flush_cache, answer_update_weights
from specjax.server.endpoint import Endpoint, Handler, no_route
from specjax.server.information import (
    answer_health,
    answer_health_generate,
    answer_loads,
    answer_model,
    answer_model_info,
    answer_models,
    answer_server_info,
    answer_tokenizer_info,
    answer_version,
)
from specjax.server.metrics import answer_metrics
from specjax.server.native import answer_abort, answer_generate
from specjax.server.page import answer_page
from specjax.server.service import MAX_BODY_BYTES, MAX_REQUESTS, Service
from specjax.server.tokenizing import answer_detokenize, answer_tokenize


def make_app(
    engine: Engine | Future[Engine],
    *,
    served_model_name: str | None = None,
    api_key: str | None = None,
    admin_api_key: str | None = None,
    max_requests: int = MAX_REQUESTS,
    max_body_bytes: int = MAX_BODY_BYTES,
    cors_allow_origins: Sequence[str] = (),
) -> Router:
    """An ASGI application that serves an engine; whoever made the engine closes it.

    Args:
        engine: the engine, or a future of one that is being made: until then everything is
            answered with 503.
        served_model_name: what clients call the model; by default as the engine was told.
        api_key: clients have to show it, except for ``/``, ``/health`` and ``/metrics``. Without
            one everybody who reaches the application may use it, and callers on the same host
            may flush the cache and replace weights.
        admin_api_key: has to be shown for that instead.
        max_requests: completions in hand at once, those that wait included; more are answered
            with 429.
        max_body_bytes: longer bodies are answered with 413.
        cors_allow_origins: pages of these origins (``"*"``: of all) may call from a browser.

    Raises:
        ValueError: for limits below 1 and keys that nobody could show.
    """
    service = Service(
        engine,
        name=served_model_name,
        access=Access(api_key=api_key, admin_api_key=admin_api_key, origins=cors_allow_origins),
        max_requests=max_requests,
        max_body_bytes=max_body_bytes,
    )
    return route(service)


def route(service: Service) -> Router:
    """All routes over a service.

    A bare router: in a Starlette application each chunk of a stream passes two more layers.
    """

    def to(path: str, handler: Handler, *methods: str, **access: bool) -> Route:
        return Route(path, Endpoint(service, handler, methods, **access))

    get, post = ("GET", "HEAD"), "POST"
    routes = [
        to("/", answer_page, *get, is_open=True, needs_engine=False),
        to("/v1/completions", answer_completion, post),
        to("/v1/chat/completions", answer_chat, post),
        to("/generate", answer_generate, post),
        to("/v1/models", answer_models, *get),
        to("/v1/models/{name:path}", answer_model, *get),
        to("/health", answer_health, *get, is_open=True),
        to("/health_generate", answer_health_generate, *get),
        to("/ping", answer_health, *get, post, is_open=True),
        to("/version", answer_version, *get, needs_engine=False),
        to("/metrics", answer_metrics, *get, is_open=True),
        to("/v1/loads", answer_loads, *get),
        to("/get_server_info", answer_server_info, *get),
        to("/server_info", answer_server_info, *get),
        to("/get_model_info", answer_model_info, *get),
        to("/model_info", answer_model_info, *get),
        to("/tokenizer_info", answer_tokenizer_info, *get),
        to("/tokenize", answer_tokenize, post),
        to("/detokenize", answer_detokenize, post),
        to("/abort_request", answer_abort, post),
        to("/flush_cache", answer_flush_cache, *get, post, is_admin=True),
        to("/update_weights_from_disk", answer_update_weights, post, is_admin=True),
    ]
    origins = list(service.access.origins)
    cors = Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
    )
    return Router(
        routes, redirect_slashes=False, default=no_route, middleware=[cors] if origins else None
    )

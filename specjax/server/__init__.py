"""The HTTP server: OpenAI's and SGLang's routes over an engine, as an ASGI application."""

try:
    import starlette  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the server needs starlette and uvicorn: in a clone, run: pip install -e '.[serve]'"
    ) from error

from specjax.server.app import make_app as make_app

__all__ = ["make_app"]

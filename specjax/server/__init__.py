"""The HTTP server: OpenAI's and SGLang's routes over an engine, as an ASGI application."""

try:
    import starlette  # noqa: F401
except ImportError as error:
    raise ImportError("serving needs starlette and uvicorn: pip install -e '.[serve]'") from error

from specjax.server.app import make_app as make_app

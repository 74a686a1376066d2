"""``specjax serve``: an HTTP server with OpenAI's and SGLang's routes."""

import argparse
import os
from collections.abc import Callable
from typing import Any

from specjax.checks import check_integer, check_number
from specjax.cli.options import SERVING, add_engine_options

API_KEY = "SPECJAX_API_KEY"


def add_serve_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, with OpenAI's and SGLang's routes. A line with the "
        "address goes to standard output when it is ready.",
        argument_default=argparse.SUPPRESS,
    )
    group = parser.add_argument_group("server")
    for flag, kind, default, text in (
        ("--host", str, "127.0.0.1", "address to listen at; 0.0.0.0 for all of this host"),
        ("--port", int, 30000, "port to listen at; 0 chooses one"),
        ("--served-model-name", str, None, "what clients call the model; by default as --model"),
        ("--api-key", str, None, f"what clients have to show; or in the environment: {API_KEY}"),
        ("--max-requests", int, None, "completions in hand at once, waiting ones included"),
        ("--max-body-bytes", int, None, "longer request bodies are refused"),
        ("--shutdown-timeout", float, 30.0, "seconds that requests have to end after a signal"),
    ):
        shown = "" if default is None else f" ({default})"
        metavar = {int: "N", float: "X", str: "TEXT"}[kind]
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text + shown)
    group.add_argument(
        "--cors-allow-origin",
        action="append",
        metavar="ORIGIN",
        default=[],
        help="pages of this origin may call from a browser; * for all; may be repeated",
    )
    group.add_argument("--quiet", action="store_true", default=False, help="no progress")
    add_engine_options(parser, SERVING)


def run_serve(
    args: argparse.Namespace, engine_args: dict[str, Any], make_engine: Callable[..., Any]
) -> int:
    """Run the command until a signal ends it."""
    from specjax.server.process import serve  # what it needs is an extra

    check_integer("--port", args.port, 0, 65535)
    check_number("--shutdown-timeout", args.shutdown_timeout, at_least=0)
    limits = {name: getattr(args, name) for name in ("max_requests", "max_body_bytes")}
    serve(
        lambda: make_engine(**engine_args),
        host=args.host,
        port=args.port,
        shutdown_timeout=args.shutdown_timeout,
        name=args.served_model_name,
        # on a command line other users see it
        api_key=os.environ.get(API_KEY) if args.api_key is None else args.api_key,
        cors_allow_origins=args.cors_allow_origin,
        **{name: value for name, value in limits.items() if value is not None},
    )
    return 0

"""The ``specjax`` command: argument parser and error handling."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from importlib.metadata import version
from typing import Any

from specjax import logs
from specjax.cli import audit, commands, generate
from specjax.cli.options import engine_arguments
from specjax.cli.parser import Parser, typed_name
from specjax.engine.args import check_options
from specjax.engine.names import COMMANDS

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="specjax",
        description="Lossless speculative decoding of language models in JAX.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"specjax {version('specjax')}")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    generate.add_generate_parser(parsers)
    commands.add_serve_parser(parsers)
    commands.add_warmup_parser(parsers)
    commands.add_bench_parser(parsers)
    commands.add_inspect_parser(parsers)
    audit.add_audit_parser(parsers)
    commands.add_env_parser(parsers)
    return parser


def report_error(program: str, error: Exception, option: str | None = None) -> int:
    """Print an error as one line on standard error; return the exit status.

    ``option`` is what the user typed, if the error calls it by another name.
    """
    message = " ".join(str(error).split()) or type(error).__name__
    if option:
        message = f"{option}: {message}"
    print(f"{program}: error: {message}", file=sys.stderr)
    return EXIT_BAD_INPUT


def engine(**engine_args: Any) -> Any:
    """Make an engine. Only then JAX is imported, which takes seconds."""
    from specjax.engine.engine import Engine

    return Engine(**engine_args)


def main(argv: Sequence[str] | None = None, *, make_engine: Callable[..., Any] = engine) -> int:
    """Run the command in ``argv`` (``None``: ``sys.argv``) with engines from ``make_engine``.

    Returns:
        0 for success; 1 if texts with and without speculation differ and must not (in float32, or
        deterministic), a warm-up could not write the cache, requests of a benchmark failed, an
        inspected draft does not fit, or answers in an audit differ; 2 for bad input, or if an audit
        could not test plain decoding; 130 after an interrupt; 141 if the reader of standard output
        closed it.
    """
    if sys.stderr is None:  # print would use standard output instead
        with open(os.devnull, "w") as sink, redirect_stderr(sink):
            return main(argv, make_engine=make_engine)
    parser = build_parser()
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in COMMANDS:
        parser.error(f"{words[0]} is not a command here; use {COMMANDS[words[0]]}")
    args = parser.parse_args(words)
    level = getattr(args, "log_level", "warning" if args.quiet else "info")
    shows_progress = not args.quiet and level in ("debug", "info")
    kind, has_access = getattr(args, "log_format", "plain"), getattr(args, "access_log", False)
    for stream in (sys.stdout, sys.stderr):
        # print "?" for a character that the terminal cannot show, instead of failing
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        if sys.stdout is None:
            raise ValueError("standard output is closed; redirect it to a file or to /dev/null")
        engine_args = engine_arguments(args) | {"show_progress": shows_progress}
        check_options(engine_args)
        with logs.configured(level, kind, has_access=has_access):
            status: int = args.run(args, engine_args, make_engine)
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nspecjax: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        logs.discard_output()
        return EXIT_BROKEN_PIPE
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        return report_error("specjax", error, typed_name(args, error))

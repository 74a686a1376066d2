"""The ``specjax`` command: generate text from a prompt and show what speculation did."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from specjax.cli.errors import report_error
from specjax.cli.generate import run_generate
from specjax.cli.options import (
    add_memory_options,
    add_model_options,
    add_speculation_options,
    engine_arguments,
)
from specjax.cli.warmup import add_warmup_parser, run_warmup

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the ``specjax`` command."""
    parser = argparse.ArgumentParser(
        prog="specjax", description="Lossless speculative decoding of language models in JAX."
    )
    parser.add_argument("--version", action="version", version=f"specjax {version('specjax')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="generate text from one prompt",
        description="Generate text from one prompt. The text goes to standard output; progress and "
        "the closing line of figures go to standard error.",
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    generate.add_argument("prompt", metavar="PROMPT", help="the prompt, or - to read it from stdin")
    model = generate.add_argument_group("model")
    add_model_options(model)
    _add_prompt_options(model)
    add_speculation_options(generate.add_argument_group("speculation"))
    _add_sampling_options(generate.add_argument_group("sampling"))
    add_memory_options(generate.add_argument_group("memory and start-up"))
    _add_output_options(generate.add_argument_group("output"))
    add_warmup_parser(commands)
    return parser


def main(
    argv: Sequence[str] | None = None, *, make_engine: Callable[..., Any] | None = None
) -> int:
    """Runs the command and returns its exit status.

    Args:
        argv: the arguments after the program name; None reads ``sys.argv``.
        make_engine: called with `Engine`'s keyword arguments; None means `Engine` itself.

    Returns:
        0; 1 where float32 texts with and without speculation differ, or a warm-up could not write;
        2 for bad input; 130 after an interrupt; 141 when the reader of standard output went away.
    """
    args = build_parser().parse_args(argv)
    engine_args = engine_arguments(args) | {"show_progress": not args.quiet}
    for stream in (sys.stdout, sys.stderr):
        # a terminal that cannot show a character gets "?" instead of a traceback
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        with _logging_to_stderr(logging.WARNING if args.quiet else logging.INFO):
            if args.command == "warmup":
                status = run_warmup(args, engine_args)
            else:
                if make_engine is None:
                    from specjax.engine import Engine

                    make_engine = Engine
                engine_args |= {"max_running_requests": 1}
                status = run_generate(args, engine_args, make_engine)
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nspecjax: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the interpreter flushes stdout once more at exit: give it somewhere to write
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        return report_error("specjax", error)


class _StderrHandler(logging.Handler):
    """Writes the library's log lines above a progress bar that may be on screen."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)


class _logging_to_stderr:
    """Shows the library's log at ``level`` and above on standard error inside a with block."""

    def __init__(self, level: int) -> None:
        self._logger = logging.getLogger("specjax")
        self._level = level
        self._handler = _StderrHandler()

    def __enter__(self) -> None:
        self._old_level = self._logger.level
        self._logger.setLevel(self._level)
        self._logger.addHandler(self._handler)

    def __exit__(self, *exc: object) -> None:
        self._logger.removeHandler(self._handler)
        self._logger.setLevel(self._old_level)


def _add_prompt_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--raw", action="store_true", default=False, help="no chat template")
    group.add_argument("--system", default=None, help="system message of the chat template")


def _add_sampling_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="default: 0, which is greedy"
    )
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--min-p", type=float, metavar="X")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument(
        "--min-new-tokens", type=int, metavar="N", help="no end token before so many tokens"
    )
    group.add_argument("--sampling-seed", type=int, metavar="N", help="makes sampling repeatable")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop string; may be given several times"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", default=False, help="go on after the end token"
    )


def _add_output_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--compare",
        action="store_true",
        default=False,
        help="also decode plainly: speed-up, and whether the texts are equal",
    )
    group.add_argument(
        "--show-accepts", action="store_true", default=False, help="colour the accepted drafts"
    )
    group.add_argument(
        "--json", action="store_true", default=False, help="print one JSON object and nothing else"
    )
    group.add_argument(
        "--quiet", action="store_true", default=False, help="no progress and no figures"
    )

"""The ``specjax`` command: generate text from a prompt and show what speculation did."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from specjax.cli_generate import run_generate

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

ENGINE_ARGUMENTS = (
    "model",
    "draft",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "draft_rope_theta",
    "dtype",
    "context_length",
    "page_size",
    "max_total_tokens",
    "chunked_prefill_size",
    "rounds_per_dispatch",
    "mem_fraction_static",
    "seed",
    "compile_cache_dir",
)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the ``specjax`` command.

    Engine options that were not given stay out of the namespace, so that `Engine` keeps the only
    copy of their defaults.
    """
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
    _add_model_options(generate.add_argument_group("model"))
    _add_speculation_options(generate.add_argument_group("speculation"))
    _add_sampling_options(generate.add_argument_group("sampling"))
    _add_memory_options(generate.add_argument_group("memory and start-up"))
    _add_output_options(generate.add_argument_group("output"))
    return parser


def main(
    argv: Sequence[str] | None = None, *, make_engine: Callable[..., Any] | None = None
) -> int:
    """Runs the command and returns its exit status.

    Args:
        argv: the arguments after the program name; None reads ``sys.argv``.
        make_engine: called with `Engine`'s keyword arguments; None means `Engine` itself.

    Returns:
        0; 1 where float32 texts with and without speculation differ; 2 for bad input; 130 after an
        interrupt; 141 when the reader of standard output went away.
    """
    args = build_parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # a terminal that cannot show a character gets "?" instead of a traceback
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        with _logging_to_stderr(logging.WARNING if args.quiet else logging.INFO):
            if make_engine is None:
                from specjax.engine import Engine

                make_engine = Engine
            status = run_generate(args, _engine_arguments(args), make_engine)
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
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"specjax: error: {message}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of `Engine` that the command line sets."""
    given = {name: getattr(args, name) for name in ENGINE_ARGUMENTS if hasattr(args, name)}
    for name in ("speculative_algorithm", "compile_cache_dir"):
        if given.get(name) == "none":
            given[name] = None
    return given | {"max_running_requests": 1, "show_progress": not args.quiet}


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


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", help="embedded name, checkpoint directory or repo id (default: smollm2-135m)"
    )
    group.add_argument(
        "--draft", help="draft head: directory or repo id (default: the model's own)"
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="auto (default): float32 on a CPU, the checkpoint's own on a GPU",
    )
    group.add_argument("--raw", action="store_true", default=False, help="no chat template")
    group.add_argument("--system", default=None, help="system message of the chat template")


def _add_speculation_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--speculative-algorithm",
        choices=("EAGLE3", "EAGLE", "none"),
        default="EAGLE3",
        help="none decodes plainly (default: EAGLE3)",
    )
    group.add_argument(
        "--speculative-num-steps", type=int, metavar="N", help="tokens drafted per round"
    )
    group.add_argument("--speculative-eagle-topk", type=int, metavar="N")
    group.add_argument("--speculative-num-draft-tokens", type=int, metavar="N")
    group.add_argument(
        "--draft-rope-theta", type=float, metavar="X", help="override the head's rotary base"
    )


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


def _add_memory_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--context-length", type=int, metavar="N")
    group.add_argument("--page-size", type=int, metavar="N", help="tokens per KV page")
    group.add_argument("--max-total-tokens", type=int, metavar="N", help="size of the KV pool")
    group.add_argument("--chunked-prefill-size", type=int, metavar="N", help="prompt tokens a pass")
    group.add_argument(
        "--rounds-per-dispatch", type=int, metavar="N", help="rounds in one call on the device"
    )
    group.add_argument("--mem-fraction-static", type=float, metavar="X")
    group.add_argument("--seed", type=int, metavar="N", help="seed of unseeded sampled requests")
    group.add_argument(
        "--compile-cache-dir",
        metavar="DIR",
        help="where compiled functions are kept; none: nowhere",
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

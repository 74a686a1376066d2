"""``specjax warmup``: compile ahead of the first start, print a table."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from specjax.cli.options import (
    SERVING,
    add_engine_options,
    add_start_options,
    option_of_line,
    with_preset,
)
from specjax.compiling.cache import open_compile_cache
from specjax.engine.args import EngineArgs
from specjax.engine.build import warm_up

SECONDS_A_DAY = 86400.0


def add_warmup_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "warmup",
        help="compile ahead of the first start",
        description="Compile what an engine with these options dispatches, without loading its "
        "weights, into the cache that a start reads. What is present is left as it is.",
        argument_default=argparse.SUPPRESS,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    parser.convert_arg_line_to_args = option_of_line  # type: ignore[method-assign]
    add_engine_options(parser, SERVING)
    group = parser.add_argument_group("warm-up")
    add_start_options(group, ())
    for flag, text in (
        ("--stages", "also draft, verify and extend as functions of their own"),
        ("--quiet", "no progress, no table"),
    ):
        group.add_argument(flag, action="store_true", default=False, help=text)
    for flag, kind, metavar, text in (
        ("--prune", float, "DAYS", "delete entries that nothing has read for so many days"),
        ("--json", Path, "FILE", "write the figures to a file"),
    ):
        group.add_argument(flag, type=kind, metavar=metavar, default=None, help=text)


def run_warmup(args: argparse.Namespace, engine_args: dict[str, Any]) -> int:
    """Run the command; returns 1 where some function could not be written, else 0."""
    with tempfile.TemporaryDirectory() as folder:
        parsed = EngineArgs(**with_preset(engine_args, args.preset, Path(folder)))
        result = warm_up(parsed, stages=args.stages)
    if args.prune is not None and (cache := open_compile_cache(parsed.compile_cache_dir)):
        count = cache.prune(args.prune * SECONDS_A_DAY)
        print(f"{count} old entries deleted", file=sys.stderr)
    if args.json is not None:
        args.json.write_text(json.dumps(result.as_dict(), indent=1) + "\n")
    if not args.quiet:
        print(result.table())
    return 0 if result.is_complete else 1

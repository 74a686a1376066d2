"""``specjax warmup``: compile ahead of the first start, print a table."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from specjax.cli.options import (
    add_memory_options,
    add_model_options,
    add_speculation_options,
    add_start_options,
    with_preset,
)
from specjax.engine.args import EngineArgs

SECONDS_A_DAY = 86400.0


def add_warmup_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``specjax``."""
    parser = commands.add_parser(
        "warmup",
        help="compile ahead of the first start",
        description="Compile what an engine with these options dispatches, without loading its "
        "weights, into the cache that a start reads. What is present is left as it is.",
        argument_default=argparse.SUPPRESS,
    )
    add_model_options(parser.add_argument_group("model"))
    add_speculation_options(parser.add_argument_group("speculation"))
    add_memory_options(parser.add_argument_group("memory and start-up"))
    _add_warmup_options(parser.add_argument_group("warm-up"))


def _add_warmup_options(group: argparse._ArgumentGroup) -> None:
    add_start_options(group)
    group.add_argument(
        "--simulate-accept-length", type=float, metavar="X", help="as a benchmark with it needs"
    )
    group.add_argument(
        "--stages",
        action="store_true",
        default=False,
        help="also draft, verify and extend as functions of their own",
    )
    group.add_argument(
        "--prune",
        type=float,
        metavar="DAYS",
        default=None,
        help="delete entries that nothing has read for so many days",
    )
    group.add_argument(
        "--json", type=Path, metavar="FILE", default=None, help="write the figures to a file"
    )
    group.add_argument("--quiet", action="store_true", default=False, help="no progress, no table")


def run_warmup(args: argparse.Namespace, engine_args: dict[str, Any]) -> int:
    """Runs the command and returns its exit status.

    Args:
        args: the parsed command line.
        engine_args: keyword arguments of the engine.

    Returns:
        0; 1 where some function could not be written.

    Raises:
        ValueError: for whatever the engine refuses.
    """
    from specjax.engine.build import open_cache
    from specjax.engine.warmup import warm_up

    if hasattr(args, "simulate_accept_length"):
        engine_args = engine_args | {"simulate_accept_length": args.simulate_accept_length}
    with tempfile.TemporaryDirectory() as folder:
        parsed = EngineArgs(**with_preset(engine_args, args.preset, Path(folder)))
        result = warm_up(parsed, stages=args.stages)
    if args.prune is not None and (cache := open_cache(parsed)) is not None:
        count = cache.prune(args.prune * SECONDS_A_DAY, time.time())
        print(f"{count} old entries deleted", file=sys.stderr)
    if args.json is not None:
        args.json.write_text(json.dumps(result.as_dict(), indent=1) + "\n")
    if not args.quiet:
        print(result.table())
    return 0 if result.is_complete else 1

"""Measures a draft head on prompts: acceptance by category, identity with plain decoding, speed.

The prompts are JSON lines in Spec-Bench form: ``question_id``, ``category`` and ``turns``, a list
of user messages. Each turn goes through the chat template, behind the turns before it.

    python scripts/eval_acceptance.py --prompts scripts/data/prompts.jsonl --output results.json

The exit status is 1 where float32 output differs from plain decoding, and 2 for bad input.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specjax.acceptance import (
    Answer,
    Stopwatch,
    by_category,
    evaluate,
    load_prompts,
    summarize,
)
from specjax.cli.errors import report_error

TABLE_COLUMNS = ("requests", "length", "pooled", "rate", "identical")


def describe_software() -> dict[str, Any]:
    """Returns versions and the kind of hardware, without names of machines."""
    import jax

    devices = jax.devices()
    return {
        "specjax": version("specjax"),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "python": platform.python_version(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }


def show_table(console: Any, overall: dict[str, Any], categories: dict[str, Any]) -> None:
    """Prints accept length and rate of each category and of all requests."""
    from rich.table import Table

    table = Table("category", title="accept length and rate")
    for name in TABLE_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in [*categories.items(), ("all", overall)]:
        if name == "all":
            table.add_section()
        table.add_row(
            name,
            str(row["requests"]),
            f"{row['accept_length']:.2f}",
            f"{row['accept_length_pooled']:.2f}",
            f"{row['accept_rate']:.3f}",
            f"{row['identical']}/{row['compared']}" if row["compared"] else "-",
        )
    console.print(table)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, Spec-Bench form")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--speculative-algorithm", default="EAGLE3", choices=("EAGLE3", "EAGLE"))
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--limit", type=int, default=None, help="use the first N prompts")
    parser.add_argument("--rounds-per-dispatch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--sampling-seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--context-length", type=int, default=None)
    parser.add_argument("--draft-rope-theta", type=float, default=None)
    parser.add_argument("--compile-cache-dir", default="auto", help="none: no cache")
    parser.add_argument("--output", type=Path, default=None, help="write the results as JSON")
    parser.add_argument(
        "--no-identity", action="store_true", help="do not decode plainly as well: faster"
    )
    args = parser.parse_args(argv)
    for name in ("batch_size", "num_steps", "max_new_tokens", "limit", "rounds_per_dispatch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the evaluation and returns the exit status."""
    args = parse_arguments(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        return report_error("eval_acceptance", error)


def run(args: argparse.Namespace) -> int:
    """Evaluates with real engines, shows the table and writes the JSON file."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from specjax import Engine

    prompts = load_prompts(args.prompts, args.limit)
    shared = {
        "model": args.model,
        "dtype": args.dtype,
        "context_length": args.context_length,
        "max_running_requests": args.batch_size,
        "rounds_per_dispatch": args.rounds_per_dispatch,
        "compile_cache_dir": None if args.compile_cache_dir == "none" else args.compile_cache_dir,
        "show_progress": True,
    }
    sampling = {
        "temperature": args.temperature,
        "max_new_tokens": args.max_new_tokens,
        "sampling_seed": args.sampling_seed,
    }
    answers: list[Answer] = []
    with ExitStack() as stack:
        engine = stack.enter_context(
            Engine(
                **shared,
                draft=args.draft,
                speculative_algorithm=args.speculative_algorithm,
                speculative_num_steps=args.num_steps,
                draft_rope_theta=args.draft_rope_theta,
            )
        )
        watches = {"speculative": Stopwatch(engine)}
        if not args.no_identity:
            plain_engine = Engine(**shared, speculative_algorithm=None, share_weights_with=engine)
            watches["plain"] = Stopwatch(stack.enter_context(plain_engine))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        task = progress.add_task("requests", total=sum(len(prompt.turns) for prompt in prompts))
        for batch in evaluate(
            watches["speculative"], watches.get("plain"), prompts, sampling, args.batch_size
        ):
            answers += batch
            length = summarize(answers)["accept_length"]
            progress.update(task, advance=len(batch), description=f"accept length {length:.2f}")
        dtype = engine.target.config.dtype
    overall, categories = summarize(answers), by_category(answers)
    speeds = {name: watch.tokens_per_second for name, watch in watches.items()}
    console = Console()
    show_table(console, overall, categories)
    console.print("  ".join(f"{name}: {speed:.1f} tok/s" for name, speed in speeds.items()))
    for answer in answers:
        if answer.difference is not None:
            console.print(
                f"{answer.question_id}, turn {answer.turn}: {answer.difference.describe()}",
                markup=False,
            )
    if args.output is not None:
        results = {
            "software": describe_software(),
            "settings": {
                "model": Path(args.model).name if Path(args.model).exists() else args.model,
                "draft": args.draft and Path(args.draft).name,
                "dtype": dtype,
                **{
                    name: getattr(args, name)
                    for name in (
                        "speculative_algorithm",
                        "num_steps",
                        "max_new_tokens",
                        "batch_size",
                        "rounds_per_dispatch",
                        "temperature",
                        "sampling_seed",
                    )
                },
                "prompts": {
                    "file": args.prompts.name,
                    "sha256": hashlib.sha256(args.prompts.read_bytes()).hexdigest(),
                    "count": len(prompts),
                },
            },
            "seconds": {name: watch.seconds for name, watch in watches.items()},
            "tokens_per_second": speeds,
            "overall": overall,
            "categories": categories,
            "requests": [dataclasses.asdict(answer) for answer in answers],
        }
        args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(dtype == "float32" and overall["identical"] < overall["compared"])


if __name__ == "__main__":
    sys.exit(main())

"""Times starts of an engine: from the start of the process to the first round's tokens.

    python scripts/bench_start.py --preset llama3.1-8b --speculative-adaptive \\
        --batch-buckets 1,2,4,8 --context-length 2048 --starts 3

Each start is a process of its own. Without ``--compile-cache-dir`` the first one finds an empty
cache, so that the first row is a cold start and the others are warm ones. (The operating system may
still have files and libraries in memory from before; what reads a checkpoint for the first time
takes longer.)
"""

import time

STARTED = time.time()

import argparse  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from itertools import pairwise  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

PHASES = ("interpreter", "imports", "device", "engine", "prefill", "round")
PROMPT_TOKENS = 100


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    from specjax.cli.options import (
        add_memory_options,
        add_model_options,
        add_speculation_options,
        add_start_options,
    )

    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], argument_default=argparse.SUPPRESS
    )
    add_model_options(parser.add_argument_group("model"))
    add_speculation_options(parser.add_argument_group("speculation"))
    add_memory_options(parser.add_argument_group("memory and start-up"))
    run = parser.add_argument_group("run")
    add_start_options(run)
    run.add_argument("--starts", type=int, default=3, help="processes (default: 3)")
    run.add_argument("--json", type=Path, default=None, metavar="FILE", help="append JSON lines")
    run.add_argument(
        "--verbose", action="store_true", default=False, help="the engine's log to standard error"
    )
    args = parser.parse_args(argv)
    if args.starts < 1:
        parser.error(f"--starts {args.starts} must be at least 1")
    return args


def engine_options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Keyword arguments of ``Engine`` as JSON values; presets and cold caches are in ``folder``."""
    from specjax.cli.options import engine_arguments, with_preset

    options = engine_arguments(args)
    options.setdefault("compile_cache_dir", str(folder / "cache"))
    if "batch_buckets" in options:
        options.setdefault("max_running_requests", options["batch_buckets"][-1])
    return with_preset(options, args.preset, folder)


def start_engine(options: dict[str, Any]) -> dict[str, Any]:
    """Starts an engine in this process and answers one request; times of the clock by phase."""
    stamps = {"interpreter": STARTED}
    import jax

    from specjax import Engine

    stamps["imports"] = time.time()
    jax.devices()
    stamps["device"] = time.time()
    with Engine(**options) as engine:
        stamps["engine"] = time.time()
        vocab_size = engine.target.config.vocab_size
        sampling = {"temperature": 0.0, "max_new_tokens": 64, "ignore_eos": True}
        prompt = [7 * i % vocab_size for i in range(PROMPT_TOKENS)]
        stream = engine.generate(input_ids=prompt, sampling_params=sampling, stream=True)
        for phase in ("prefill", "round"):
            next(stream)
            stamps[phase] = time.time()
        report = engine.runner.compiled.report
        return {
            "stamps": stamps,
            "functions": len(report),
            "from_cache": sum(function.is_hit for function in report),
            "megabytes": sum(function.num_bytes or 0 for function in report) / 1e6,
            "jax": jax.__version__,
            "device_kind": jax.devices()[0].device_kind,
        }


def measure(options: dict[str, Any], *, is_verbose: bool) -> dict[str, Any]:
    """Starts a process; seconds of each phase and of all together.

    Raises:
        ValueError: if it fails; its reason is on standard error.
    """
    started = time.time()
    child = json.dumps({"options": options, "is_verbose": is_verbose})
    process = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--child", child],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        raise ValueError(f"the start failed with exit status {process.returncode}")
    row: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    stamps = row.pop("stamps")
    times = [started, *(stamps[phase] for phase in PHASES)]
    seconds = [after - before for before, after in pairwise(times)]
    return {"total": times[-1] - started} | dict(zip(PHASES, seconds, strict=True)) | row


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a start; seconds."""
    from specjax.markdown import markdown_table

    lines = [["start", *PHASES, "total", "functions", "from cache"]]
    for i, row in enumerate(rows):
        figures = [f"{row[name]:.1f}" for name in (*PHASES, "total")]
        lines.append([str(i + 1), *figures, str(row["functions"]), str(row["from_cache"])])
    return markdown_table(lines)


def run(args: argparse.Namespace) -> int:
    """Measures all starts and shows the table."""
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(args, Path(folder))
        rows = [measure(options, is_verbose=args.verbose) for _ in range(args.starts)]
    print(format_table(rows))
    last = rows[-1]
    print(f"{last['device_kind']}, jax {last['jax']}; {last['megabytes']:.0f} MB of functions")
    if args.json is not None:
        with args.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark, or one start of it, and returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["--child"]:
        child = json.loads(argv[1])
        if child["is_verbose"]:
            form = "%(relativeCreated)6d ms %(name)s: %(message)s"
            logging.basicConfig(level=logging.INFO, format=form)
        print(json.dumps(start_engine(child["options"])))
        return 0
    from specjax.cli.errors import report_error

    args = parse_arguments(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        return report_error("bench_start", error)


if __name__ == "__main__":
    sys.exit(main())

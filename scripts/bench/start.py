"""Times starts of an engine: from the start of the process to the first round's tokens.

    python scripts/bench_start.py --preset llama3.1-8b --speculative-adaptive \\
        --batch-buckets 1,2,4,8 --context-length 2048 --starts 3

Each start is a process of its own. Without ``--compile-cache-dir`` the first one finds an empty
cache, so that the first row is a cold start and the others are warm ones.
"""

import time

STARTED = time.time()

import argparse  # noqa: E402
import json  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from itertools import pairwise  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

PHASES = ("interpreter", "imports", "device", "engine", "prefill", "round")
PROMPT_TOKENS = 100
COLUMNS = (
    ("start", "start", "d"),
    *((name, name, ".1f") for name in (*PHASES, "total")),
    ("functions", "functions", "d"),
    ("from cache", "from_cache", "d"),
)


def parse_arguments(door: str, argv: Sequence[str]) -> argparse.Namespace:
    from bench import common
    from specjax.cli.options import add_start_options

    parser = common.engine_parser(door, __doc__)
    run = parser.add_argument_group("run")
    add_start_options(run)
    run.add_argument("--starts", type=int, default=3, help="processes (default: 3)")
    run.add_argument("--json", type=Path, default=None, metavar="FILE", help="append JSON lines")
    args = parser.parse_args(argv)
    common.check_at_least(parser, args, 1, "starts")
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


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Starts a process; seconds of each phase and of all together."""
    started = time.time()
    command = [sys.executable, str(Path(__file__).resolve()), json.dumps(options)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode != 0:
        raise ValueError(f"the start failed with exit status {process.returncode}")
    row: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    stamps = row.pop("stamps")
    times = [started, *(stamps[phase] for phase in PHASES)]
    seconds = [after - before for before, after in pairwise(times)]
    return {"total": times[-1] - started} | dict(zip(PHASES, seconds, strict=True)) | row


def main(door: str, argv: Sequence[str]) -> int:
    from bench import common

    args = parse_arguments(door, argv)
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(args, Path(folder))
        rows = [measure(options) for _ in range(args.starts)]
    print(common.table_of(COLUMNS, [row | {"start": i} for i, row in enumerate(rows, start=1)]))
    last = rows[-1]
    print(f"{last['device_kind']}, jax {last['jax']}; {last['megabytes']:.0f} MB of functions")
    for row in rows:
        common.append_json(args.json, row)
    return 0


if __name__ == "__main__":  # one start, in the process that main measures
    print(json.dumps(start_engine(json.loads(sys.argv[1]))))

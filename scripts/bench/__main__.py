"""Runs the benchmark of a door, a script beside this folder."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

SCRIPTS = str(Path(__file__).resolve().parents[1])
# the module of each door
DOORS = {
    "bench_adaptive_speculative": "throughput",
    "bench_algorithms": "algorithms",
    "bench_attention": "kernels",
    "bench_disaggregation": "disaggregation",
    "bench_kernels": "kernels",
    "bench_offline_throughput": "throughput",
    "bench_requests": "requests",
    "bench_round": "round",
    "bench_server": "server",
    "bench_serving_mix": "serving_mix",
    "bench_speculative": "speculative",
    "bench_start": "start",
    "eval_acceptance": "acceptance",
}


def main(argv: Sequence[str]) -> int:
    """The exit status of a door with its options.

    1 where float32 texts differ or requests of a load failed, 2 for bad input.
    """
    door, *rest = argv
    if SCRIPTS not in sys.path:
        sys.path.insert(0, SCRIPTS)
    from specjax.cli.main import report_error

    try:
        return int(import_module(f"bench.{DOORS[door]}").main(door, rest))
    except (ValueError, OSError) as error:
        return report_error(door, error)


if __name__ == "__main__":
    sys.exit(main([globals()["DOOR"], *sys.argv[1:]]))  # a door sets its name

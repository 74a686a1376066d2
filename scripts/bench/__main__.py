"""Benchmarks by name: ``python scripts/bench NAME --help``."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

SCRIPTS = str(Path(__file__).resolve().parents[1])
# the module of each benchmark
NAMES = {
    "acceptance": "acceptance",
    "adaptive": "throughput",
    "attention": "kernels",
    "compare": "compare",
    "disaggregation": "disaggregation",
    "kernels": "kernels",
    "requests": "requests",
    "round": "round",
    "server": "server",
    "serving_mix": "serving_mix",
    "throughput": "throughput",
}


def main(argv: Sequence[str]) -> int:
    """The exit status of a benchmark with its options.

    1 if float32 texts differ or requests of a load failed, 2 for bad input.
    """
    if not argv or argv[0] not in NAMES:
        print(f"usage: python scripts/bench NAME [OPTIONS]; names: {', '.join(NAMES)}")
        return 2
    name, *rest = argv
    if SCRIPTS not in sys.path:
        sys.path.insert(0, SCRIPTS)
    from specjax.cli.main import report_error

    try:
        return int(import_module(f"bench.{NAMES[name]}").main(name, rest))
    except (ValueError, OSError) as error:
        return report_error(f"bench {name}", error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

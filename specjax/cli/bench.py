"""``specjax bench``: run a benchmark of the clone that this package was installed from."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# benchmark -> its module in scripts/bench
NAMES = {
    "acceptance": "acceptance",
    "adaptive": "compare",
    "attention": "kernels",
    "compare": "compare",
    "kernels": "kernels",
    "round": "round",
    "serving": "serving",
}


def add_bench_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="run a benchmark of scripts/bench",
        description="Run a benchmark of scripts/bench, which a clone of the repository has and a "
        "wheel does not. 'specjax bench NAME --help' lists the options of one.",
        allow_abbrev=False,
    )
    parser.add_argument("name", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="its options")
    parser.set_defaults(quiet=True)


def run_bench(name: str, options: Sequence[str]) -> int:
    """Run a benchmark.

    Returns:
        0; 1 if float32 texts differ from those of plain decoding, or requests of a load failed.
    """
    if not (SCRIPTS / "bench").is_dir():
        raise ValueError(
            f"specjax bench: {SCRIPTS / 'bench'} does not exist; the benchmarks are not part of "
            "an installed wheel: clone the repository and run 'pip install -e .' there"
        )
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    return int(import_module(f"bench.{NAMES[name]}").main(name, options))

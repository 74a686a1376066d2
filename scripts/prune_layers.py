#!/usr/bin/env python3
"""Write a model that keeps only some layers of another model, as the start of a draft model.

python scripts/prune_layers.py --model smollm2-135m --keep 0-5 24-29 --output my-draft
"""

import argparse
import sys
from pathlib import Path

from specjax.checkpoints import open_target
from specjax.checkpoints.export import save_layers
from specjax.cli.main import report_error


def layer_range(text: str) -> range:
    """Parse ``"3"`` or ``"0-5"``."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0, or 2 if the input is invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="name, directory, .gguf file or repo id")
    add("--dtype", default="auto", help="float32, bfloat16 or auto: the checkpoint's own")
    add("--keep", nargs="+", type=layer_range, required=True, help="layers to keep, as 0-5 24 29")
    add("--output", type=Path, required=True, help="directory to write")
    args = parser.parse_args(argv)
    try:
        model = open_target(args.model, dtype=args.dtype)
        save_layers(args.output, model, [layer for kept in args.keep for layer in kept])
    except (ValueError, OSError) as error:
        return report_error("prune_layers", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

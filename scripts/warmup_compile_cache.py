"""Compile what serving dispatches ahead of the first start; the same as ``specjax warmup``."""

import sys

from specjax.cli import main

if __name__ == "__main__":
    sys.exit(main(["warmup", *sys.argv[1:]]))

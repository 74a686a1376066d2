"""Compile all functions for serving, before the first start; same as ``specjax warmup``."""

import sys

from specjax.cli import main

if __name__ == "__main__":
    sys.exit(main(["warmup", *sys.argv[1:]]))

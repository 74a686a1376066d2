"""Compare adaptive speculation with fixed numbers of drafts; same as ``specjax bench adaptive``."""

import sys

from specjax.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "adaptive", *sys.argv[1:]]))

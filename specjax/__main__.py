"""``python -m specjax``: the command line."""

import sys

from specjax.cli import main

sys.exit(main())

"""Adaptive speculation and fixed numbers of drafts; the same as ``scripts/bench adaptive``."""

import runpy
import sys
from pathlib import Path

sys.argv.insert(1, "adaptive")
runpy.run_path(str(Path(__file__).with_name("bench")), run_name="__main__")

"""Output tokens a second through HTTP: see bench/server.py."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("bench")), {"DOOR": Path(__file__).stem}, "__main__")

"""Throughput of an engine that gets all requests at once: see bench/throughput.py."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("bench")), {"DOOR": Path(__file__).stem}, "__main__")

"""What long prompts cost those that decode beside them: see bench/disaggregation.py."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("bench")), {"DOOR": Path(__file__).stem}, "__main__")

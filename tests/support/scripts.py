"""Load scripts as modules."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from specjax.cli import main

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load_script(name: str) -> ModuleType:
    """Load ``scripts/{name}.py`` without running it as the main module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_bench(name: str) -> ModuleType:
    """Load ``scripts/bench/{name}.py`` as a module of the package ``bench``."""
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    return importlib.import_module(f"bench.{name}")


def run_bench(name: str, arguments: str, *more: str) -> int:
    """Run a benchmark and return its exit status; ``more`` arguments may contain spaces."""
    return main(["bench", name, *arguments.split(), *more])

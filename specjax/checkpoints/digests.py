"""Digests of saved files, to find a damaged file before orbax reads it."""

import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from hashlib import file_digest
from pathlib import Path

from specjax.json_file import read_json

WEIGHTS = "weights"  # subdirectory of a saved checkpoint
_DIGESTS = "sha256.json"


def write_digests(folder: Path) -> None:
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    (folder / _DIGESTS).write_text(json.dumps(_digests(folder, names)), encoding="utf-8")


def check_digests(folder: Path) -> None:
    """Raise ValueError if a file in ``folder`` has changed since :func:`write_digests`."""
    expected = read_json(folder / _DIGESTS)
    for name, digest in _digests(folder, expected).items():
        if digest != expected[name]:
            raise ValueError(
                f"{folder / name} has changed since it was saved; restore it, or save again"
            )


def _digests(folder: Path, names: Collection[str]) -> dict[str, str | None]:
    """Return the SHA-256 of each file by name; ``None`` if the file is missing."""

    def digest(name: str) -> str | None:
        if not (folder / name).is_file():
            return None
        with (folder / name).open("rb") as stream:
            return file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def check_saved_weights(path: Path) -> None:
    """Check the digests of the weights in ``path``; weights without digests are accepted."""
    if (path / WEIGHTS / _DIGESTS).is_file():
        check_digests(path / WEIGHTS)

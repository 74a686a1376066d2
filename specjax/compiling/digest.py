"""Digests of source files, for the keys of compiled functions."""

import os
import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any
from uuid import uuid4

# digest of each package at its first use, and so of the code that this process runs
_first_digests: dict[str, str] = {}


def source_facts(kind: Any) -> tuple[str, ...]:
    """Cache-key entries for a class outside specjax: names, versions and sources of its bases.

    A function has those of itself. A package is digested as a whole at its first use in this
    process. If its sources cannot be read or have changed since, the entries are unique, so other
    processes cannot share cached functions.
    """
    bases = getattr(kind, "__mro__", (kind,))
    foreign = [base for base in bases if _top_of(base) not in _OWN]
    if _top_of(kind) in sys.stdlib_module_names:  # made by exec or make_dataclass
        return (uuid4().hex,)
    names = (f"{base.__module__}.{base.__qualname__}" for base in foreign)
    return (*names, *(facts_of_package(top) for top in sorted({_top_of(base) for base in foreign})))


# flax is in the key with its version
_OWN = {"specjax", "flax", *sys.stdlib_module_names} - {"__main__"}


def _top_of(kind: Any) -> str:
    return kind.__module__.partition(".")[0]


def facts_of_package(top: str) -> str:
    """Name, version and digest of a top-level package; the first call fixes the digest."""
    spec = getattr(sys.modules.get(top), "__spec__", None)
    if top == "__main__" and spec is not None and spec.parent:  # python -m package.module
        top = spec.parent.partition(".")[0]
    try:
        module = sys.modules[top]
        roots = [Path(path) for path in getattr(module, "__path__", ())]
        digest = digest_files(roots or [Path(module.__file__ or "")])
        names = {str(name) for name in packages_distributions().get(top, ()) if name}
        versions = [f"{name}=={version(name)}" for name in sorted(names)]
    except Exception:  # a zip file, a broken link, damaged metadata
        return f"{top} {uuid4().hex}"
    if _first_digests.setdefault(top, digest) != digest:
        return f"{top} {uuid4().hex}"
    return " ".join([top, *versions, digest])


def digest_files(roots: Iterable[Path], ending: str = "") -> str:
    """SHA-256 of the names and contents of all files below ``roots`` with this ending."""
    digest = sha256()
    for root in roots:
        for path in _files(root):
            if path.name.endswith(ending):
                content = path.read_bytes()
                digest.update(f"{path.relative_to(root)} {len(content)}\n".encode())
                digest.update(content)
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    """List the files below a folder in order, following links; or ``root`` if it is a file."""
    if not root.is_dir():
        yield root
    visited = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        if (real := os.path.realpath(folder)) in visited:
            folders.clear()
            continue
        visited.add(real)
        yield from (Path(folder, name) for name in sorted(files))

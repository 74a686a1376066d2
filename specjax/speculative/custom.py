"""Algorithms that other packages bring, and what compiled functions depend on there."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any
from uuid import uuid4


@dataclass(frozen=True)
class CustomSpecAlgo:
    """A registered algorithm, before an engine's arguments make one of it.

    It is none of the algorithms that are built in.

    Attributes:
        name: under which it is registered.
        factory: makes the ``SpeculativeAlgorithm`` of an engine's arguments.
        supports_overlap: whether a round may be dispatched before the one before it is read.
        validate_server_args: refuses an engine's arguments by a ValueError.
    """

    name: str
    factory: Callable[[Any], Any]
    supports_overlap: bool = False
    validate_server_args: Callable[[Any], object] | None = None

    def create_worker(self, args: Any) -> Any:
        """The ``SpeculativeAlgorithm`` of engine arguments.

        ValueError where they do not fit, or the factory made something else.
        """
        from specjax.speculative.algorithm import SpeculativeAlgorithm

        if self.validate_server_args is not None:
            self.validate_server_args(args)
        worker = self.factory(args)
        if not isinstance(worker, SpeculativeAlgorithm):
            raise ValueError(
                f"the factory of speculative_algorithm={self.name!r} made {worker!r}, which is no "
                "SpeculativeAlgorithm"
            )
        worker = replace(worker, name=self.name, supports_overlap=self.supports_overlap)
        return worker.create_worker(args)

    def is_none(self) -> bool:
        return False

    def is_speculative(self) -> bool:
        return True

    def is_eagle(self) -> bool:
        return False

    def is_eagle3(self) -> bool:
        return False

    def is_standalone(self) -> bool:
        return False

    def is_ngram(self) -> bool:
        return False

    def is_dflash(self) -> bool:
        return False

    def supports_target_verify_for_draft(self) -> bool:
        return False


def source_facts(kind: type) -> tuple[str, ...]:
    """Distributions, versions and a digest of the sources that a class outside specjax comes from.

    A package counts as a whole, since any of its files may take part in what is traced. Where there
    is no file nothing is known, and the facts are those of no other process.
    """
    tops = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return tuple(
        _facts_of(top) for top in sorted(tops - {"specjax"} - set(sys.stdlib_module_names))
    )


def _facts_of(top: str) -> str:
    module = sys.modules[top]
    folders = [Path(path) for path in getattr(module, "__path__", ())]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    if not folders and getattr(module, "__file__", None):
        files = [Path(str(module.__file__))]
    if not files:
        return f"{top} {uuid4().hex}"
    digest = sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    names = sorted(set(packages_distributions().get(top, ())))
    return " ".join([top, *(f"{name}=={version(name)}" for name in names), digest.hexdigest()])

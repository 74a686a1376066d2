"""Algorithms that other packages bring, and what compiled functions depend on there."""

import os
import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax

from specjax.speculative.future_map import FutureMap

# digests of packages when they were first looked at: what this process runs
_first_digests: dict[str, str] = {}


class CommonAlgorithm:
    """What built-in and registered algorithms share, under SGLang's names."""

    # which one it is: for authors; the engine does not ask

    def is_none(self) -> bool:
        return False

    def is_some(self) -> bool:
        return not self.is_none()

    def is_speculative(self) -> bool:
        return not self.is_none()

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
        """Whether drafting is one pass of its network over all T rows, as a verify is one.

        Only the memory planner reads it: such a pass has the logits of all rows at once.
        """
        return self.is_dflash()

    def create_future_map(
        self,
        max_running_requests: int,
        chunked_prefill_size: int,
        context_len: int,
        device: jax.Device,
        *,
        rows: Any = (),
    ) -> FutureMap:
        """Shapes and dtypes of all that waits for the next round, by request slot.

        Stages read and write its rows alone, so an engine refuses a subclass with further leaves.

        Args:
            max_running_requests: requests decoded at once; slot 0, the padding, is one more.
            chunked_prefill_size: prompt tokens that are computed beside a round.
            context_len: C, tokens of a request.
            device: that it will lie on.
            rows: what ``abstract_rows`` gave.
        """
        return FutureMap.abstract(max_running_requests + 1, context_len, rows)

    def build_disagg_draft_input(
        self,
        rows: Any,
        bonus_tokens: jax.Array,
        seq_lens: jax.Array,
        slots: jax.Array,
        future: FutureMap,
    ) -> Any:
        """Rows ``[B, ...]`` of requests whose prompts were computed elsewhere; B may be 0.

        Args:
            rows: what prefill left there, ``None`` where they did not come along.
            bonus_tokens: i32 ``[B]``.
            seq_lens: i32 ``[B]``, tokens in the KV pools.
            slots: i32 ``[B]``, request slots here.
            future: of this side, which has lengths, bonus tokens and history of the slots already.

        Returns:
            What the first round here starts from. ``None`` stands for zeros: that round drafts
            nothing, the later ones as usual.
        """
        return rows


@dataclass(frozen=True)
class CustomSpecAlgo(CommonAlgorithm):
    """A registered algorithm, before an engine's arguments make one of it.

    It is none of the algorithms that are built in. The methods of :class:`CommonAlgorithm` that a
    subclass overrides take the place of those of the ``SpeculativeAlgorithm`` that it makes.

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

        if args.overlap and not self.supports_overlap:
            raise ValueError(f"overlap=True, which {self.name} does not support; leave it None")
        if self.validate_server_args is not None:
            self.validate_server_args(args)
        knob = f"speculative_algorithm={self.name!r}"
        try:
            worker = self.factory(args)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"the factory of {knob} failed: {error!r}") from error
        if not isinstance(worker, SpeculativeAlgorithm):
            raise ValueError(f"the factory of {knob} made {worker!r}, no SpeculativeAlgorithm")
        return worker.create_worker(args)

    def overridden(self, worker: Any) -> Any:
        """The worker with the methods that this class overrides, and their sources in its facts."""
        own = {
            name: getattr(self, name)
            for name, common in vars(CommonAlgorithm).items()
            if name[0] != "_" and getattr(type(self), name) is not common
        }
        if own:
            worker = copy(worker)  # the factory may give one to all engines
            facts = (*worker.cache_facts(), *source_facts(type(self)))
            for name, value in (own | {"cache_facts": lambda: facts}).items():
                object.__setattr__(worker, name, value)  # a frozen dataclass
        return worker


def source_facts(kind: type) -> tuple[str, ...]:
    """What a class outside specjax is made of: names, distributions, versions, sources.

    A package counts as a whole, as it was when this process first looked at it. Where its sources
    cannot be read, or have changed since, the facts are those of no other process.
    """
    foreign = [base for base in kind.__mro__ if _top_of(base) not in _OWN]
    if _top_of(kind) in sys.stdlib_module_names:  # made by exec or make_dataclass
        return (uuid4().hex,)
    names = (f"{base.__module__}.{base.__qualname__}" for base in foreign)
    return (*names, *(_facts_of(top) for top in sorted({_top_of(base) for base in foreign})))


def note_sources(module: str) -> None:
    """Remember a module's package as it is now, since what it imports is what will run."""
    _facts_of(module.partition(".")[0])


_OWN = {"specjax", *sys.stdlib_module_names} - {"__main__"}


def _top_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _facts_of(top: str) -> str:
    spec = getattr(sys.modules.get(top), "__spec__", None)
    if top == "__main__" and spec is not None and spec.parent:  # python -m package.module
        top = spec.parent.partition(".")[0]
    try:
        digest = _digest(top)
        names = {str(name) for name in packages_distributions().get(top, ()) if name}
        versions = [f"{name}=={version(name)}" for name in sorted(names)]
    except Exception:  # a zip file, a broken link, metadata that are damaged
        return f"{top} {uuid4().hex}"
    if _first_digests.setdefault(top, digest) != digest:
        return f"{top} {uuid4().hex}"
    return " ".join([top, *versions, digest])


def _digest(top: str) -> str:
    """SHA-256 of all files of a package, or of the one of a module. OSError where there is none."""
    module = sys.modules[top]
    roots = [Path(path) for path in getattr(module, "__path__", ())]
    digest = sha256()
    for root in roots or [Path(module.__file__ or "")]:
        for path in _files(root):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root)} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    """Files below a folder by name, through links too; the root itself where it is a file."""
    if not root.is_dir():
        yield root
    seen = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(folder, name) for name in sorted(files))

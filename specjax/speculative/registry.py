"""Algorithms by name: those that are built in, and those of other packages."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from pathlib import Path
from threading import RLock
from types import FunctionType
from typing import Any, TypeVar
from uuid import uuid4

from specjax.speculative.algorithm import CommonAlgorithm, SpeculativeAlgorithm

PLAIN = "NONE"
DEFAULT = "EAGLE3"
HINT = (
    "for drafts set draft to an EAGLE-3 head, or speculative_algorithm to 'NGRAM', which needs none"
)
ALIASES = {"NEXTN": "EAGLE"}
# of installed packages: a name, and the module that registers it
GROUP = "specjax.algorithms"

# name: where the instance is; imported when it is asked for
_FACTORIES = {
    PLAIN: "specjax.speculative.algorithm:PLAIN",
    "EAGLE": "specjax.speculative.eagle:EAGLE",
    "EAGLE3": "specjax.speculative.eagle:EAGLE3",
    "NGRAM": "specjax.speculative.ngram:NGRAM",
    "STANDALONE": "specjax.speculative.standalone:STANDALONE",
    "MULTI_LAYER_EAGLE": "specjax.speculative.multi_layer_eagle:MULTI_LAYER_EAGLE",
}
# names that mean something in SGLang, which no package may take
RESERVED = (*_FACTORIES, *ALIASES, "DFLASH", "DSPARK")
_custom: dict[str, "CustomSpecAlgo"] = {}
# digests of packages when they were first looked at: what this process runs
_first_digests: dict[str, str] = {}
_loading = RLock()  # held while a package is imported, whose names are there before it is done


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
    factory: Callable[[Any], SpeculativeAlgorithm]
    supports_overlap: bool = False
    validate_server_args: Callable[[Any], object] | None = None

    def create_worker(self, args: Any) -> SpeculativeAlgorithm:
        """The ``SpeculativeAlgorithm`` of engine arguments.

        ValueError where they do not fit, or the factory made something else.
        """
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

    def overridden(self, worker: SpeculativeAlgorithm) -> SpeculativeAlgorithm:
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


Factory = TypeVar("Factory", bound=Callable[[Any], Any])


def names() -> tuple[str, ...]:
    """Every name that can be asked for; packages are not imported."""
    installed = (point.name.upper() for point in entry_points(group=GROUP))
    return tuple(dict.fromkeys((*_FACTORIES, *_custom, *sorted(installed))))


def find(name: str | None) -> Any:
    """The algorithm of a name in any case; plain decoding for ``None``.

    A ``SpeculativeAlgorithm``, or what :func:`register_algorithm` made. ValueError for a name that
    is not registered, or whose package cannot be loaded.
    """
    key = PLAIN if name is None else name.upper() if isinstance(name, str) else ""
    place = _FACTORIES.get(ALIASES.get(key, key))
    if place is not None:
        module, attribute = place.split(":")
        return getattr(import_module(module), attribute)
    with _loading:
        if key not in _custom:
            points = [point for point in entry_points(group=GROUP) if point.name.upper() == key]
            if not points:
                known = f"{list(names())} or None"
                raise ValueError(f"speculative_algorithm={name!r} is not one of {known}")
            _load(name, key, points)
        return _custom[key]


def _load(name: str | None, key: str, points: list[EntryPoint]) -> None:
    """Import the module that is to register a name."""
    owners = [f"{point.value} of {point.dist and point.dist.name}" for point in points]
    if len(set(owners)) > 1:
        raise ValueError(f"speculative_algorithm={name!r} is in {owners}; uninstall all but one")
    before = dict(_custom)
    try:
        points[0].load()
    except Exception as error:
        _custom.clear()
        _custom.update(before)
        raise ValueError(
            f"speculative_algorithm={name!r}: {owners[0]} cannot be loaded: {error!r}"
        ) from error
    if key not in _custom:
        raise ValueError(
            f"speculative_algorithm={name!r}: {owners[0]} registers no such name; decorate its "
            f"factory with register_algorithm({name!r})"
        )


def register_algorithm(
    name: str,
    *,
    supports_overlap: bool = False,
    validate_server_args: Callable[[Any], object] | None = None,
    spec_class: Any = CustomSpecAlgo,
) -> Callable[[Factory], Factory]:
    """A decorator that registers ``factory(args)``, which makes a ``SpeculativeAlgorithm``.

    The factory is returned unchanged, and called with the arguments of each engine that names the
    algorithm. A package that is installed needs no import: it names the module that registers as
    an entry point of the group ``specjax.algorithms``.

    Args:
        name: in any case.
        supports_overlap: whether a round may be dispatched before the one before it is read, which
            ``overlap=None`` follows.
        validate_server_args: called with an engine's arguments first; refuses by a ValueError.
        spec_class: takes name, factory and both options in the place of :class:`CustomSpecAlgo`;
            what a subclass overrides is called.

    Raises:
        ValueError: the name is reserved or taken, or ``spec_class`` lacks a method or has one that
            belongs in the ``SpeculativeAlgorithm``.
    """
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise ValueError(f"name={name!r} of an algorithm must be letters, digits, _ and -")
    key = name.upper()
    if key in RESERVED:
        raise ValueError(f"name={name!r} is reserved, as are {list(RESERVED)}")
    common, seam = _public(CustomSpecAlgo), _public(SpeculativeAlgorithm)
    methods = [each for each in common if callable(getattr(CustomSpecAlgo, each))]
    if missing := [each for each in methods if not callable(getattr(spec_class, each, None))]:
        raise ValueError(f"spec_class={spec_class!r} of {name!r} lacks {missing}")
    unread = [each for each in _public(spec_class) if each in seam and each not in common]
    if "supports_overlap" in vars(spec_class) and spec_class is not CustomSpecAlgo:
        raise ValueError(
            f"spec_class={spec_class!r} of {name!r} has supports_overlap; give it to "
            "register_algorithm"
        )
    if unread:
        raise ValueError(
            f"spec_class={spec_class!r} of {name!r} has {unread}, which nothing reads there; they "
            "belong in the SpeculativeAlgorithm that the factory makes"
        )

    def register(factory: Factory) -> Factory:
        if not callable(factory):
            raise ValueError(f"the factory {factory!r} of {name!r} must be callable")
        taken = getattr(_custom.get(key), "factory", None)
        # a module may be reloaded, the cell of a notebook run again
        if key in _custom and _origin(taken) != _origin(factory):
            raise ValueError(
                f"name={name!r} is taken by {_origin(taken)}; a function of the same name may "
                "replace that one, a lambda or object may not"
            )
        try:
            made = spec_class(key, factory, supports_overlap, validate_server_args)
        except TypeError as error:
            raise ValueError(f"spec_class={spec_class!r} of {name!r}: {error}") from error
        _custom[key] = made
        record_sources(getattr(factory, "__module__", ""))
        return factory

    return register


def _public(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name[0] != "_"]


def _origin(factory: Any) -> str:
    """Where a factory is defined; a lambda, local function or object is known by its identity."""
    name = getattr(factory, "__qualname__", "<object>")
    is_named = isinstance(factory, type | FunctionType) and "<" not in name
    return f"{factory.__module__}.{name}" if is_named else f"{factory!r} at {id(factory)}"


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


def record_sources(module: str) -> None:
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
    return digest_files(roots or [Path(module.__file__ or "")])


def digest_files(roots: Iterable[Path], ending: str = "") -> str:
    """SHA-256 of the names and contents of all files below ``roots`` with an ending."""
    digest = sha256()
    for root in roots:
        for path in _files(root):
            if path.name.endswith(ending):
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

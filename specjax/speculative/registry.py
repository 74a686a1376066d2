"""The registry of algorithms, built-in and from other packages, by name."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from threading import RLock
from types import FunctionType
from typing import Any, TypeVar

from specjax.compiling.digest import facts_of_package, source_facts
from specjax.speculative import catalog
from specjax.speculative.algorithm import CommonAlgorithm, SpeculativeAlgorithm
from specjax.speculative.catalog import FACTORIES, RESERVED

_loading = RLock()  # held during a package's import, which registers names before it finishes


@dataclass(frozen=True)
class CustomSpecAlgo(CommonAlgorithm):
    """An algorithm from another package, before ``create_worker`` builds it.

    If a subclass overrides methods of :class:`CommonAlgorithm`, they replace those of the
    ``SpeculativeAlgorithm`` that it builds. :func:`register_algorithm` describes the attributes.
    """

    name: str
    factory: Callable[[Any], SpeculativeAlgorithm]
    supports_overlap: bool = False
    validate_server_args: Callable[[Any], object] | None = None

    def create_worker(self, args: Any) -> SpeculativeAlgorithm:
        """Build the ``SpeculativeAlgorithm`` for these engine arguments.

        Raises ValueError if it rejects them, or if the factory returns another type.
        """
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
            raise ValueError(f"factory of {knob} returned {worker!r}, not a SpeculativeAlgorithm")
        return worker.create_worker(args)

    def overridden(self, worker: SpeculativeAlgorithm) -> SpeculativeAlgorithm:
        """Give the worker the methods that this class overrides; add their sources to its key."""
        overrides = {
            name: getattr(self, name)
            for name, common in vars(CommonAlgorithm).items()
            if name[0] != "_" and getattr(type(self), name) is not common
        }
        if overrides:
            worker = copy(worker)  # the factory may return the same object to all engines
            facts = (*worker.cache_facts(), *source_facts(type(self)))
            for name, value in (overrides | {"cache_facts": lambda: facts}).items():
                object.__setattr__(worker, name, value)  # a frozen dataclass
        return worker


Factory = TypeVar("Factory", bound=Callable[[Any], Any])


def find(name: str | None) -> Any:
    """Find an algorithm by name, in upper or lower case; plain decoding for ``None``.

    Returns a built-in ``SpeculativeAlgorithm``, or a ``CustomSpecAlgo``. Raises ValueError if the
    name is not registered or its package cannot be loaded.
    """
    if (key := catalog.key_of(name)) in FACTORIES:
        module, attribute = FACTORIES[key].split(":")
        return getattr(import_module(module), attribute)
    with _loading:
        catalog.check_name(name)
        if key not in catalog.custom:
            points = [
                point for point in entry_points(group=catalog.GROUP) if point.name.upper() == key
            ]
            _load(name, key, points)
        return catalog.custom[key]


def _load(name: str | None, key: str, points: list[EntryPoint]) -> None:
    """Import the module that must register this name."""
    owners = [f"{point.value} of {point.dist and point.dist.name}" for point in points]
    if len(set(owners)) > 1:
        raise ValueError(
            f"several packages provide speculative_algorithm={name!r}: {owners}; uninstall all but "
            "one"
        )
    before = dict(catalog.custom)
    try:
        points[0].load()
    except Exception as error:
        catalog.custom.clear()
        catalog.custom.update(before)
        raise ValueError(
            f"speculative_algorithm={name!r}: {owners[0]} cannot be loaded: {error!r}"
        ) from error
    if key not in catalog.custom:
        raise ValueError(
            f"speculative_algorithm={name!r}: {owners[0]} does not register this name; decorate "
            f"its factory with register_algorithm({name!r})"
        )


def register_algorithm(
    name: str,
    *,
    supports_overlap: bool = False,
    validate_server_args: Callable[[Any], object] | None = None,
    spec_class: Any = CustomSpecAlgo,
) -> Callable[[Factory], Factory]:
    """Decorator: register ``factory(args)``, which builds a ``SpeculativeAlgorithm``.

    The factory is returned unchanged. It is called with the arguments of each engine that names the
    algorithm. docs/extending.md has the entry point with which users need not import a package.

    Args:
        name: in upper or lower case.
        supports_overlap: whether a round may be dispatched before the previous one is read; also
            the default of the engine's ``overlap``.
        validate_server_args: called first with the arguments; raises ValueError to reject them.
        spec_class: a class to use instead of :class:`CustomSpecAlgo`, usually a subclass; it is
            called with the name, the factory and both options.

    Raises:
        ValueError: if the name is reserved or taken, or if ``spec_class`` lacks a method or has one
            that belongs in the ``SpeculativeAlgorithm``.
    """
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise ValueError(f"algorithm name={name!r} may contain only letters, digits, _ and -")
    key = name.upper()
    if key in RESERVED:
        raise ValueError(f"name={name!r} is reserved; reserved names are {list(RESERVED)}")
    common, seam = _public(CustomSpecAlgo), _public(SpeculativeAlgorithm)
    methods = [method for method in common if callable(getattr(CustomSpecAlgo, method))]
    if missing := [method for method in methods if not callable(getattr(spec_class, method, None))]:
        raise ValueError(f"spec_class={spec_class!r} of {name!r} lacks {missing}")
    unread = [method for method in _public(spec_class) if method in seam and method not in common]
    if "supports_overlap" in vars(spec_class) and spec_class is not CustomSpecAlgo:
        raise ValueError(
            f"{name!r}: set supports_overlap in register_algorithm(), not in "
            f"spec_class={spec_class!r}"
        )
    if unread:
        raise ValueError(
            f"{name!r}: {unread} have no effect in spec_class={spec_class!r}; move "
            "them to the SpeculativeAlgorithm that the factory returns"
        )

    def register(factory: Factory) -> Factory:
        if not callable(factory):
            raise ValueError(f"the factory {factory!r} of {name!r} must be callable")
        prior = getattr(catalog.custom.get(key), "factory", None)
        # allow reloading a module and running a notebook cell again
        if key in catalog.custom and _origin(prior) != _origin(factory):
            raise ValueError(
                f"name={name!r} is taken by {_origin(prior)}; only a named function or class with "
                "the same name may replace it"
            )
        try:
            algorithm = spec_class(key, factory, supports_overlap, validate_server_args)
        except TypeError as error:
            raise ValueError(f"spec_class={spec_class!r} of {name!r}: {error}") from error
        catalog.custom[key] = algorithm
        # record the digest of the package now, directly after its import
        facts_of_package(getattr(factory, "__module__", "").partition(".")[0])
        return factory

    return register


def _public(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name[0] != "_"]


def _origin(factory: Any) -> str:
    """The place where a factory is defined, with its id if it has no unique name there."""
    name = getattr(factory, "__qualname__", "<object>")
    is_named = isinstance(factory, type | FunctionType) and "<" not in name
    return f"{factory.__module__}.{name}" if is_named else f"{factory!r} at {id(factory)}"

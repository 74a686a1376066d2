"""Algorithms by name: those that are built in, and those of other packages."""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from threading import RLock
from types import FunctionType
from typing import Any, TypeVar

from specjax.speculative.custom import CustomSpecAlgo, note_sources

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
_custom: dict[str, Any] = {}
_loading = RLock()  # held while a package is imported, whose names are there before it is done
# what a class in the place of CustomSpecAlgo must have
_METHODS = [
    name
    for name in dir(CustomSpecAlgo)
    if name[0] != "_" and callable(getattr(CustomSpecAlgo, name))
]
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
    from specjax.speculative.algorithm import SpeculativeAlgorithm

    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise ValueError(f"name={name!r} of an algorithm must be letters, digits, _ and -")
    key = name.upper()
    if key in RESERVED:
        raise ValueError(f"name={name!r} is reserved, as are {list(RESERVED)}")
    if missing := [
        method for method in _METHODS if not callable(getattr(spec_class, method, None))
    ]:
        raise ValueError(f"spec_class={spec_class!r} of {name!r} lacks {missing}")
    unread = [
        each
        for each in dir(spec_class)
        if each[0] != "_"
        and hasattr(SpeculativeAlgorithm, each)
        and not hasattr(CustomSpecAlgo, each)
    ]
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
        note_sources(getattr(factory, "__module__", ""))
        return factory

    return register


def _origin(factory: Any) -> str:
    """Where a factory is defined; a lambda, local function or object is known by its identity."""
    name = getattr(factory, "__qualname__", "<object>")
    is_plain = isinstance(factory, type | FunctionType) and "<" not in name
    return f"{factory.__module__}.{name}" if is_plain else f"{factory!r} at {id(factory)}"

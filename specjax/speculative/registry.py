"""Algorithms by name."""

from importlib import import_module

from specjax.speculative.algorithm import SpeculativeAlgorithm

PLAIN = "NONE"
DEFAULT = "EAGLE3"
ALIASES = {"NEXTN": "EAGLE"}

# name: where the instance is; imported when it is asked for
_FACTORIES = {
    PLAIN: "specjax.speculative.plain:PLAIN",
    "EAGLE": "specjax.speculative.eagle:EAGLE",
    "EAGLE3": "specjax.speculative.eagle:EAGLE3",
}


def names() -> tuple[str, ...]:
    return tuple(_FACTORIES)


def find(name: str | None) -> SpeculativeAlgorithm:
    """The algorithm of a name in any case; plain decoding for ``None``.

    ValueError for a name that is not registered.
    """
    key = PLAIN if name is None else name.upper() if isinstance(name, str) else ""
    place = _FACTORIES.get(ALIASES.get(key, key))
    if place is None:
        raise ValueError(f"speculative_algorithm={name!r} is not one of {list(names())} or None")
    module, attribute = place.split(":")
    found: SpeculativeAlgorithm = getattr(import_module(module), attribute)
    return found

"""JSON values that may cross the wire: one check for each type that messages are annotated with."""

import reprlib
from collections.abc import Callable
from typing import Any

from specjax.checks import is_integer, is_number
from specjax.disaggregation.messages import Natural

MAX_DEPTH = 32


class WireError(ValueError):
    """Bytes or values that are no message; after it a connection is of no more use."""


def wrong(name: str, value: Any, demand: str) -> WireError:
    """The error for a value that is not as demanded."""
    return WireError(f"{name}={reprlib.repr(value)} must be {demand}")


def in_range(name: str, value: Any, low: int, high: int) -> int:
    """``value`` if it is an integer within its limits."""
    if not is_integer(value) or not low <= value <= high:
        raise wrong(name, value, f"an integer from {low} to {high}")
    return value


def _natural(name: str, value: Any) -> int:
    return in_range(name, value, 0, 2**64 - 1)


def _integer(name: str, value: Any) -> int:
    return in_range(name, value, -(2**63), 2**64 - 1)


def _number(name: str, value: Any) -> float:
    if not is_number(value):
        raise wrong(name, value, "a finite number")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, value, "a string")
    return value


def _naturals(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise wrong(name, value, "a list of integers")
    return [_natural(name, item) for item in value]


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(name, value, "an object of JSON values")
    _check_json(name, value, MAX_DEPTH)
    return value


def _check_json(name: str, value: Any, depth: int) -> None:
    if not depth:
        raise WireError(f"{name} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_json(_text(f"a key of {name}", key), item, depth - 1)
    elif isinstance(value, list):
        for item in value:
            _check_json(name, item, depth - 1)
    elif isinstance(value, float):
        _number(name, value)
    elif is_integer(value):
        _integer(name, value)
    elif not (value is None or isinstance(value, bool | str)):
        raise wrong(name, value, "a JSON value")


CHECKS: dict[Any, Callable[[str, Any], Any]] = {
    Natural: _natural,
    int: _integer,
    float: _number,
    bool: _flag,
    str: _text,
    list[Natural]: _naturals,
    dict[str, Any]: _object,
}

"""Checks of values that users write; a bool is neither an integer nor a number."""

import math
from typing import Any


def is_integer(value: Any) -> bool:
    """Whether ``value`` is a Python integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number that a float can hold, and finite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_integer(name: str, value: Any, at_least: int, at_most: int | None = None) -> int:
    """``value`` if it is an integer within its limits.

    Raises:
        ValueError: with name, value and limits.
    """
    if not is_integer(value) or value < at_least or (at_most is not None and value > at_most):
        limit = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name}={value!r} must be an integer {limit}")
    return value


def check_number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> float:
    """``value`` as a float if it is a finite number within its limits.

    Raises:
        ValueError: with name, value and limits.
    """
    limits = {"of at least": at_least, "above": above, "of at most": at_most, "below": below}
    if not is_number(value) or not (
        (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
        and (below is None or value < below)
    ):
        words = " and ".join(
            f"{word} {limit}" for word, limit in limits.items() if limit is not None
        )
        raise ValueError(f"{name}={value!r} must be a finite number {words}".rstrip())
    return float(value)

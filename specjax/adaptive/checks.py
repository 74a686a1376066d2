"""Checks of numbers that users write; a bool is neither an integer nor a number."""

import math
from typing import Any


def check_integer(key: str, value: Any, at_least: int) -> int:
    """``value`` if it is an integer (a bool is not) of at least ``at_least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{key}={value!r} must be an integer of at least {at_least}")
    return value


def check_number(key: str, value: Any) -> float:
    """``value`` as a float if it is a finite number; a bool is none."""
    if is_number(value):
        return float(value)
    raise ValueError(f"{key}={value!r} must be a finite number")


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number that a float can hold, and finite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False

"""Checks of values that users write; a bool is neither an integer nor a number."""

import math
from operator import ge, gt, le, lt
from reprlib import Repr
from typing import Any

_LIMITS = {"at_least": ("at least", ge), "at_most": ("at most", le)}
_LIMITS |= {"above": ("above", gt), "below": ("below", lt)}


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 500
short = _SHORT.repr  # of a value in an error message, which may be as long as a request


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
    """``value`` if it is an integer within its limits; refuses it by name and limits if not."""
    if not is_integer(value) or value < at_least or (at_most is not None and value > at_most):
        limit = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name}={short(value)} must be an integer {limit}")
    return value


def check_number(name: str, value: Any, **limits: float) -> float:
    """``value`` as a float if it is a finite number within its limits; refuses it if not.

    The limits are any of ``at_least``, ``above``, ``at_most`` and ``below``.
    """
    given = [(*_LIMITS[limit], bound) for limit, bound in limits.items()]
    if not is_number(value) or not all(holds(value, bound) for _, holds, bound in given):
        kind = [] if is_number(value) else ["a finite number"]
        words = kind + [f"{word} {bound}" for word, _, bound in given]
        raise ValueError(f"{name}={short(value)} must be {' and '.join(words)}")
    return float(value)

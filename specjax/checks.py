"""Checks of user input; a bool is neither an integer nor a number."""

import math
from functools import cache
from operator import ge, gt, le, lt
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta, inspect

_LIMITS = {"at_least": ("at least", ge), "at_most": ("at most", le)}
_LIMITS |= {"above": ("above", gt), "below": ("below", lt)}
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
_WORDS: dict[type, tuple[str, str]] = {
    inspect.IntType: ("an integer", "integers"),
    inspect.FloatType: ("a finite number", "finite numbers"),
    inspect.StrType: ("a string", "strings"),
    inspect.BoolType: ("a bool", "bools"),
    inspect.DictType: ("an object", "objects"),
}
_META = {"ge": "at_least", "gt": "above", "le": "at_most", "lt": "below"}


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 500
short = _SHORT.repr  # shortens a value for an error message


CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code, which clients check


class ParameterError(ValueError):
    """An invalid value of an option.

    Attributes:
        param: the option as the user typed it; ``None`` if no single option is wrong.
        limit: the violated bound, if there is one.
        code: identifies the error to clients, for example ``"context_length_exceeded"``.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        limit: float | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.limit, self.code = param, limit, code


def check_regular(path: Path) -> None:
    """Raise ValueError for a pipe, a device or a directory: reading one may never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number that fits a float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def refused(name: str, value: Any, demand: str, limit: float | None = None) -> ParameterError:
    """Make the error for an invalid value of the option ``name``."""
    # logit_bias[5] belongs to the option logit_bias
    param = name.partition("[")[0]
    return ParameterError(f"{name}={short(value)} {demand}", param=param, limit=limit)


def check_integer(name: str, value: Any, at_least: int, at_most: int | None = None) -> int:
    """Return ``value`` if it is an integer within the limits; else raise ParameterError."""
    words = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    demand = f"must be an integer {words}"
    if not is_integer(value):
        raise refused(name, value, demand)
    if value < at_least:
        raise refused(name, value, demand, at_least)
    if at_most is not None and value > at_most:
        raise refused(name, value, demand, at_most)
    return value


def check_number(name: str, value: Any, **limits: float) -> float:
    """Return ``value`` as a float if it is finite and within the limits; else raise ParameterError.

    The limits are any of ``at_least``, ``above``, ``at_most`` and ``below``.
    """
    comparisons = [(*_LIMITS[limit], bound) for limit, bound in limits.items()]
    kind = [] if is_number(value) else ["a finite number"]
    missed = [] if kind else [bound for _, holds, bound in comparisons if not holds(value, bound)]
    if kind or missed:
        words = kind + [f"{word} {bound}" for word, _, bound in comparisons]
        limit = missed[0] if missed else None
        raise refused(name, value, f"must be {' and '.join(words)}", limit)
    return float(value)


@cache
def annotations(cls: type) -> dict[str, Any]:
    """The type hints of a class, with the limits that they state."""
    return get_type_hints(cls, include_extras=True)


def convert(name: str, value: Any, kind: Any) -> Any:
    """Convert ``value`` to the annotation ``kind``; errors state name, value and limits.

    ``kind`` is a type that msgspec supports, such as ``Annotated[int, Meta(ge=1)] | None`` or
    ``dict[str, Any]``. If its ``Meta`` has a description, the error uses it for values that are
    not numbers. Floats must be finite.
    """
    if kind is Any:
        return value
    try:
        # msgspec does not accept numpy's float64 as a float
        converted = msgspec.convert(float(value) if isinstance(value, float) else value, kind)
        if not isinstance(converted, float) or is_number(value):
            return converted
    except (msgspec.ValidationError, RecursionError):
        pass
    info, description = inspect.type_info(kind), None
    if isinstance(info, inspect.UnionType):
        info = next(member for member in info.types if not isinstance(member, inspect.NoneType))
    if isinstance(info, inspect.Metadata):
        description = (info.extra_json_schema or {}).get("description")
        info = info.type
    match info:
        case inspect.IntType(ge=int() as at_least):
            check_integer(name, value, at_least, info.le)
        case inspect.FloatType():
            bounds = {word: getattr(info, key) for key, word in _META.items()}
            check_number(name, value, **{word: at for word, at in bounds.items() if at is not None})
        case inspect.ListType() | inspect.VarTupleType():
            description = f"a list of {_WORDS[type(info.item_type)][1]}"
    raise refused(name, value, f"must be {description or _WORDS[type(info)][0]}")

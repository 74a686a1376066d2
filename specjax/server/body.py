"""Bodies of requests: JSON objects, read field by field until nothing is left."""

import json
from typing import Any, NoReturn

from specjax.checks import is_integer
from specjax.server.errors import ApiError


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object of UTF-8 text; ApiError says why it is none."""
    try:
        value = _DECODER.decode(data.decode())
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}, not an object")
    return value


class Body:
    """Fields of a JSON object, each taken once; null is as good as absent."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._left = {name: value for name, value in values.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    @property
    def left(self) -> tuple[str, ...]:
        """Names of fields that nobody has taken."""
        return tuple(self._left)

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def put(self, name: str, value: Any) -> None:
        """Have a field that was given under another name."""
        self._left[name] = value

    def peek(self, name: str) -> Any:
        return self._left.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        return self._typed(name, default, bool, "true or false")

    def text(self, name: str, default: str | None = None) -> Any:
        return self._typed(name, default, str, "a string")

    def fields(self, name: str) -> "Body":
        """A nested object, empty if it is absent."""
        return Body(self._typed(name, {}, dict, "an object"))

    def integer(self, name: str, default: Any = None, *, at_least: int, at_most: int) -> Any:
        value = self.take(name, default)
        if value is not default and not (is_integer(value) and at_least <= value <= at_most):
            raise ApiError(
                400, f"{name}={value!r} must be an integer from {at_least} to {at_most}", param=name
            )
        return value

    def _typed(self, name: str, default: Any, kind: type, meaning: str) -> Any:
        value = self.take(name, default)
        if value is not default and not isinstance(value, kind):
            raise ApiError(400, f"{name}={value!r} must be {meaning}", param=name)
        return value

"""Bodies of requests: JSON objects whose fields are decoded when they are taken, with their types.

A field stays JSON text until then, so that a large body of wrong values costs nothing.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from specjax.engine.requests import refuse_length
from specjax.server.errors import ApiError

T = TypeVar("T")
# A value of any type: commas and brackets of a long one, and nesting. 2**19 objects take 120 MB.
LONG_VALUE, MAX_PARTS, MAX_DEPTH = 2**20, 2**19, 64
QUOTED_BYTES = 80
MAX_FIELDS = 256  # of one object, known and unknown
INPUTS = "a text, a list of token ids, or a list of either"
_NULL = Raw(b"null")
_INPUTS = re.compile(rb'\s*(\[?)\s*(["\[]?)')


class _Name(str):
    """The name of a field."""


_OBJECT = dict[_Name, Raw]


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """The fields of a JSON object as JSON text; ApiError if it is not an object of valid JSON."""
    try:
        return _decode(data, _OBJECT)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ApiError(400, f"the body must be a JSON object: {error}") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


class Body:
    """Fields of a JSON object, each taken once; null counts as absent.

    Every method raises an ApiError of status 400 that names the field if its value does not fit.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        absent = (None, _NULL)
        self._left = {name: value for name, value in values.items() if value not in absent}
        self.known: set[str] = set()  # names that somebody has asked for

    def __contains__(self, name: str) -> bool:
        self.known.add(name)
        return name in self._left

    def _pop(self, name: str, default: Any = None) -> Any:
        self.known.add(name)
        return self._left.pop(name, default)

    @property
    def left(self) -> tuple[str, ...]:
        """Names of fields that nobody has taken."""
        return tuple(self._left)

    def take(self, name: str, default: Any = None) -> Any:
        """A value of any type, bounded in size and depth."""
        value = self._pop(name, default)
        if not isinstance(value, Raw):
            return value
        _check_parts(name, value, MAX_PARTS, b",", b"[", b"{")
        value = self._decode(name, value, Any, "a JSON value")
        _check_depth(name, value, MAX_DEPTH)
        return value

    def put(self, name: str, value: Any) -> None:
        """Add a field that came under another name."""
        self._left[name] = value

    def peek(self, name: str) -> Any:
        """A value that stays to be taken."""
        value = self.take(name)
        if value is not None:
            self.put(name, value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return self._typed(name, default, bool, "true or false")

    def text(self, name: str, default: str | None = None) -> Any:
        return self._typed(name, default, str, "a string")

    def fields(self, name: str) -> "Body":
        """A nested object, empty if it is absent."""
        return Body(self._typed(name, {}, _OBJECT, f"an object of at most {MAX_FIELDS} fields"))

    def integer(self, name: str, default: Any = None, *, at_least: int, at_most: int) -> Any:
        limits = f"an integer from {at_least} to {at_most}"
        value = self._typed(name, default, int, limits)
        if value is not default and not at_least <= value <= at_most:
            raise ApiError(400, f"{name}={value} must be {limits}", param=name)
        return value

    def inputs(self, name: str, *, max_ids: int, max_rows: int) -> Any:
        """A text, a list of token ids, or a list of either; ``None`` if it is absent.

        Args:
            name: the field.
            max_ids: token ids of one input. ValueError for more, before they are decoded.
            max_rows: inputs in a list of lists.
        """
        value = self._pop(name)
        if not isinstance(value, Raw):
            return value
        found = _INPUTS.match(value)
        assert found is not None  # it matches any text
        if not found[1]:
            return self._decode(name, value, str, INPUTS)
        if found[2] == b'"':
            _check_parts(name, value, MAX_PARTS, b'",')
            return self._decode(name, value, list[str], INPUTS)
        if found[2] != b"[":
            return self._ids(name, value, max_ids)
        _check_parts(name, value, max_rows + 1, b"[")
        return [
            self._ids(name, row, max_ids) for row in self._decode(name, value, list[Raw], INPUTS)
        ]

    def _ids(self, name: str, value: Raw, max_ids: int) -> Any:
        # An id and its comma take two bytes.
        if len(value) // 2 > max_ids and (count := bytes(value).count(b",") + 1) > max_ids:
            refuse_length(count, max_ids)
        return self._decode(name, value, list[int], INPUTS)

    def _typed(self, name: str, default: Any, kind: Any, meaning: str) -> Any:
        return self._decode(name, self._pop(name, default), kind, meaning)

    def _decode(self, name: str, value: Any, kind: Any, meaning: str) -> Any:
        if not isinstance(value, Raw):
            return value
        try:
            return _decode(value, kind)
        except (ValueError, RecursionError):
            raise ApiError(400, f"{name}={quote(value)} must be {meaning}", param=name) from None


def _decode(data: Any, kind: Any) -> Any:
    names = itertools.count()

    def take_name(_: type, name: str) -> _Name:
        if next(names) == MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} fields")
        return _Name(name)

    return msgspec.json.decode(data, type=kind, dec_hook=take_name)


def quote(value: Raw) -> str:
    """JSON text for an error message, cut to ``QUOTED_BYTES``."""
    text = bytes(memoryview(value)[:QUOTED_BYTES]).decode(errors="replace")
    return text if len(value) <= QUOTED_BYTES else text + "..."


def _check_parts(name: str, value: Raw, limit: int, *marks: bytes) -> None:
    """Refuse a long value of too many parts before it is decoded, by the marks of a part."""
    if len(value) > LONG_VALUE and sum(map(bytes(value).count, marks)) > limit:
        raise ApiError(400, f"{name} has more than {limit} values", param=name)


def _check_depth(name: str, value: Any, left: int) -> None:
    if not isinstance(value, dict | list):
        return
    if not left:
        raise ApiError(400, f"{name} is nested deeper than {MAX_DEPTH} levels", param=name)
    for item in value.values() if isinstance(value, dict) else value:
        _check_depth(name, item, left - 1)

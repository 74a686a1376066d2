"""Reading of JSON from files, and of typed values from it, with errors that name file and key."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from specjax.checks import is_integer, is_number

T = TypeVar("T")


def read_text(path: Path) -> str:
    """Text of a UTF-8 file; a ValueError names one that is missing or cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # no UTF-8, a directory, a null byte in the name
        raise ValueError(f"{str(path)!r} is no file of text: {error}") from error


def read_json_lines(path: Path, read: Callable[[Any], T]) -> list[T]:
    """What ``read`` makes of the value of each line; ValueError names the line that is wrong."""
    values = []
    # JSON strings may hold U+2028 and others at which splitlines() splits
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                values.append(read(json.loads(line)))
            except (ValueError, RecursionError) as error:
                where = f"{path.name}, line {number}"
                raise ValueError(f"{where}: {error}") from error
    return values


def read_json(path: Path, *, is_strict: bool = False) -> dict[str, Any]:
    """A JSON object from a file; ``is_strict`` refuses a key that is given twice.

    ValueError if the file is missing, is not JSON or is not an object.
    """
    text = read_text(path)
    try:
        value = json.loads(text, object_pairs_hook=_unique if is_strict else None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the key {name!r} is given twice")
    return dict(pairs)


class Fields:
    """Typed values of a JSON object or of other metadata; null is as good as absent.

    ``where`` is the file and the place in it. Every method raises a ValueError that names place,
    key and value for one of another type, and for an absent one unless a ``default`` is given.
    """

    def __init__(self, values: Mapping[str, Any], where: object) -> None:
        self.values, self.where = values, where

    @classmethod
    def read(cls, path: Path) -> "Fields":
        return cls(read_json(path), path)

    @classmethod
    def read_if_there(cls, path: Path) -> "Fields":
        """The values of a JSON file, none if there is no such file."""
        return cls.read(path) if path.is_file() else cls({}, path)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: Any = ..., *, at_least: int = 0) -> Any:
        value = self.get(key, default)
        if value is not default and not (is_integer(value) and at_least <= value < 2**31):
            raise self.wrong(key, f"must be an integer from {at_least} to {2**31 - 1}")
        return value

    def number(self, key: str, default: Any = ...) -> Any:
        value = self.get(key, default)
        if value is not default and not is_number(value):
            raise self.wrong(key, "must be a finite number")
        return value if value is default else float(value)

    def flag(self, key: str, default: Any = False) -> Any:
        return self._typed(key, default, bool, "true or false")

    def text(self, key: str, default: Any = ...) -> Any:
        return self._typed(key, default, str, "a string")

    def items(self, key: str, kind: type, default: Any = ...) -> Any:
        """A list of values of one type; a bool is no integer."""
        value = self._typed(key, default, list, "a list")
        if value is not default and not all(type(item) is kind for item in value):
            names = {int: "integers", str: "strings", dict: "objects"}
            raise self.wrong(key, f"must be a list of {names[kind]}")
        return value

    def ids(self, key: str) -> list[int]:
        """Token ids: one, a list of them or none."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        return [Fields({key: i}, self.where).integer(key) for i in ids]

    def fields(self, key: str) -> "Fields":
        """A nested object, empty if it is absent."""
        value = self._typed(key, {}, Mapping, "an object")
        return Fields(value, f"{self.where}: {key}")

    def get(self, key: str, default: Any = ...) -> Any:
        value = self.values.get(key)
        if value is None and default is ...:
            raise ValueError(f"{self.where} has no {key}")
        return default if value is None else value

    def build(self, kind: Callable[..., T], values: Mapping[str, Any]) -> T:
        """``kind(**values)``, whose complaints then name this place."""
        try:
            return kind(**values)
        except (TypeError, ValueError) as error:  # a TypeError: a required value is absent
            raise ValueError(f"{self.where}: {error}") from None

    def wrong(self, key: str, demand: str) -> ValueError:
        """The error for a value that is not as demanded."""
        return ValueError(f"{self.where}: {key}={self.values.get(key)!r:.300} {demand}")

    def _typed(self, key: str, default: Any, kind: type, meaning: str) -> Any:
        value = self.get(key, default)
        if value is not default and not isinstance(value, kind):
            raise self.wrong(key, f"must be {meaning}")
        return value

"""Read JSON files and typed values from them; errors name the file and the key."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from specjax.checks import check_regular, convert, short

T = TypeVar("T")


def read_text(path: Path) -> str:
    """Read a regular UTF-8 file; raises ValueError if it is missing or cannot be read."""
    check_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # not UTF-8, a directory, a null byte in the name
        raise ValueError(f"{str(path)!r} cannot be read as UTF-8 text: {error}") from error


def read_json_lines(path: Path, read: Callable[[Any], T]) -> list[T]:
    """Apply ``read`` to the JSON value of each line; a ValueError names the wrong line."""
    values = []
    # splitlines() would also split at U+2028 and others, which JSON strings may contain
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                values.append(read(json.loads(line)))
            except (ValueError, RecursionError) as error:
                where = f"{path.name}, line {number}"
                raise ValueError(f"{where}: {error}") from error
    return values


def read_json(path: Path, *, is_strict: bool = False) -> dict[str, Any]:
    """Read a JSON object from a file or raise ValueError; ``is_strict`` refuses repeated keys."""
    return parse_json(read_text(path), path, is_strict=is_strict)


def read_object(source: Any, label: str) -> tuple[Mapping[str, Any], Path | None]:
    """Read an option that is a mapping, a string with a JSON object, or the path of a JSON file.

    Return the object, and the path if there is one. Repeated keys are refused. Raises ValueError,
    which names the file, or begins with ``label`` and the value.
    """
    if isinstance(source, Mapping):
        return source, None
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"{label}{source!r} must be a path or a mapping")
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return parse_json(source, f"{label}{short(source)}", is_strict=True), None
    return read_json(Path(source), is_strict=True), Path(source)


def parse_json(text: str, where: object, *, is_strict: bool = False) -> dict[str, Any]:
    """Do the same as :func:`read_json` for a text; errors name ``where`` it is from."""
    try:
        value = json.loads(text, object_pairs_hook=_unique if is_strict else None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the key {name!r} is given twice")
    return dict(pairs)


# types of values in files; sizes fit an int32
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveSize = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Flag = Annotated[bool, Meta(description="true or false")]


class Fields:
    """Typed values of a JSON object; null counts as absent. Every error names ``where``."""

    def __init__(self, values: Mapping[str, Any], where: object) -> None:
        self.values, self.where = values, where

    @classmethod
    def read(cls, path: Path) -> "Fields":
        return cls(read_json(path), path)

    @classmethod
    def read_if_there(cls, path: Path) -> "Fields":
        """Read a JSON file; return no values if the file does not exist."""
        return cls.read(path) if os.path.lexists(path) else cls({}, path)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, kind: Any, default: Any = ...) -> Any:
        """Return the converted value or the default; raise ValueError if it is wrong or missing."""
        value = self.values.get(key)
        if value is None and default is ...:
            raise ValueError(f"{self.where} has no {key}")
        if value is None:
            return default
        try:
            return convert(key, value, kind)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None

    def ids(self, key: str) -> list[int]:
        """Return the token ids of a value that is one id, a list of ids or absent."""
        value = self.get(key, Any, [])
        ids = value if isinstance(value, list) else [value]
        return [Fields({key: i}, self.where).get(key, Size) for i in ids]

    def fields(self, key: str) -> "Fields":
        """Return a nested object, which is empty if it is absent."""
        return Fields(self.get(key, dict[str, Any], {}), f"{self.where}: {key}")

    def build(self, kind: Callable[..., T], values: Mapping[str, Any]) -> T:
        """Return ``kind(**values)``; errors name the file."""
        try:
            return kind(**values)
        except (TypeError, ValueError) as error:  # a TypeError: a required value is absent
            raise ValueError(f"{self.where}: {error}") from None

    def wrong(self, key: str, demand: str) -> ValueError:
        """Make the error for an invalid value."""
        return ValueError(f"{self.where}: {key}={short(self.values.get(key))} {demand}")

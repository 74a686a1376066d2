"""Reading of JSON objects from files, with errors that name the file."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path, *, is_strict: bool = False) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        path: the file.
        is_strict: refuse a key that is given twice, of which the last one counts otherwise.

    Raises:
        ValueError: if the file is missing, is not JSON or is not an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    except ValueError as error:  # a null byte in the name
        raise ValueError(f"{str(path)!r} is no file: {error}") from error
    try:
        value = json.loads(text, object_pairs_hook=_unique if is_strict else None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return value

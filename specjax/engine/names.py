"""Options, commands and routes of other engines, and what replaces them, from ``names.toml``.

The command line accepts names that mean the same, ignores options without effect with a note, and
refuses the others with the reason. ``EngineArgs`` refuses them all, because its names are in code.
"""

import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from specjax.checks import short
from specjax.json_file import parse_json
from specjax.speculative.catalog import check_name


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Turn a table of texts -> names into one of names -> text."""
    return {name: text for text, names in table.items() for name in names.split()}


_TABLES = tomllib.loads(files(__package__).joinpath("names.toml").read_text(encoding="utf-8"))
ALIASES = _by_name(_TABLES["aliases"])
SWITCHES: dict[str, tuple[str, bool]] = {x: (*pair,) for x, pair in _TABLES["switches"].items()}
VALUES: dict[str, dict[str, str]] = _TABLES["values"]
NOTES = _by_name(_TABLES["notes"])
SPECULATIVE_CONFIG: dict[str, str] = _TABLES["speculative_config"]
# a name that ends with = takes a value
WITHOUT_EFFECT = _by_name(_TABLES["without_effect"])
_REFUSED = [(*x.partition("=")[::2], why) for x, why in _by_name(_TABLES["refused"]).items()]
REFUSED = {name: why for name, _, why in _REFUSED}
NEUTRAL = {name: values.split(",") for name, values, _ in _REFUSED if values}
COMMANDS: dict[str, str] = _TABLES["commands"]
BENCHMARKS: dict[str, str] = _TABLES["benchmarks"]
ROUTES = _by_name(_TABLES["routes"])


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def explain(reason: str, *, is_command_line: bool) -> str:
    """Write the options in a reason as on the command line or as in code."""
    return re.sub(r"\{(\w+)\}", lambda x: flag(x[1]) if is_command_line else x[1], reason)


def answer(name: str) -> str | None:
    """Return the error message for an argument of ``EngineArgs`` in the tables, else ``None``."""
    if here := ALIASES.get(name):
        return f"{name}: this option is called {here} here; pass {here}"
    if name in SWITCHES:
        here, value = SWITCHES[name]
        return f"{name}: pass {here}={value}"
    reason = WITHOUT_EFFECT.get(name) or WITHOUT_EFFECT.get(f"{name}=") or REFUSED.get(name)
    return reason and f"{name} is not supported: {explain(reason, is_command_line=False)}"


def read_speculative_config(text: str) -> dict[str, Any]:
    """Return the keys of vLLM's ``speculative_config`` that have a counterpart, and their values.

    Raises ValueError for other keys, an unknown method, and a text that is not a JSON object.
    """
    try:
        config = parse_json(text, short(text), is_strict=True)
    except ValueError as error:
        raise ValueError(f'{error}; pass a JSON object with a "method"') from None
    if not isinstance(config.get("method"), str):
        raise ValueError('it must be a JSON object with a "method"')
    try:
        check_name(config["method"])
    except ValueError as error:
        raise ValueError(f"method: {error}") from None
    for key, value in config.items():
        if key not in SPECULATIVE_CONFIG:
            raise ValueError(
                f"{key}={value!r} has no counterpart here; keys are {', '.join(SPECULATIVE_CONFIG)}"
            )
    return config

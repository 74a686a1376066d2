"""An argument parser that answers options of vLLM and SGLang, as ``specjax.engine.names`` says."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from specjax.engine.names import (
    ALIASES,
    NEUTRAL,
    NOTES,
    REFUSED,
    SPECULATIVE_CONFIG,
    SWITCHES,
    VALUES,
    WITHOUT_EFFECT,
    explain,
    flag,
    read_speculative_config,
)

LIKENESS = 0.8  # minimum similarity (0 to 1) that makes an unknown option a misspelling


class Parser(argparse.ArgumentParser):
    """Reports unknown options with the usage of the command; ``_`` in options counts as ``-``.

    With ``fromfile_prefix_chars``, a line of a file is an option. Empty lines and lines that start
    with ``#`` are ignored.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)  # words after -- are not options
        words[:end] = map(self._with_dashes, words[:end])
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            names = (word.partition("=")[0] for word in unknown if word.startswith("--"))
            dashed = (name.replace("_", "-") for name in names)
            close = (get_close_matches(x, self._accepted(), 1, LIKENESS) for x in dashed)
            matches = ", ".join(name for match in close for name in match)
            hint = matches and f"; did you mean {matches}?"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def convert_arg_line_to_args(self, line: str) -> list[str]:
        has_option = line.strip() and not line.startswith("#")
        return [self._with_dashes(line)] if has_option else []

    def _accepted(self) -> list[str]:
        """Return the options that set a value here, also under other names."""
        return [
            name
            for name, action in self._option_string_actions.items()
            if action.help != argparse.SUPPRESS
            or isinstance(action, _OtherName | _SpeculativeConfig)
        ]

    def _with_dashes(self, word: str) -> str:
        """Return an option of this parser as its name is declared; other words may be values."""
        name, equals, value = word.partition("=")
        option = name.replace("_", "-")
        is_option = word.startswith("--") and option in self._option_string_actions
        return option + equals + value if is_option else word


class _OtherName(argparse.Action):
    """Sets an option under another name."""

    def __call__(self, _: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if self.nargs == "+":
            values = [number for numbers in values for number in numbers]
        value = values if self.const is None else self.const
        _set(namespace, self.dest, value, option_string)


class _WithoutEffect(argparse.Action):
    def __call__(self, parser: Any, _: Any, values: Any, option_string: Any = None) -> None:
        reason = explain(str(self.const), is_command_line=True)
        print(f"{parser.prog}: {option_string} has no effect: {reason}", file=sys.stderr)


class _Refused(argparse.Action):
    def __call__(self, _: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        neutral = NEUTRAL.get(str(self.metavar), [])
        if values not in neutral:
            has_value = neutral and values != self.const
            name = f"{option_string} {values}" if has_value else option_string
            reason = explain(str(self.const), is_command_line=True)
            raise argparse.ArgumentError(None, f"{name} is not supported: {reason}")


class _SpeculativeConfig(argparse.Action):
    def __call__(self, _: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            config = read_speculative_config(values)
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        for key, value in config.items():
            _set(namespace, SPECULATIVE_CONFIG[key], value, f"{option_string}: {key}")


def _set(namespace: Any, option: str, value: Any, typed_name: Any) -> None:
    """Set an option; ``typed_names`` of the namespace then has the name and the value."""
    setattr(namespace, option, value)
    typed_names = getattr(namespace, "typed_names", {})
    namespace.typed_names = typed_names | {option: (typed_name, value)}


def typed_name(namespace: argparse.Namespace, error: Exception) -> str | None:
    """Return another name that gave the option its value with which an error's text begins."""
    subject = re.match(r"\w+(?=[=[])", str(error))
    option = subject[0] if subject else ""
    name, value = getattr(namespace, "typed_names", {}).get(option, (None, None))
    return name if value == getattr(namespace, option, None) else None


def add_aliases(group: argparse._ActionsContainer, here: str, options: dict[str, Any]) -> None:
    """Add the other names of the option ``here``, which has the arguments ``options``."""
    hidden: dict[str, Any] = {"dest": here, "action": _OtherName, "help": argparse.SUPPRESS}
    for name in (name for name, target in ALIASES.items() if target == here):
        nargs = "+" if options.get("metavar") == "N,N" else None
        group.add_argument(*_flags(name), **options | hidden, nargs=nargs)
    for name, (target, value) in SWITCHES.items():
        if target == here:
            group.add_argument(*_flags(name), **hidden, nargs=0, const=value)


def add_answers(parser: argparse.ArgumentParser) -> None:
    """Add the options without effect and the refused ones that the parser does not have."""

    def add(name: str, action: Any, nargs: Any, reason: str) -> None:
        with suppress(argparse.ArgumentError):  # the command has such an option
            parser.add_argument(
                *_flags(name),
                action=action,
                nargs=nargs,
                const=reason,
                dest=argparse.SUPPRESS,
                metavar=name,
                help=argparse.SUPPRESS,
            )

    add("speculative_config", _SpeculativeConfig, None, "")
    for name, reason in WITHOUT_EFFECT.items():
        add(name.rstrip("="), _WithoutEffect, None if name.endswith("=") else 0, reason)
    for name, reason in REFUSED.items():
        add(name, _Refused, "?", reason)


def translated(option: str, convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``convert`` for values of an option, after values of other engines are replaced."""

    def read(text: str) -> Any:
        value = VALUES[option].get(text, text)
        if value != text and text in NOTES:
            print(f"specjax: {flag(option)} {text}: {NOTES[text]}", file=sys.stderr)
        return convert(value)

    return read if option in VALUES else convert


def _flags(name: str) -> list[str]:
    """The option of a name; vLLM's short options have one dash."""
    return [flag(name), f"-{name}"] if len(name) <= 2 else [flag(name)]

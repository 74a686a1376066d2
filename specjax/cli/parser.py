"""An argument parser that answers options of vLLM and SGLang, as ``specjax.engine.names`` says."""

import argparse
import json
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
    SWITCHES,
    VALUES,
    WITHOUT_EFFECT,
    explain,
    flag,
    speculative_options,
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
            words = (name.replace("_", "-") for name in names)
            close = (get_close_matches(x, self._option_string_actions, 1, LIKENESS) for x in words)
            matches = ", ".join(name for match in close for name in match)
            hint = matches and f"; did you mean {matches}?"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def convert_arg_line_to_args(self, line: str) -> list[str]:
        has_option = line.strip() and not line.startswith("#")
        return [self._with_dashes(line)] if has_option else []

    def _with_dashes(self, word: str) -> str:
        """Return an option of this parser as its name is declared; other words may be values."""
        name, equals, value = word.partition("=")
        option = name.replace("_", "-")
        is_option = word.startswith("--") and option in self._option_string_actions
        return option + equals + value if is_option else word


class _OtherName(argparse.Action):
    """Sets an option; ``typed_names`` of the namespace then has the name for errors."""

    def __call__(self, _: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if self.nargs == "+":
            values = [number for numbers in values for number in numbers]
        setattr(namespace, self.dest, values if self.const is None else self.const)
        typed_names = getattr(namespace, "typed_names", {})
        namespace.typed_names = typed_names | {self.dest: option_string}


class _WithoutEffect(argparse.Action):
    def __call__(self, parser: Any, _: Any, values: Any, option_string: Any = None) -> None:
        reason = explain(str(self.const), is_command_line=True)
        print(f"{parser.prog}: {option_string} has no effect: {reason}", file=sys.stderr)


class _Refused(argparse.Action):
    def __call__(self, _: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        neutral = NEUTRAL.get(str(self.metavar), [])
        if values not in neutral:
            name = f"{option_string} {values}" if neutral and values else option_string
            reason = explain(str(self.const), is_command_line=True)
            raise argparse.ArgumentError(None, f"{name} is not supported: {reason}")


class _SpeculativeConfig(argparse.Action):
    def __call__(self, _: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            options = speculative_options(json.loads(values))
        except (ValueError, RecursionError) as error:
            raise argparse.ArgumentError(self, str(error)) from None
        vars(namespace).update(options)


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

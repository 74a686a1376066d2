"""Compiles grammars of requests: schemas, regular expressions, grammars and tags, to matchers.

The library is llguidance. Compilers run in processes of their own, see ``grammar_worker``.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import llguidance

from specjax.checks import short
from specjax.sampling.boundary import Boundary
from specjax.sampling.grammar import LAYOUT, OPTIONS, AllowedTokens, Constraint

# The time to compile grows with this number: 10,007 takes 0.02 s, 99,999,989 more than 30 s.
MAX_MULTIPLE = 10_000
JOINING = {"allOf", "anyOf", "oneOf", "$ref"}  # keywords that may join values of multipleOf
# The library's recursion has no end for numbers that round to it.
MIN_INTEGER = -(2**63)
# The library's limits on the work at the start and for one mask (20 ms or less for 5,000 random
# grammars; 0.7 s for one made for it) and on memory (about 50 MB). An object with 500 optional keys
# needs 2,000 items.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 8_000,
    "max_lexer_states": 50_000,
}
_DECODER = json.JSONDecoder()
# Tokens of Lark's notation that may contain any character, and marks before JSON. A string, a
# regular expression or a special token without its end is an error of the library.
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|(?:#|//)[^\n]*|/(?:\\.|[^/\\])*+/?|<[^<>\s]*+>?'
    r"|%(json|llguidance)[ \t\r\n]*"
)
# what malformed grammars raise
FAULTS = ValueError, ArithmeticError, LookupError, TypeError, AttributeError, AssertionError


class GrammarCompiler:
    """Compiles grammars; the library's recursion needs a stack of up to 40 MB.

    Each request has matchers of its own: copies of one share a lexer and its limits, so a request
    could reach them for another.
    """

    def __init__(
        self, tokenizer: str, vocab_size: int, end_token_ids: Sequence[int], *, spaces: bool
    ) -> None:
        """``tokenizer`` is JSON of the library tokenizers.

        With ``spaces``, JSON may have white space between its tokens.
        """
        self._limits = llguidance.LLParserLimits(**LIMITS)
        ends = [token for token in end_token_ids if token < vocab_size]
        self._tokens = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends or None)
        self._num_words = -(-vocab_size // 32)
        self._json: Any = {} if spaces else {"whitespace_flexible": False}

    def compile(
        self, kind: str | None, text: str = "", boundary: Boundary | None = None
    ) -> Constraint:
        """Make the constraint of a new request; without a ``kind``, only its reasoning is limited.

        ``kind`` is the name of the sampling parameter, and ``boundary`` as in :class:`Constraint`.
        Raises ValueError with the reason.
        """
        if kind is None:
            return Constraint(lambda: None, self._num_words, boundary)
        if kind == "allowed_token_ids":
            matcher = AllowedTokens(json.loads(text), self._num_words)
            return Constraint(lambda: matcher, self._num_words, boundary)
        try:
            grammar = self._grammar(kind, text)
            make = partial(
                llguidance.LLMatcher, self._tokens, grammar, log_level=0, limits=self._limits
            )
            constraint = Constraint(make, self._num_words, boundary)
            error = constraint.check()
        except FAULTS as fault:
            error = str(fault) or repr(fault)
        except RecursionError:
            error = "it is nested too deeply"
        if error:
            raise ValueError(f"{kind}={short(text)}: {error.strip()}")
        return constraint

    def _grammar(self, kind: str, text: str) -> str:
        if kind == "structural_tag":
            return _with_options(self._structural(json.loads(text)), self._json)
        if kind == "json_schema":
            schema = _schema(json.loads(text), self._json)
            return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        if kind == "bad_words":
            codes = ("".join(rf"\x{{{ord(char):x}}}" for char in word) for word in json.loads(text))
            unwanted = f"/(?s:.*({'|'.join(codes)}).*)/"
            kind, text = "ebnf", f"start: TEXT\nTEXT: /(?s:.*)/ & ~{unwanted}"
        formats: Any = kind
        grammar = llguidance.grammar_from(formats, text)
        return _with_options(grammar, self._json) if kind == "ebnf" else grammar

    def _structural(self, value: Any) -> str:
        """The grammar of SGLang's structural tags: free text, with schemas between tags.

        ``value`` has ``structures``, each with ``begin``, ``schema`` and ``end``, and ``triggers``,
        of which one starts each ``begin``.
        """
        tags, is_special = [], False
        for tag in value["structures"]:
            begin = tag["begin"]
            trigger = next((start for start in value["triggers"] if begin.startswith(start)), None)
            if trigger is None:
                raise ValueError(f"no trigger in {value['triggers']} starts begin={begin!r}")
            ids = self._tokens.tokenize_str(trigger, parse_special=True)
            if len(ids) == 1 and self._tokens.is_special_token(ids[0]):
                # the library knows special tokens by angle brackets
                is_special, suffix, trigger = True, begin[len(trigger) :], f"<[{ids[0]}]>"
                begin = trigger + suffix
            schema = _schema(True if tag.get("schema") is None else tag["schema"], self._json)
            tags.append(
                llguidance.StructTag(trigger=trigger, begin=begin, grammar=schema, end=tag["end"])
            )
        grammar = str(llguidance.StructTag.to_grammar(tags, assume_special=is_special))
        for end in {tag.end for tag in tags if tag.end}:
            grammar = grammar.replace(f" {json.dumps(end)}\n", f" {self._as_rule(end)}\n")
        return grammar

    def _as_rule(self, text: str) -> str:
        """Write a text in a Lark grammar, with the special tokens in it, which no text matches."""
        ids = self._tokens.tokenize_str(text, parse_special=True)
        marks = {self._tokens.decode_str([i]): i for i in ids if self._tokens.is_special_token(i)}
        pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        return " ".join(f"<[{marks[x]}]>" if x in marks else json.dumps(x) for x in pieces if x)


def _with_options(grammar: str, options: Mapping[str, Any]) -> str:
    """Check a Lark grammar, and give its schemas the ``options``."""
    pieces, at = list[str](), 0
    while mark := _LARK.search(grammar, at):
        pieces.append(grammar[at : mark.end()])
        at = mark.end()
        if name := mark[1]:
            try:
                value, at = _DECODER.raw_decode(grammar, at)
            except ValueError as error:
                raise ValueError(f"%{name} needs a JSON value: {error}") from error
            if name == "llguidance" and value != {}:
                raise ValueError(f"%llguidance {short(value)} must be empty: %llguidance {{}}")
            pieces.append(json.dumps(_schema(value, options) if name == "json" else value))
    return "".join([*pieces, grammar[at:]])


def _schema(schema: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check a schema, and replace the library's options in it."""
    if schema is False:
        raise ValueError("the schema false allows no text")
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise ValueError(f"schema={short(schema)} must be an object or true")
    _check_numbers(schema)
    is_spaced = not options and schema.get(OPTIONS) == LAYOUT
    return schema | {OPTIONS: LAYOUT if is_spaced else options}


def _check_numbers(schema: Any) -> None:
    """Refuse large values of ``multipleOf``, joined ones too, and low numbers."""
    factors, is_joined = [1], False

    def visit(value: Any) -> None:
        nonlocal is_joined
        if isinstance(value, dict):
            is_joined |= not value.keys().isdisjoint(JOINING)
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | float) and math.isfinite(multiple):
                factors.append(abs(Fraction(str(multiple)).numerator))
            value = list(value.values())
        elif isinstance(value, int | float) and value <= MIN_INTEGER + 512:
            message = f"{value} is not supported; numbers must be above {MIN_INTEGER} + 512"
            raise ValueError(message)
        for item in value if isinstance(value, list) else ():
            visit(item)

    visit(schema)
    if (most := math.lcm(*factors) if is_joined else max(factors)) > MAX_MULTIPLE:
        raise ValueError(f"multipleOf of {most} is not supported; the limit is {MAX_MULTIPLE}")

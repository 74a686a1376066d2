"""Grammars that the text of a request must follow, through the library llguidance.

The mask of a text is the set of tokens that may follow it, as bits i32 ``[V / 32]``. It depends on
the text only. So a target that draws its token at every node of a drafted tree with the node's own
mask gives the text of plain decoding with masks. Drafts that a grammar forbids are never drawn, and
so never accepted. Axes: T tree nodes, S steps, V vocabulary.
"""

import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from specjax.checks import ParameterError, short

try:
    import llguidance
except ImportError:  # EngineArgs refuses grammars then
    llguidance = None  # type: ignore[assignment]

MAX_CHARACTERS = 2**16
# The time to compile grows with this number: 10,007 takes 0.02 s, 99,999,989 more than 30 s.
MAX_MULTIPLE = 10_000
JOINING = {"allOf", "anyOf", "oneOf", "$ref"}  # keywords that may join values of multipleOf
# The library's recursion has no end for numbers that round to it.
MIN_INTEGER = -(2**63)
# The library's recursion ends the process if the stack is too small for it: a row of rules that
# refer to each other needs up to 40 MB, and other threads have 8 MB.
STACK_BYTES = 2**28
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
OPTIONS = "x-guidance"  # the library's options, at the root of a schema
# The options of tool arguments: the white space of json.dumps, which models have learned. They are
# the only ones that a schema may have.
LAYOUT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
# Tokens of Lark's notation that may contain any character, and marks before JSON. A string, a
# regular expression or a special token without its end is an error of the library.
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|(?:#|//)[^\n]*|/(?:\\.|[^/\\])*+/?|<[^<>\s]*+>?'
    r"|%(json|llguidance)[ \t\r\n]*"
)
NO_TOKEN = "no token may follow"
# what malformed grammars raise
FAULTS = ValueError, ArithmeticError, LookupError, TypeError, AttributeError, AssertionError


class Thinking(NamedTuple):
    """Reasoning before the text that a grammar limits."""

    end: int  # the token that ends it
    start: int | None = None  # the first token, if the completion must have it to reason
    budget: int | None = None  # maximum number of tokens between them
    spaces: frozenset[int] = frozenset()  # tokens that may precede the first one


class Constraint:
    """The grammar of one request, after the tokens of its completion so far."""

    def __init__(
        self,
        make: Callable[[], Any],
        num_words: int,
        thinking: Thinking | None = None,
        end: Any = None,
    ) -> None:
        """The grammar of the matcher of ``make``, if any, begins at once or after ``thinking``.

        ``end`` is a matcher of the token that ends it, for a budget.
        """
        self._make, self._num_words, self._end = make, num_words, end
        self._matcher = make()
        self._text: list[int] = []  # the tokens of the matcher
        self._dead: dict[tuple[int, ...], str] = {}  # paths of drafts that no token may follow
        self._after, self._start, budget, self._spaces = thinking or Thinking(-1)
        self._is_thinking = thinking is not None
        # tokens until the end is forced, and whether the first one has not come yet
        self._left = (math.inf if budget is None else budget, self._start is not None)
        self.error = ""  # why the text cannot be continued

    def check(self) -> str:
        """The error of a new grammar, if it has one."""
        if error := self._matcher.get_error():
            return str(error)
        mask = np.full((1, self._num_words), -1, np.int32)
        return "it allows no text" if _compute({0: self._matcher.deep_copy()}, mask, None) else ""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow the text any more."""
        matcher = self._matcher
        return matcher is not None and matcher.is_stopped() and matcher.is_accepting()

    def advance(self, tokens: Sequence[int]) -> int:
        """Add tokens until the grammar is complete or forbids one; return how many were added."""
        for i, token in enumerate(tokens):
            if self._is_thinking:
                self._left = self._left_after(self._left, token)
                self._is_thinking = token != self._after
                continue
            if self._matcher is None:
                continue
            if self.is_complete:
                return i
            if not self._matcher.try_consume_tokens([token]):
                self.renew()
                if not self._matcher.try_consume_tokens([token]):
                    self.error = _reason(self._matcher)
                    return i
            self._text.append(token)
            if reason := self._dead.get(tuple(tokens[: i + 1])):
                self.error = reason
                return i + 1
        return len(tokens)

    def _left_after(self, left: tuple[float, bool], token: int) -> tuple[float, bool]:
        count, is_before = left
        if not is_before:
            return count - 1, False
        if token in self._spaces:
            return left
        return count if token == self._start else math.inf, False  # or the model does not reason

    def renew(self) -> None:
        """Make the matcher again; the copies for drafts have used up limits of the old one."""
        self._matcher = self._make()
        self._matcher.try_consume_tokens(self._text)

    def take_dead(
        self, dead: Mapping[int, str], tokens: Sequence[int], parents: Sequence[int]
    ) -> None:
        """Take the nodes of a tree that no token may follow; the text ends when it gets there."""
        self.error = dead.get(0, self.error)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            paths.append((*paths[parent], token))
        self._dead = {paths[node]: reason for node, reason in dead.items() if node}

    def mask(self) -> np.ndarray:
        """The mask i32 ``[V / 32]`` of the text."""
        mask = np.full((1, self._num_words), -1, np.int32)
        fill_masks({0: (self, [0], [-1])}, mask)
        return np.zeros_like(mask[0]) if self.error else mask[0]

    def walk(self, tokens: Sequence[int], parents: Sequence[int]) -> dict[int, Any]:
        """The matchers of the nodes of a tree that the grammar limits, and allows.

        Args:
            tokens: of the nodes, the root first; it is the last token of the text.
            parents: index of each node's parent; parents come before children.
        """
        # copies, because a limit of the library leaves a matcher in an error state, and because
        # some grammars support no rollback
        left: dict[int, tuple[float, bool]] = {}  # of the nodes within reasoning
        found: dict[int, Any] = {}

        def visit(node: int, matcher: Any) -> None:
            if matcher is not None:
                found[node] = matcher.deep_copy()

        if self._is_thinking:
            left[0] = self._left
        else:
            visit(0, self._matcher)
        for node in range(len(tokens)):
            parent, token = parents[node], tokens[node]
            if parent in left and node:
                if token == self._after:
                    visit(node, self._matcher)
                elif left[parent] != (0, False):
                    left[node] = self._left_after(left[parent], token)
            if left.get(node) == (0, False):
                visit(node, self._end)
            elif parent in found and parent not in left and node:
                branch = found[parent].deep_copy()
                if branch.try_consume_tokens([token]):
                    found[node] = branch
        return found


# a constraint, and the tokens and parents of a tree, as for Constraint.walk
Tree = tuple[Constraint, Sequence[int], Sequence[int]]


def fill_masks(
    trees: Mapping[int, Tree], masks: np.ndarray, forced: np.ndarray | None = None
) -> list[int]:
    """Write the masks of nodes, and the tokens that grammars force after them.

    Args:
        trees: by the row of their root; the rows of their other nodes follow.
        masks: i32 ``[N, V / 32]`` of ones, which stay for nodes that no grammar limits.
        forced: i32 ``[N, 1 + S]`` of -1.

    Returns:
        The rows that were written. A constraint whose root no token may follow has an error.
    """

    def walk(root: int, *, again: bool = False) -> dict[int, Any]:
        constraint, *nodes = trees[root]
        try:
            if again:
                constraint.renew()
            found = constraint.walk(*nodes)
        except Exception as error:  # it must end no other request
            constraint.error = repr(error)
            return {}
        return {root + node: matcher for node, matcher in found.items()}

    matchers = {row: one for root in trees for row, one in walk(root).items()}
    all_dead = _compute(matchers, masks, forced)
    for root, (constraint, tokens, parents) in trees.items():
        own = slice(root, root + len(tokens))
        dead = {row: all_dead[row] for row in range(own.start, own.stop) if row in all_dead}
        if any(reason != NO_TOKEN for reason in dead.values()):
            masks[own] = -1
            if forced is not None:
                forced[own] = -1
            dead = _compute(found := walk(root, again=True), masks, forced)
            matchers |= found
        constraint.take_dead({row - root: dead[row] for row in dead}, tokens, parents)
    return list(matchers)


def _compute(
    matchers: Mapping[int, Any], masks: np.ndarray, forced: np.ndarray | None
) -> dict[int, str]:
    """Fill the rows of matchers; return those that no token may follow, with reasons."""
    if not matchers:
        return {}
    _executor().unsafe_compute_mask_ptr(
        [(matcher, node) for node, matcher in matchers.items()],
        masks.ctypes.data,
        masks.shape[1] * 4,
        len(masks),
    )
    dead = {}
    for node, matcher in matchers.items():
        num_words = np.count_nonzero(masks[node])
        # where no token fits, the library stops and allows the end token, or all tokens
        if not num_words or (matcher.is_stopped() and not matcher.is_accepting()):
            dead[node] = _reason(matcher)
            masks[node] = -1
        # only a node that allows one token can force it
        elif forced is not None and num_words == 1:
            known = matcher.compute_ff_tokens()[: forced.shape[1]]
            forced[node, : len(known)] = known
    return dead


@cache
def _executor() -> Any:
    """The threads that compute masks, without Python's lock."""
    return llguidance.LLExecutor()


def _reason(matcher: Any) -> str:
    """Why no token may follow: the first line of the library's reason, if it has one."""
    lines = matcher.get_error().splitlines()
    return lines[0] if lines and not lines[0].startswith("<") else NO_TOKEN


def in_deep_stack(function: Callable[[], Any]) -> Any:
    """Call a function in a thread with a stack of STACK_BYTES."""
    with ThreadPoolExecutor(1) as pool, _stack_lock:
        old = threading.stack_size(STACK_BYTES)
        try:
            future = pool.submit(function)
        finally:
            threading.stack_size(old)
    return future.result()


_stack_lock = threading.Lock()  # of the size of new stacks


class GrammarCompiler:
    """Compiles grammars in the threads of their callers.

    Each request has a matcher of its own: copies of one share a lexer and its limits, so a request
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
        try:
            self._tokens = llguidance.LLTokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=ends or None
            )
        except ValueError as error:
            raise ValueError(
                f"grammar_backend='llguidance' refuses the tokenizer: {error}"
            ) from error
        self._num_words = -(-vocab_size // 32)
        self._json: Any = {} if spaces else {"whitespace_flexible": False}

    def budget(self, thinking: Thinking) -> Constraint:
        """Make the constraint of a request whose text has no grammar, only a budget."""
        return Constraint(lambda: None, self._num_words, thinking, self._matcher_of_end(thinking))

    def _matcher_of_end(self, thinking: Thinking | None) -> Any:
        if thinking is None or thinking.budget is None:
            return None
        grammar = llguidance.grammar_from("lark", f"start: <[{thinking.end}]>")
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0)
        if error := matcher.get_error():
            raise ValueError(f"thinking_token_budget={thinking.budget}: {error}")
        return matcher

    def compile(self, kind: str, text: str, thinking: Thinking | None = None) -> Constraint:
        """Make the constraint of a new request. Raises ParameterError with the library's reason.

        ``kind`` is the name of the sampling parameter, and ``thinking`` as in :class:`Constraint`.
        """
        if len(text) > MAX_CHARACTERS:
            message = f"{kind} has {len(text)} characters; at most {MAX_CHARACTERS} are supported"
            raise ParameterError(message, param=kind, limit=MAX_CHARACTERS)
        end = self._matcher_of_end(thinking)
        try:
            matcher = partial(llguidance.LLMatcher, log_level=0, limits=self._limits)
            grammar = in_deep_stack(partial(self._grammar, kind, text))
            make = partial(in_deep_stack, partial(matcher, self._tokens, grammar))
            made = Constraint(make, self._num_words, thinking, end)
            error = made.check()
        except FAULTS as fault:
            error = str(fault) or repr(fault)
        except RecursionError:
            error = "it is nested too deeply"
        if error:
            raise ParameterError(f"{kind}={short(text)}: {error.strip()}", param=kind)
        return made

    def _grammar(self, kind: str, text: str) -> str:
        if kind == "structural_tag":
            return _with_options(self._structural(json.loads(text)), self._json)
        if kind == "json_schema":
            schema = _schema(json.loads(text), self._json)
            return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        formats: Any = kind
        grammar = llguidance.grammar_from(formats, text)
        return _with_options(grammar, self._json) if kind == "ebnf" else grammar

    def _structural(self, value: Any) -> str:
        """The grammar of SGLang's structural tags: free text, with schemas between tags.

        ``value`` has ``structures``, each with ``begin``, ``schema`` and ``end``, and ``triggers``,
        of which one starts each ``begin``.
        """
        tags, is_special = [], False
        for one in value["structures"]:
            begin = one["begin"]
            trigger = next((start for start in value["triggers"] if begin.startswith(start)), None)
            if trigger is None:
                raise ValueError(f"no trigger in {value['triggers']} starts begin={begin!r}")
            ids = self._tokens.tokenize_str(trigger, parse_special=True)
            if len(ids) == 1 and self._tokens.is_special_token(ids[0]):
                # the library knows special tokens by angle brackets
                is_special, rest, trigger = True, begin[len(trigger) :], f"<[{ids[0]}]>"
                begin = trigger + rest
            schema = _schema(True if one.get("schema") is None else one["schema"], self._json)
            tags.append(
                llguidance.StructTag(trigger=trigger, begin=begin, grammar=schema, end=one["end"])
            )
        return str(llguidance.StructTag.to_grammar(tags, assume_special=is_special))


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
    found, is_joined = [1], False

    def visit(value: Any) -> None:
        nonlocal is_joined
        if isinstance(value, dict):
            is_joined |= not value.keys().isdisjoint(JOINING)
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | float) and math.isfinite(multiple):
                found.append(abs(Fraction(str(multiple)).numerator))
            value = list(value.values())
        elif isinstance(value, int | float) and value <= MIN_INTEGER + 512:
            message = f"{value} is not supported; numbers must be above {MIN_INTEGER} + 512"
            raise ValueError(message)
        for item in value if isinstance(value, list) else ():
            visit(item)

    visit(schema)
    if (most := math.lcm(*found) if is_joined else max(found)) > MAX_MULTIPLE:
        raise ValueError(f"multipleOf of {most} is not supported; the limit is {MAX_MULTIPLE}")

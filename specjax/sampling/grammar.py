"""Grammars that the text of a request must follow, through the library llguidance.

The mask of a text is the set of tokens that may follow it, as bits i32 ``[V / 32]``. It depends on
the text only. So a target that draws its token at every node of a drafted tree with the node's own
mask gives the text of plain decoding with masks. Drafts that a grammar forbids are never drawn, and
so never accepted. Axes: T tree nodes, S steps, V vocabulary.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.checks import ParameterError, short

try:
    import llguidance
except ImportError:  # the extra "grammar" is not installed
    llguidance = None  # type: ignore[assignment]

MAX_GRAMMARS = 256  # compiled grammars that are kept
MAX_CHARACTERS = 2**18
NO_TOKEN = "no token may follow"


class Constraint:
    """The grammar of one request, after the tokens of its completion so far."""

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher, self._num_words = matcher, num_words
        self.error = ""  # why the text cannot be continued

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow the text any more."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def advance(self, tokens: Sequence[int]) -> int:
        """Add tokens until the grammar is complete or forbids one; return how many were added."""
        for i, token in enumerate(tokens):
            if self.is_complete:
                return i
            if not self._matcher.try_consume_tokens([token]):
                self.error = self._matcher.get_error() or NO_TOKEN
                return i
        return len(tokens)

    def mask(self) -> np.ndarray:
        """The mask i32 ``[V / 32]`` of the text."""
        mask = np.zeros(self._num_words, np.int32)
        if not _compute(self._matcher.deep_copy(), mask):
            mask[:] = 0
        return mask

    def fill(
        self, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray, forced: np.ndarray
    ) -> None:
        """Write the mask of every node and the tokens that the grammar forces after it.

        Args:
            tokens: of the nodes, the root first; it is the last token of the text.
            parents: index of each node's parent; parents come before children.
            masks: i32 ``[T, V / 32]`` of ones, which stay for nodes that the grammar forbids.
            forced: i32 ``[T, 1 + S]`` of -1.
        """
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            children[parents[node]].append(node)
        # a copy, because a limit of the library may leave it in an error state
        matcher = self._matcher.deep_copy()

        def visit(node: int) -> None:
            mask = masks[node]
            if not _compute(matcher, mask):
                mask[:] = -1
                if node == 0:
                    self.error = matcher.get_error() or NO_TOKEN
                return
            known = matcher.compute_ff_tokens()[: forced.shape[1]]
            forced[node, : len(known)] = known
            for child in children[node]:
                if matcher.try_consume_tokens([tokens[child]]):
                    visit(child)
                    matcher.rollback(1)

        visit(0)


def _compute(matcher: Any, mask: np.ndarray) -> bool:
    """Write the mask of a matcher; return whether any token may follow."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    # where no token fits, the library stops and allows the end token
    is_dead = matcher.is_stopped() and not matcher.is_accepting()
    return not is_dead and bool(mask.any())


class GrammarCompiler:
    """Compiles grammars, in the threads of their callers, and keeps the last ones."""

    def __init__(
        self, tokenizer: str, vocab_size: int, end_token_ids: Sequence[int], *, spaces: bool
    ) -> None:
        """``tokenizer`` is JSON of the library tokenizers.

        With ``spaces``, JSON may have white space between its tokens.
        """
        if llguidance is None:
            raise ValueError(
                "grammar_backend='llguidance' needs the library llguidance; install "
                "specjax[grammar]"
            )
        ends = [token for token in end_token_ids if token < vocab_size]
        self._tokens = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends or None)
        self._num_words = -(-vocab_size // 32)
        self._json: Any = {} if spaces else {"whitespace_flexible": False}
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, kind: str, text: str) -> Constraint:
        """Make the constraint of a new request. Raises ParameterError with the library's reason.

        ``kind`` is the name of the sampling parameter.
        """
        with self._lock:
            matcher = self._kept.get((kind, text))
            if matcher is not None:
                self._kept.move_to_end((kind, text))
        if matcher is None:
            matcher = self._compile(kind, text)
            with self._lock:
                self._kept[kind, text] = matcher
                if len(self._kept) > MAX_GRAMMARS:
                    self._kept.popitem(last=False)
        return Constraint(matcher.deep_copy(), self._num_words)

    def _compile(self, kind: str, text: str) -> Any:
        if len(text) > MAX_CHARACTERS:
            message = f"{kind} has {len(text)} characters; at most {MAX_CHARACTERS} are supported"
            raise ParameterError(message, param=kind, limit=MAX_CHARACTERS)
        try:
            matcher = llguidance.LLMatcher(self._tokens, self._grammar(kind, text), log_level=0)
            error = matcher.get_error()
        except (ValueError, KeyError, TypeError, AssertionError) as fault:
            error = str(fault) or repr(fault)
        if not error and not Constraint(matcher, self._num_words).mask().any():
            error = "it allows no text"
        if error:
            raise ParameterError(f"{kind}={short(text)}: {error.strip()}", param=kind)
        return matcher

    def _grammar(self, kind: str, text: str) -> str:
        if kind == "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=self._json)
        if kind == "structural_tag":
            return structural_grammar(json.loads(text))
        formats: Any = kind
        return llguidance.grammar_from(formats, text)


def structural_grammar(value: Any) -> str:
    """The grammar of SGLang's structural tags: free text, with schemas between tags.

    ``value`` has ``structures``, each with ``begin``, ``schema`` and ``end``, and ``triggers``, of
    which one starts each ``begin``.
    """
    tags = []
    for one in value["structures"]:
        begin = one["begin"]
        trigger = next((start for start in value["triggers"] if begin.startswith(start)), None)
        if trigger is None:
            raise ValueError(f"no trigger in {value['triggers']} starts begin={begin!r}")
        schema = one.get("schema") or {}
        tags.append(
            llguidance.StructTag(trigger=trigger, begin=begin, grammar=schema, end=one["end"])
        )
    return str(llguidance.StructTag.to_grammar(tags))

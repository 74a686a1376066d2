"""The grammar that the text of a request must follow, after its tokens so far.

The mask of a text is the set of tokens that may follow it, as bits i32 ``[V / 32]``. It depends on
the text only. So a target that draws its token at every node of a drafted tree with the node's own
mask gives the text of plain decoding with masks. Drafts that a grammar forbids are never drawn, and
so never accepted. Axes: T tree nodes, S steps, V vocabulary.

The library llguidance limits the work and the memory of a matcher, and copies of a matcher share
what is counted. So one matcher sees what plain decoding would show it, the tokens and the masks of
the text, and decides where the text ends. Another one, with limits of its own, sees the drafts.
"""

import ctypes
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.sampling.boundary import BEGIN, Boundary, BoundaryWalk, Place

OPTIONS = "x-guidance"  # the library's options, at the root of a schema
# The options of tool arguments: the white space of json.dumps, which models have learned. They are
# the only ones that a schema may have.
LAYOUT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
NO_TOKEN = "no token may follow"


class Constraint:
    """Follows the text of one request, and masks the tokens of its drafts.

    Args:
        make: returns a new matcher of the grammar, or ``None`` if only the reasoning is limited.
        num_words: ``V / 32``, rounded up.
        boundary: the place where the grammar begins. Default: the grammar begins at once.
    """

    def __init__(
        self, make: Callable[[], Any], num_words: int, boundary: Boundary | None = None
    ) -> None:
        self._make, self.num_words = make, num_words
        self._plain = make()  # has the tokens and masks of the text, as in plain decoding
        self._drafter: Any = None  # has the tokens of the text; its copies have those of drafts
        self._text: list[int] = []  # the tokens that the grammar limits
        self._num_drafter = 0  # tokens of the text that the drafter has
        self._mask: np.ndarray | None = None  # of the text
        self._walk = None if boundary is None else BoundaryWalk(boundary)
        self._place = None if self._walk is None else self._walk.start  # before the grammar
        self.error = ""  # why the text cannot be continued

    def check(self) -> str:
        """The error of a new grammar, if it has one."""
        if self._plain is None:
            return ""
        if error := self._plain.get_error():
            return str(error)
        self._plain_mask()
        return self.error and f"it allows no text ({self.error})"

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow the text any more."""
        if self._place is not None or self._plain is None:
            return False
        return bool(self._plain.is_stopped() and self._plain.is_accepting())

    @property
    def is_free(self) -> bool:
        """Whether nothing limits the rest of the text."""
        return self._place is None and self._plain is None

    def advance(self, tokens: Sequence[int]) -> int:
        """Add tokens until the grammar is complete or forbids one; return how many were added."""
        for i, token in enumerate(tokens):
            if self._walk is not None and self._place is not None:
                place = self._walk.next(self._place, token)
                self._place = None if place[0] == BEGIN else place
                continue
            if self._plain is None:
                continue
            if self.is_complete or self._plain_mask() is None:
                return i
            if not self._plain.try_consume_tokens([token]):
                self.error = _reason(self._plain)
                return i
            self._text.append(token)
            self._mask = None
        return len(tokens)

    def mask(self) -> np.ndarray:
        """The mask i32 ``[V / 32]`` of the text; zeros if no token may follow."""
        masks = np.empty((1, self.num_words), np.int32)
        self.fill([0], [-1], masks, np.empty((1, 1), np.int32))
        return np.zeros_like(masks[0]) if self.error else masks[0]

    def fill(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        masks: np.ndarray,
        forced: np.ndarray,
        before_node: Callable[[], object] = lambda: None,
    ) -> None:
        """Write the masks of a tree's nodes, and the tokens that the grammar forces after them.

        If no token may follow the text, ``error`` has the reason.

        Args:
            tokens: of the nodes, the root first; it is the last token of the text.
            parents: index of each node's parent; parents come before children.
            masks: i32 ``[T, V / 32]``.
            forced: i32 ``[T, 1 + S]``; the forced tokens, then -1.
            before_node: is called before the work of each node.
        """
        states: list[Place | Branch | None] = []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            before_node()
            state = self._next(states[parent], token) if node else self._root()
            states.append(state)
            if isinstance(state, Branch):
                self._fill_branch(state, masks[node], forced[node])
            elif state is not None and self._walk is not None:
                self._walk.limit(state, masks[node], forced[node])
            else:
                masks[node] = forced[node] = -1

    def _root(self) -> "Place | Branch | None":
        if self._place is not None:
            return self._place
        return None if self._plain is None else Branch([])

    def _next(self, state: "Place | Branch | None", token: int) -> "Place | Branch | None":
        """The state after a draft whose parent has ``state``; ``None`` if nothing limits it."""
        if isinstance(state, Branch):
            path = [*state.path, token]
            matcher = (state.matcher or self._at_text()).deep_copy()
            if matcher.try_consume_tokens([token]):
                return Branch(path, matcher)
            return Branch(path, self._replay(path)) if matcher.is_error() else None
        if state is None or self._walk is None:
            return None
        place = self._walk.next(state, token)
        if place[0] == BEGIN:
            return None if self._plain is None else Branch([])
        # a draft in place of the forced end is never accepted
        return None if place[1] < 0 else place

    def _fill_branch(self, branch: "Branch", mask: np.ndarray, forced: np.ndarray) -> None:
        forced[:] = -1
        if not branch.path:
            plain = self._plain_mask()
            mask[:] = -1 if plain is None else plain
        elif _compute(branch.matcher, mask) not in ("", NO_TOKEN):
            # the drafts have used up a limit, which the text would not have reached
            branch.matcher = self._replay(branch.path)
            _compute(branch.matcher, mask)
        # only a mask with bits in one word can force a token
        if len(forced) > 1 and np.count_nonzero(mask) == 1:
            tokens = (branch.matcher or self._at_text()).compute_ff_tokens()[: len(forced)]
            forced[: len(tokens)] = tokens

    def _plain_mask(self) -> np.ndarray | None:
        """The mask of the text; ``None`` if no token may follow, with the reason as error."""
        if self._mask is None and not self.error:
            self._mask = np.empty(self.num_words, np.int32)
            self.error = _compute(self._plain, self._mask)
        return None if self.error else self._mask

    def _at_text(self) -> Any:
        """The matcher whose copies follow drafts, after the tokens of the text."""
        if self._drafter is None:
            self._drafter = self._make()
        tokens = self._text[self._num_drafter :]
        if self._drafter.try_consume_tokens(tokens) < len(tokens):
            self._drafter = self._replay([])
        self._num_drafter = len(self._text)
        return self._drafter

    def _replay(self, path: Sequence[int]) -> Any:
        """A matcher that has seen the text and the path, and no other drafts."""
        matcher, mask = self._make(), np.empty(self.num_words, np.int32)
        for token in (*self._text, *path):
            _compute(matcher, mask)
            if not matcher.try_consume_tokens([token]):
                break
        return matcher


@dataclass(eq=False)
class Branch:
    """Drafts after the text, and a matcher after them; without drafts, there is none."""

    path: list[int]
    matcher: Any = None


class AllowedTokens:
    """A matcher of any text that has only some tokens. It has the methods of the library's."""

    def __init__(self, token_ids: Collection[int], num_words: int) -> None:
        self._token_ids = frozenset(token_ids)
        bits = np.zeros(32 * num_words, np.uint8)
        bits[list(token_ids)] = 1
        self._mask = np.packbits(bits, bitorder="little")

    def try_consume_tokens(self, tokens: Sequence[int]) -> int:
        wrong = (i for i, token in enumerate(tokens) if token not in self._token_ids)
        return next(wrong, len(tokens))

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        ctypes.memmove(pointer, self._mask.ctypes.data, num_bytes)

    def deep_copy(self) -> "AllowedTokens":
        return self  # it has no state

    def compute_ff_tokens(self) -> list[int]:
        return []

    def get_error(self) -> str:
        return ""

    def is_stopped(self) -> bool:
        return False

    is_accepting = is_error = is_stopped


def _compute(matcher: Any, mask: np.ndarray) -> str:
    """Write a matcher's mask; if no token may follow, write ones and return the reason."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    # if no token fits, the library stops and allows the end token, or all tokens
    if mask.any() and (not matcher.is_stopped() or matcher.is_accepting()):
        return ""
    mask[:] = -1
    return _reason(matcher)


def _reason(matcher: Any) -> str:
    """Why no token may follow: the first line of the library's reason, if it has one."""
    lines = matcher.get_error().splitlines()
    return lines[0] if lines and not lines[0].startswith("<") else NO_TOKEN

"""Shows accepted draft tokens: marked in the text, or as the tree of each round."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

from specjax.text.completion import AcceptPieces
from specjax.types import VerifyInput, VerifyOutput

ACCEPTED = "\x1b[32m"
RESET = "\x1b[0m"
BONUS = "\x1b[36m"
REJECTED = "\x1b[2m"
BONUS_ROW = -2  # stands for the bonus token, which is not in the tree
Decode = Callable[..., str]


def use_colour(stream: TextIO) -> bool:
    """Return whether ``stream`` should get ANSI colours (https://no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    is_forced = bool(os.environ.get("FORCE_COLOR"))
    return is_forced or (stream.isatty() and os.environ.get("TERM") != "dumb")


class AcceptPainter:
    """Marks accepted drafts by colour or brackets; ``push`` is as in :class:`AcceptPieces`."""

    def __init__(self, push: Callable[[list[int]], str], *, colour: bool) -> None:
        self._pieces = AcceptPieces(push)
        self._open, self._close = (ACCEPTED, RESET) if colour else ("[", "]")
        self._is_open = False
        self.legend = (
            f"{self._open}like this{self._close}: accepted draft tokens; all other tokens are from "
            "the target"
        )

    def paint(
        self, text: str, output_ids: Sequence[int], is_draft: Sequence[bool], *, final: bool
    ) -> str:
        """Return the text since the last call, with marks; see :meth:`AcceptPieces.take`."""
        pieces = self._pieces.take(text, output_ids, is_draft, final=final)
        painted = "".join(self._mark(piece, accepted) for piece, accepted in pieces)
        return painted + (self.end_mark() if final else "")

    def end_mark(self) -> str:
        was_open, self._is_open = self._is_open, False
        return self._close if was_open else ""

    def _mark(self, piece: str, accepted: bool) -> str:
        if accepted == self._is_open:
            return piece
        if not accepted:
            return self.end_mark() + piece
        self._is_open = True
        return self._open + piece


@dataclass(frozen=True, kw_only=True)
class RoundTree:
    """The tree of one request in one round, on the host."""

    tokens: list[int]  # the root, then the draft tokens
    parents: list[int]  # parent of each node; -1 for the root; parents precede children
    path: list[int]  # accepted nodes, the root first
    bonus: int  # the target's token after the accepted nodes

    @classmethod
    def of(cls, tree: VerifyInput, verified: VerifyOutput) -> "RoundTree | None":
        """Wait for the tree of batch row 0 and read it; ``None`` if its request had ended."""
        count = int(verified.num_accepted_tokens[0])
        rows = 1 + int(verified.num_proposed_drafts[0])
        if count == 0:
            return None
        return cls(
            tokens=np.asarray(tree.draft_tokens)[0, :rows].tolist(),
            parents=np.asarray(tree.parents)[0, :rows].tolist(),
            path=np.asarray(verified.accept_index)[0, :count].tolist(),
            bonus=int(verified.bonus_tokens[0]),
        )


@contextmanager
def watched_trees(engine: Any) -> Iterator[list[RoundTree]]:
    """Collect the tree of every round in a list; the engine must run a single request."""
    trees: list[RoundTree] = []

    def watch(slots: Any, tree: VerifyInput, verified: VerifyOutput) -> None:
        if (drafted := RoundTree.of(tree, verified)) is not None:
            trees.append(drafted)

    engine.watch_rounds(watch)
    try:
        yield trees
    finally:
        engine.watch_rounds(None)


class TreePainter:
    """Draws a tree, one node per line: a mark, the branches and the token's text."""

    def __init__(self, decode: Decode, *, colour: bool) -> None:
        self._decode = decode
        self._colour = colour
        self.legend = (
            "trees: the last token and the drafts after it; "
            f"{self._marked(ACCEPTED, '* accepted')}, {self._marked(BONUS, '+ bonus token')} of "
            f"the target, {self._marked(REJECTED, 'rejected')} without a mark. Rounds are slower "
            "because each runs in three parts"
        )

    def draw(self, trees: Sequence[RoundTree], num_tokens: int) -> str:
        """Draw the rounds of a completion of ``num_tokens`` tokens; the first is from prefill."""
        lines, remaining = [], num_tokens - 1
        for number, tree in enumerate(trees, 1):
            gained = len(tree.path)
            if remaining > 0:  # else the request had ended before this round, which was in flight
                drafts = f"{gained - 1} of {len(tree.tokens) - 1} drafts accepted"
                cut = f", {remaining} within the text" if remaining < gained else ""
                title = f"round {number}: {drafts}, {gained} token{'s' * (gained != 1)}{cut}"
                root = f"  {self._text(tree.tokens[0])}"
                lines += ["", title, root, *self._below(tree, 0)]
            remaining -= gained
        return "\n".join(lines)

    def _below(self, tree: RoundTree, row: int, before: str = "") -> Iterator[str]:
        """Draw the descendants of a row; each line starts with the branches ``before``."""
        children = [child for child, parent in enumerate(tree.parents) if parent == row]
        if row == tree.path[-1]:
            children.insert(0, BONUS_ROW)
        for child in children:
            is_last = child == children[-1]
            branch = before + ("└─ " if is_last else "├─ ")
            if child == BONUS_ROW:
                yield self._marked(BONUS, f"+ {branch}{self._text(tree.bonus)}")
                continue
            is_accepted = child in tree.path
            colour, mark = (ACCEPTED, "*") if is_accepted else (REJECTED, " ")
            yield self._marked(colour, f"{mark} {branch}{self._text(tree.tokens[child])}")
            yield from self._below(tree, child, before + ("   " if is_last else "│  "))

    def _text(self, token: int) -> str:
        """Decode a token after a copy of itself, because decoders drop a leading space."""
        single, double = (self._decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        return repr(double[len(single) :])

    def _marked(self, colour: str, text: str) -> str:
        return f"{colour}{text}{RESET}" if self._colour else text

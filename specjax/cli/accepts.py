"""Shows which parts of a completion were accepted drafts."""

import os
from collections.abc import Callable, Sequence
from typing import TextIO

from specjax.text.completion import AcceptPieces

ACCEPTED = "\x1b[32m"
RESET = "\x1b[0m"


def use_colour(stream: TextIO) -> bool:
    """Whether ``stream`` should get ANSI colours (https://no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    is_forced = bool(os.environ.get("FORCE_COLOR"))
    return is_forced or (stream.isatty() and os.environ.get("TERM") != "dumb")


class AcceptPainter:
    """Marks the accepted drafts in a growing completion, by ``colour`` or by square brackets.

    ``push`` is that of :class:`AcceptPieces`.
    """

    def __init__(self, push: Callable[[list[int]], str], *, colour: bool) -> None:
        self._pieces = AcceptPieces(push)
        self._open, self._close = (ACCEPTED, RESET) if colour else ("[", "]")
        self._is_open = False
        self.legend = (
            f"{self._open}like this{self._close}: accepted drafts; everything else is the target's "
            "own token of a pass"
        )

    def paint(
        self, text: str, output_ids: Sequence[int], is_draft: Sequence[bool], *, final: bool
    ) -> str:
        """What is new since the last call, marked; as :meth:`AcceptPieces.take`."""
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

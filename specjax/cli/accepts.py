"""Shows which parts of a completion were accepted drafts."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

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

    With byte-level BPE a token may hold a part of a character. A character belongs to the token
    that completes it, so the pieces always join to the text itself. ``push`` takes new token ids
    and returns the text that they complete, as :meth:`IncrementalDecoder.push` does.
    """

    def __init__(self, push: Callable[[list[int]], str], *, colour: bool) -> None:
        self._push = push
        self._open, self._close = (ACCEPTED, RESET) if colour else ("[", "]")
        self._pending: deque[tuple[int, bool]] = deque()  # length and flag of tokens not shown yet
        self._num_tokens = self._num_chars = 0
        self._is_open = False
        self.legend = (
            f"{self._open}like this{self._close}: accepted drafts; everything else is the target's "
            "own token of a pass"
        )

    def paint(
        self, text: str, output_ids: Sequence[int], is_draft: Sequence[bool], *, final: bool
    ) -> str:
        """What is new since the last call, marked.

        The ``text`` may lag behind the tokens by what could become a stop string. With ``final``
        nothing follows: a token that is not whole in it is cut there.
        """
        for i in range(self._num_tokens, len(output_ids)):
            self._pending.append((len(self._push([output_ids[i]])), is_draft[i]))
        self._num_tokens = len(output_ids)
        painted = ""
        while self._pending and (final or self._num_chars + self._pending[0][0] <= len(text)):
            length, accepted = self._pending.popleft()
            painted += self._mark(text[self._num_chars :][:length], accepted)
            self._num_chars += length
        if final:
            # an incomplete character at the very end belongs to no token's piece
            painted += self._mark(text[self._num_chars :], False) + self.end_mark()
        return painted

    def end_mark(self) -> str:
        was_open, self._is_open = self._is_open, False
        return self._close if was_open else ""

    def _mark(self, piece: str, accepted: bool) -> str:
        if not piece or accepted == self._is_open:
            return piece
        if not accepted:
            return self.end_mark() + piece
        self._is_open = True
        return self._open + piece

"""Which parts of a text were accepted drafts."""

from collections import deque
from collections.abc import Callable, Sequence


class AcceptPieces:
    """Tells the accepted drafts in a growing completion from the target's own tokens.

    With byte-level BPE a token may hold a part of a character. A character belongs to the token
    that completes it, so the pieces always join to the text itself. ``push`` takes new token ids
    and returns the text that they complete, as :meth:`IncrementalDecoder.push` does.
    """

    def __init__(self, push: Callable[[list[int]], str]) -> None:
        self._push = push
        self._pending: deque[tuple[int, bool]] = deque()  # length and flag of tokens not told yet
        self._num_tokens = self._num_chars = 0

    def take(
        self, text: str, output_ids: Sequence[int], is_draft: Sequence[bool], *, final: bool
    ) -> list[tuple[str, bool]]:
        """What is new since the last call, in pieces with whether they were accepted drafts.

        The ``text`` may lag behind the tokens by what could become a stop string. With ``final``
        nothing follows: a token that is not whole in it is cut there.
        """
        for i in range(self._num_tokens, len(output_ids)):
            self._pending.append((len(self._push([output_ids[i]])), is_draft[i]))
        self._num_tokens = len(output_ids)
        pieces = []
        while self._pending and (final or self._num_chars + self._pending[0][0] <= len(text)):
            length, accepted = self._pending.popleft()
            pieces.append((text[self._num_chars :][:length], accepted))
            self._num_chars += length
        if final:
            # an incomplete character at the very end belongs to no token's piece
            pieces.append((text[self._num_chars :], False))
        return [piece for piece in pieces if piece[0]]

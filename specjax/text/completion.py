"""Text of a completion: decoded when it is asked for, and searched for stop strings."""

from collections.abc import Sequence

from specjax.text.tokenizer import IncrementalDecoder


class CompletionText:
    """Text of a growing completion.

    With stop strings every token is decoded as it comes, because the token that completes one ends
    the request. Without, tokens pile up until the text is read, which takes the decoding out of the
    scheduler's step.

    Args:
        decoder: ``None`` without a tokenizer; the text stays empty then.
        stops: strings that end the completion and are cut off.
    """

    def __init__(self, decoder: IncrementalDecoder | None, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._text = ""
        self._pending: list[int] = []
        self._is_flush_pending = False

    def add(self, token: int | None, *, flush: bool) -> str | None:
        """Add a token's text, and return the stop string that it completes, if any.

        With ``flush`` the text that was held back as half a character comes too.
        """
        if self._decoder is None:
            return None
        if token is not None:
            self._pending.append(token)
        self._is_flush_pending |= flush
        return self._find_stop() if self._stops else None

    @property
    def text(self) -> str:
        """The text so far."""
        self._decode()
        return self._text

    def streamed(self) -> str:
        """Text that no later token can take back: the start of a stop string is held."""
        text, held = self.text, 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), held, -1):
                if text.endswith(stop[:size]):
                    held = size
                    break
        return text[: len(text) - held]

    def _decode(self) -> None:
        if self._decoder is None:
            return
        if self._pending:
            self._text += self._decoder.push(self._pending)
            self._pending = []
        if self._is_flush_pending:
            self._text += self._decoder.flush()
            self._is_flush_pending = False

    def _find_stop(self) -> str | None:
        # a new match ends in the new text, so it starts no earlier than this
        search_from = max(0, len(self._text) - self._longest + 1)
        self._decode()
        found = [(self._text.find(stop, search_from), stop) for stop in self._stops]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if not hits:
            return None
        at, stop = min(hits)
        self._text = self._text[:at]
        return stop

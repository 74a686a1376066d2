"""Text of completions and single tokens: lazy decoding and search for stop strings."""

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

from tokenizers.pre_tokenizers import ByteLevel

from specjax.text.tokenizer import IncrementalDecoder, Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class CompletionText:
    """Text of a growing completion.

    With stop strings every token is decoded on arrival, because the token that completes a stop
    string ends the request. Without stop strings, tokens are decoded when the text is read, outside
    the scheduler's step. Without a decoder, the text stays empty. A stop string that is a special
    token also stops if the text leaves such tokens out.
    """

    def __init__(
        self, decoder: IncrementalDecoder | None, stops: Sequence[str], *, keeps_stop: bool = False
    ) -> None:
        self._decoder = decoder
        self._keeps_stop = keeps_stop
        skipped = getattr(decoder, "skipped", {})  # ids of the tokens that the text leaves out
        self._skipped_stops = {skipped[stop]: stop for stop in stops if stop in skipped}
        # a stop string that begins with another one is never found first, so it is left out
        self._stops: list[str] = []
        for stop in sorted(stops):
            if not self._stops or not stop.startswith(self._stops[-1]):
                self._stops.append(stop)
        self._longest = max(map(len, self._stops), default=0)
        letters = "".join(re.escape(stop[0]) for stop in self._stops)
        self._starts = re.compile(f"[{letters}]") if letters else None
        self._num_safe = 0  # number of characters that cannot be part of a stop string
        self._text = ""
        self._pending: list[int] = []
        self._is_flush_pending = False

    def add(self, tokens: Sequence[int], *, flush: bool) -> tuple[int, str | None]:
        """Add text up to the first stop string; return the number of tokens used and that string.

        With ``flush``, the text of an incomplete character at the end is added too.
        """
        if self._decoder is None:
            return len(tokens), None
        if self._starts is None:
            self._pending += tokens
            self._is_flush_pending |= flush
            return len(tokens), None
        for i, token in enumerate(tokens):
            if (skipped := self._skipped_stops.get(token)) is not None:
                self._is_flush_pending = True
                self._decode()
                self._text += skipped * self._keeps_stop
                return i + 1, skipped
            self._pending.append(token)
            if (stop := self._find_stop(self._starts)) is not None:
                return i + 1, stop
        self._is_flush_pending |= flush
        return len(tokens), self._find_stop(self._starts) if flush else None

    def stop(self) -> None:
        """Stop decoding; the text stays as it is."""
        self._decoder = None

    @property
    def text(self) -> str:
        self._decode()
        return self._text

    def streamed(self) -> str:
        """Return the text before any possible start of a stop string; no token can remove it."""
        return self.text if self._starts is None else self._text[: self._num_safe]

    def _decode(self) -> None:
        if self._decoder is None:
            return
        if self._pending:
            self._text += self._decoder.push(self._pending)
            self._pending = []
        if self._is_flush_pending:
            self._text += self._decoder.flush()
            self._is_flush_pending = False

    def _find_stop(self, starts: re.Pattern[str]) -> str | None:
        """Cut the text at the first stop string, or after it with ``keeps_stop``; return it."""
        self._decode()
        held = None
        for start in starts.finditer(self._text, self._num_safe):
            at = start.start()
            tail = self._text[at : at + self._longest]
            # No stop string begins with another. In sort order, `tail` can begin only with the last
            # one that is not greater, and only the next one can begin with `tail`.
            i = bisect_right(self._stops, tail)
            if i > 0 and tail.startswith(self._stops[i - 1]):
                stop = self._stops[i - 1]
                self._text = self._text[: at + len(stop) * self._keeps_stop]
                return stop
            if held is None and i < len(self._stops) and self._stops[i].startswith(tail):
                held = at
        self._num_safe = len(self._text) if held is None else held
        return None


class AcceptPieces:
    """Splits a growing completion into accepted draft tokens and the target's tokens.

    With byte-level BPE a token may hold a part of a character. A character belongs to the token
    that completes it, so the pieces always join to the whole text. ``push`` takes new token ids
    and returns the text that they complete, as :meth:`IncrementalDecoder.push` does.
    """

    def __init__(self, push: Callable[[list[int]], str]) -> None:
        self._push = push
        self._pending: deque[tuple[int, bool]] = deque()  # length and flag of pending tokens
        self._num_tokens = self._num_chars = 0

    def take(
        self, text: str, output_ids: Sequence[int], is_draft: Sequence[bool], *, final: bool
    ) -> list[tuple[str, bool]]:
        """Return the text since the last call as pieces, each with its accepted-draft flag.

        ``text`` may lack the last tokens if they could become a stop string. With ``final``,
        no text follows, and a token that ``text`` contains only in part is cut.
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


class TokenTexts:
    """Text and bytes of single tokens; empty without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._backend = None if tokenizer is None else tokenizer.backend
        self._alphabet: dict[str, int] = {}
        self._added: dict[int, str] = {}
        self._special: set[int] = set()
        if self._backend is not None:
            added = self._backend.get_added_tokens_decoder()
            self._added = {i: token.content for i, token in added.items()}
            self._special = {i for i, token in added.items() if token.special}
            decoder = self._backend.decoder
            if decoder is not None and b"ByteLevel" in decoder.__getstate__():
                self._alphabet = byte_alphabet()
        self._entries: dict[int, tuple[str, bytes]] = {}

    def is_special(self, token: int) -> bool:
        """Return whether a token is left out of the text."""
        return token in self._special

    def decode(self, ids: Sequence[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(ids)

    def accept_pieces(self, skips_special: bool) -> AcceptPieces:
        if self._tokenizer is None:
            return AcceptPieces(lambda ids: "")
        decoder = IncrementalDecoder(self._tokenizer, skip_special_tokens=skips_special)
        return AcceptPieces(decoder.push)

    def of(self, token: int) -> tuple[str, bytes]:
        """Return text and bytes; a partial character is written ``bytes:\\xe2``, as by OpenAI."""
        entry = self._entries.get(token)
        if entry is None:
            data = self._bytes(token)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            entry = self._entries[token] = text, data
        return entry

    def _bytes(self, token: int) -> bytes:
        if self._backend is None:
            return b""
        if token in self._added:
            return self._added[token].encode()
        piece = self._backend.id_to_token(token) or ""
        if self._alphabet:
            if all(letter in self._alphabet for letter in piece):
                return bytes(self._alphabet[letter] for letter in piece)
            return piece.encode()
        if byte_match := _BYTE.fullmatch(piece):
            return bytes([int(byte_match[1], 16)])
        return piece.replace("\u2581", " ").encode()


def byte_alphabet() -> dict[str, int]:
    """Map the characters of byte-level BPE to the bytes that they stand for.

    Printable bytes stand for themselves; the others map to characters from U+0100 on, in order.
    """
    letters = sorted(map(ord, ByteLevel.alphabet()))
    free_bytes = iter(byte for byte in range(0x100) if byte not in letters)
    return {chr(code): code if code < 0x100 else next(free_bytes) for code in letters}

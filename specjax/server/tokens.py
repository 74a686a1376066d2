"""Texts and bytes of single tokens, as log-probabilities name them."""

import re

from specjax.text.completion import AcceptPieces
from specjax.text.tokenizer import IncrementalDecoder, Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Bytes by the characters that byte-level BPE writes them as.

    Printable bytes are written as they are, the others by characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


class TokenTexts:
    """What each token adds to a text; without a tokenizer nothing."""

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
        self._known: dict[int, tuple[str, bytes]] = {}

    def is_special(self, token: int) -> bool:
        """Whether it is left out of the text."""
        return token in self._special

    def accept_pieces(self, skips_special: bool) -> AcceptPieces:
        """What tells the accepted drafts in a completion's text."""
        if self._tokenizer is None:
            return AcceptPieces(lambda ids: "")
        decoder = IncrementalDecoder(self._tokenizer, skip_special_tokens=skips_special)
        return AcceptPieces(decoder.push)

    def of(self, token: int) -> tuple[str, bytes]:
        """Text and bytes; ``bytes:\\xe2``, as OpenAI writes it, for a part of a character."""
        known = self._known.get(token)
        if known is None:
            data = self._bytes(token)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            known = self._known[token] = text, data
        return known

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
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return piece.replace("\u2581", " ").encode()

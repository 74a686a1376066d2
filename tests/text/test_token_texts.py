"""Texts and bytes of single tokens."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specjax.text.completion import TokenTexts, byte_alphabet
from specjax.text.tokenizer import Tokenizer

from ..support.tokenizers import byte_tokenizer


def word_tokenizer() -> Tokenizer:
    """A tokenizer with word marks, and bytes by number."""
    vocabulary = {"<0xE2>": 0, "<0x82>": 1, "<0xAC>": 2, "▁the": 3, "a": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[]))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts)
    return Tokenizer(backend)


def test_the_alphabet_is_that_of_byte_level_tokenizers() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = byte_tokenizer()
    texts = TokenTexts(tokenizer)
    for text in ("a €\n", "日本", "\x00\x7f\xad"):
        ids = tokenizer.encode(text)
        assert b"".join(texts.of(i)[1] for i in ids) == text.encode()
        assert list(text.encode()) == ids


def test_texts_of_tokens() -> None:
    texts = TokenTexts(byte_tokenizer())
    assert texts.of(ord("a")) == ("a", b"a")
    assert texts.of(0xE2) == ("bytes:\\xe2", b"\xe2")
    assert texts.of(256) == ("</s>", b"</s>")
    assert texts.is_special(256)
    assert texts.of(10_000) == ("", b"")  # an id of a padded vocabulary
    words = TokenTexts(word_tokenizer())
    assert [words.of(i)[1] for i in range(5)] == [b"\xe2", b"\x82", b"\xac", b" the", b"a"]
    assert TokenTexts(None).of(3) == ("", b"")

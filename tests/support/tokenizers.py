"""Tiny tokenizers."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specjax.testing.files import letter_tokenizer
from specjax.text.completion import byte_alphabet
from specjax.text.harmony import MARKS
from specjax.text.tokenizer import Tokenizer


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte, and an end token."""
    vocabulary = byte_alphabet()
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


def harmony_tokenizer(*words: str) -> Tokenizer:
    """A tokenizer of letters with the marks of harmony, and ``words`` as tokens."""
    tokenizer = letter_tokenizer()
    tokenizer.backend.add_special_tokens([*MARKS])
    tokenizer.backend.add_tokens([*words])
    return tokenizer

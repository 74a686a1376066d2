"""A corpus of texts that n-gram drafts are looked up in: read, made of tokens, sorted."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checks import is_integer

SEPARATOR = -1


@dataclass(frozen=True)
class CorpusConfig:
    """Sizes of a corpus: what a function that reads it is compiled for.

    Attributes:
        num_tokens: N, of documents and what separates them.
        num_places: P, of documents alone.
        window: tokens that places are sorted by.
    """

    num_tokens: int
    num_places: int
    window: int


@dataclass(frozen=True)
class Corpus:
    """The sorted corpus of a file; stands where other algorithms have a draft checkpoint."""

    path: Path
    config: CorpusConfig
    tokens: np.ndarray  # i32 [N]
    order: np.ndarray  # i32 [P]

    def describe(self) -> str:
        return f"corpus {self.path}: {self.config.num_places:,} tokens"

    def check_weights(self) -> None:
        """Nothing is left to be read."""

    def load_weights(self) -> dict[str, np.ndarray]:
        return {"tokens": self.tokens, "order": self.order}


def open_corpus(
    path: str | Path, tokenizer: Any, *, vocab_size: int, max_tokens: int, window: int
) -> Corpus:
    """Read a file of JSON lines, each a document: a string, or a list of token ids.

    ValueError with the line for anything else, and for more than ``max_tokens``.
    """
    knob = f"speculative_ngram_external_corpus_path={str(path)!r}"
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{knob} cannot be read: {error}") from error
    documents, total = [], 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        document = _document(f"{knob}, line {number}", line, tokenizer, vocab_size)
        total += len(document)
        if total > max_tokens:
            raise ValueError(
                f"{knob} has more than speculative_ngram_external_corpus_max_tokens={max_tokens} "
                f"tokens from line {number} on; shorten it, or raise the limit"
            )
        documents.append(document)
    if not total:
        raise ValueError(f"{knob} has no tokens")
    tokens, order = sort_corpus(documents, window)
    return Corpus(Path(path), CorpusConfig(len(tokens), len(order), window), tokens, order)


def _document(where: str, line: str, tokenizer: Any, vocab_size: int) -> list[int]:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    if isinstance(document, str):
        if tokenizer is None:
            raise ValueError(f"{where} is a text, but there is no tokenizer; give token ids")
        document = tokenizer.encode(document)
    if not isinstance(document, list) or not all(map(is_integer, document)):
        raise ValueError(f"{where} is neither a string nor a list of token ids")
    if document and not 0 <= min(document) <= max(document) < vocab_size:
        raise ValueError(
            f"{where} has token ids from {min(document)} to {max(document)}, but the target has "
            f"vocab_size={vocab_size}"
        )
    return document


def sort_corpus(documents: list[list[int]], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents as one array, and the places of their tokens in the order of what ends there.

    Tokens i32 ``[N]`` have ``window`` separators before, between and behind documents. Places i32
    ``[P]`` are sorted by the ``window`` tokens that end there, the last one first, then by place.
    """
    gap = [SEPARATOR] * window
    tokens = np.array(gap + [token for text in documents for token in (*text, *gap)], np.int32)
    ranks = _context_ranks(tokens.astype(np.int64) + 1, window)
    order = np.argsort(ranks, kind="stable").astype(np.int32)
    return tokens, order[tokens[order] != SEPARATOR]


def _context_ranks(tokens: np.ndarray, width: int) -> np.ndarray:
    """Ranks of the ``width`` tokens that end at each place: halves are ranked, then their pairs."""
    if width == 1:
        return tokens
    newer = _context_ranks(tokens, width - width // 2)
    older = np.zeros_like(newer)
    ranks = _context_ranks(tokens, width // 2)
    older[width - width // 2 :] = ranks[: -(width - width // 2)]
    pairs = newer * (ranks.max() + 1) + older
    return np.unique(pairs, return_inverse=True)[1].reshape(-1)

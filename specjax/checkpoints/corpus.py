"""A corpus of texts that n-gram drafts are looked up in: read, made of tokens, sorted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checks import is_integer
from specjax.json_file import read_json_lines
from specjax.models.recipes import Recipes

SEPARATOR = -1


@dataclass(frozen=True)
class CorpusConfig:
    """Sizes of a corpus: what a function that reads it is compiled for.

    Attributes:
        num_tokens: N, of documents and what separates them.
        num_places: P, tokens that others follow.
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

    def canonical_name(self, name: str) -> str:
        return name

    def recipes(self) -> Recipes:
        raise ValueError(
            f"named_tensors of a draft that is the corpus {self.path}; write another file, and "
            "pass draft_path"
        )


def open_corpus(
    path: str | Path, tokenizer: Any, *, vocab_size: int, max_tokens: int, window: int
) -> Corpus:
    """Read a file of JSON lines, each a document: a string, or a list of token ids.

    ValueError with the line for anything else, and for more than ``max_tokens``.
    """
    left = max_tokens

    def read(document: Any) -> list[int]:
        nonlocal left
        ids = _token_ids(document, tokenizer, vocab_size)
        left -= len(ids)
        if left < 0:
            raise ValueError(
                f"more than speculative_ngram_external_corpus_max_tokens={max_tokens} tokens up "
                "to here; shorten the corpus, or raise the limit"
            )
        return ids

    try:
        documents = [ids for ids in read_json_lines(Path(path).expanduser(), read) if ids]
        tokens, order = sort_corpus(documents, window)
    except ValueError as error:
        knob = f"speculative_ngram_external_corpus_path={str(path)!r}"
        raise ValueError(f"{knob}: {error}") from error
    return Corpus(Path(path), CorpusConfig(len(tokens), len(order), window), tokens, order)


def _token_ids(document: Any, tokenizer: Any, vocab_size: int) -> list[int]:
    if isinstance(document, str):
        if tokenizer is None:
            raise ValueError("a text, but there is no tokenizer; give token ids")
        document = tokenizer.encode(document, add_special_tokens=False)
    if not isinstance(document, list) or not all(map(is_integer, document)):
        raise ValueError("neither a string nor a list of token ids")
    if document and not 0 <= min(document) <= max(document) < vocab_size:
        raise ValueError(
            f"token ids from {min(document)} to {max(document)}, but the target has "
            f"vocab_size={vocab_size}"
        )
    return document


def sort_corpus(documents: list[list[int]], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents as one array, and the places of their tokens in the order of what ends there.

    Tokens i32 ``[N]`` have a separator before, between and behind documents. Places i32 ``[P]`` are
    those that a token follows, sorted by the ``window`` tokens of the document that end there, the
    last one first, then by place. ValueError where there are none.
    """
    tokens = np.array([SEPARATOR, *(t for text in documents for t in (*text, SEPARATOR))], np.int32)
    ranks, _ = _context_ranks(tokens.astype(np.int64) + 1, window)
    order = np.argsort(ranks, kind="stable").astype(np.int32)
    is_continued = np.append(tokens[1:] != SEPARATOR, False) & (tokens != SEPARATOR)
    order = order[is_continued[order]]
    if not order.size:
        raise ValueError("no document has two tokens")
    return tokens, order


def _context_ranks(tokens: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of the ``width`` tokens that end at each place, none of them before a separator.

    Halves are ranked, then their pairs. Also whether there is a separator among the tokens.
    """
    if width == 1:
        return tokens, tokens == SEPARATOR + 1
    later = width - width // 2
    newer, has_ended = _context_ranks(tokens, later)
    ranks, ends = (newer, has_ended) if width % 2 == 0 else _context_ranks(tokens, width // 2)
    older, earlier = np.zeros_like(ranks), np.ones_like(ends)
    older[later:], earlier[later:] = ranks[:-later], ends[:-later]
    pairs = newer * (ranks.max() + 1) + np.where(has_ended, 0, older)
    return np.unique(pairs, return_inverse=True)[1].reshape(-1), has_ended | earlier

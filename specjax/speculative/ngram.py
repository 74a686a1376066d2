"""N-gram drafts: what followed the last tokens before, in the request's own text or in a corpus.

No network drafts and nothing is kept between rounds. The text is the device's history of the
request, so that a round needs nothing of the host and may run ahead.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints.target import TargetCheckpoint
from specjax.checks import is_integer
from specjax.config import MAX_NODES
from specjax.json_file import read_json_lines
from specjax.models.family import Recipes
from specjax.models.flat import FlatModel
from specjax.speculative.algorithm import Batch, Rows, SpeculativeAlgorithm, State
from specjax.speculative.ngram_match import (
    from_corpus,
    from_history,
    joined,
    last_tokens,
    ngram_tree,
)
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape, VerifyInput

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


DEFAULT_NODES = 12
MAX_WINDOW = MAX_BREADTH = 16


class NgramShape(DraftShape):
    """A tree whose branches have no KV while they are drafted."""

    __slots__ = ()

    @property
    def draft_rows(self) -> int:
        return 0


class CorpusTable(nnx.Module):
    """A sorted corpus on the device, as ``sort_corpus`` makes it."""

    def __init__(self, config: CorpusConfig) -> None:
        self.tokens = nnx.Variable(jnp.zeros((config.num_tokens,), jnp.int32))
        self.order = nnx.Variable(jnp.zeros((config.num_places,), jnp.int32))


@dataclass(frozen=True)
class Ngram(SpeculativeAlgorithm):
    """Trees of continuations, without state and rows.

    Attributes:
        window: least and most tokens at the text's end that have to agree.
        breadth: continuations that a tree is made of, at most.
        by_frequency: whether the tree prefers what followed often to what followed last.
        has_corpus: whether a corpus is looked through beside the text.
    """

    window: tuple[int, int] = (1, 12)
    breadth: int = 10
    by_frequency: bool = False
    has_corpus: bool = False

    # host side

    def create_worker(self, args: Any) -> "Ngram":
        """The algorithm with an engine's options. ValueError for those that do not fit."""
        super().create_worker(args)
        least, widest = (
            args.speculative_ngram_min_match_window_size,
            args.speculative_ngram_max_match_window_size,
        )
        if not least <= widest <= MAX_WINDOW:
            raise ValueError(
                f"speculative_ngram_max_match_window_size={widest} must be from "
                f"speculative_ngram_min_match_window_size={least} to {MAX_WINDOW}"
            )
        breadth = args.speculative_ngram_max_bfs_breadth
        if breadth > MAX_BREADTH:
            raise ValueError(
                f"speculative_ngram_max_bfs_breadth={breadth} must be at most {MAX_BREADTH}"
            )
        return replace(
            self,
            window=(least, widest),
            breadth=breadth,
            by_frequency=args.speculative_ngram_match_type == "PROB",
            has_corpus=args.speculative_ngram_external_corpus_path is not None,
        )

    def reads(self, option: str) -> bool:
        return option not in ("speculative_eagle_topk", "draft", "draft_rope_theta")

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        """A tree of depth S; a tier has a row for each of its steps, in whatever branches."""
        nodes = args.speculative_num_draft_tokens
        if args.speculative_adaptive and nodes is not None:
            raise ValueError(
                f"speculative_num_draft_tokens={nodes} with speculative_adaptive=True: a tier of "
                f"{self.name} has as many as steps, and one; leave it None"
            )
        if steps is None:
            steps = args.speculative_num_steps
            steps = (nodes or DEFAULT_NODES) - 1 if steps is None else steps
        least = 0 if args.speculative_adaptive else 1
        if not least <= steps < MAX_NODES:
            raise ValueError(
                f"speculative_num_steps={steps} must be from {least} to {MAX_NODES - 1}; set "
                "speculative_algorithm=None to decode without speculation"
            )
        nodes = nodes or steps + 1
        most = min(MAX_NODES, 1 + steps * self.breadth)
        if not steps < nodes <= most:
            raise ValueError(
                f"speculative_num_draft_tokens={nodes} must be from {steps + 1}, a row for each of "
                f"speculative_num_steps={steps} and one, to {most}, which "
                f"speculative_ngram_max_bfs_breadth={self.breadth} can fill"
            )
        if self.breadth == 1 or nodes <= 2:
            return DraftShape(steps, 1, nodes)
        return NgramShape(steps, self.breadth, nodes)

    def open_draft(self, args: Any, target: TargetCheckpoint, draft: Any) -> tuple[Corpus, ...]:
        """The corpus, if there is one; ``draft`` is another one as large, in a weight update."""
        path = args.speculative_ngram_external_corpus_path if draft is None else draft
        if path is None:
            return ()
        corpus = open_corpus(
            path,
            None if args.skip_tokenizer_init else target.load_tokenizer(),
            vocab_size=target.config.vocab_size,
            max_tokens=args.speculative_ngram_external_corpus_max_tokens,
            window=self.window[1],
        )
        return (corpus,)

    def draft_model(
        self, config: CorpusConfig | None, implementation: str | None
    ) -> FlatModel[Any]:
        return FlatModel.empty() if config is None else FlatModel.of(partial(CorpusTable, config))

    @property
    def needs_history(self) -> bool:
        return True

    def draft_bytes(self, batch: int, context: int, shape: DraftShape) -> int:
        # The search has arrays [B, C], and the tree compares all candidates with each other. On a
        # CPU XLA takes 12.1 bytes per token of a history, and 4.2 to 4.6 per pair.
        return batch * (16 * context + 5 * (shape.steps * self.breadth) ** 2)

    def is_ngram(self) -> bool:
        return True

    # traced

    def propose(
        self, batch: Batch, state: State, rows: Rows, shape: DraftShape
    ) -> tuple[VerifyInput, State]:
        """A row whose text's end is new proposes nothing."""
        if shape.steps == 0:
            return chain_input(batch.bonus_tokens[:, None], batch.seq_lens), state
        history, num_tokens = batch.history, batch.seq_lens + 1
        sizes: Any = {"window": self.window, "most": self.breadth, "length": shape.steps}
        found = from_history(history, num_tokens, **sizes)
        if self.has_corpus:
            ends = last_tokens(history, num_tokens, self.window[1])
            table = batch.draft
            found = joined(found, from_corpus(table.tokens[...], table.order[...], ends, **sizes))
        sizes = {"num_draft_tokens": shape.nodes, "by_frequency": self.by_frequency}
        return ngram_tree(batch.bonus_tokens, batch.seq_lens, found, **sizes), state


NGRAM = Ngram("NGRAM")

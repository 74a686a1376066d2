"""N-gram drafting: find the last tokens earlier in the text or in a corpus; propose what followed.

It needs no draft network and keeps no state between rounds. It reads the request's history on the
device, so a round needs nothing from the host and can be dispatched early.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints.checkpoint import Checkpoint
from specjax.checkpoints.target import TargetCheckpoint
from specjax.checkpoints.tensors import in_memory
from specjax.checks import is_integer
from specjax.config import MAX_NODES
from specjax.json_file import read_json_lines
from specjax.models.declare import Recipes
from specjax.models.flat import FlatModel
from specjax.speculative.algorithm import Batch, Proposal, Rows, SpeculativeAlgorithm, State
from specjax.speculative.ngram_match import (
    from_corpus,
    from_history,
    joined,
    last_tokens,
    ngram_tree,
)
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape

SEPARATOR = -1


@dataclass(frozen=True)
class CorpusConfig:
    """The sizes of a corpus; compiled functions depend on them."""

    num_tokens: int  # N, number of tokens in all documents, including separators
    num_places: int  # P, number of positions that are followed by a token
    window: int  # number of tokens by which positions are sorted

    def served(self, length: int, kv_cache_dtype: str) -> "CorpusConfig":
        return self


@dataclass(frozen=True)
class Corpus(Checkpoint[Any]):
    """A corpus read from a file and sorted for search: ``tokens`` i32 [N] and ``order`` i32 [P]."""

    is_in_memory: ClassVar[bool] = True

    def quantised_draft(self, kind: str | None, *, rounds_activations: bool = False) -> "Corpus":
        return self

    def describe(self) -> str:
        return f"corpus {self.path}: {self.config.num_places:,} tokens"

    def check_weights(self) -> None:
        """Nothing to check: the corpus is already in memory."""

    def load_weights(self) -> dict[str, np.ndarray]:
        source = self._open_source()
        return {name: source.read(name) for name in source.infos}

    @cached_property
    def recipes(self) -> Recipes:
        raise ValueError(
            f"named_tensors cannot replace the corpus {self.path}; write another file, and "
            "pass its path as draft_path"
        )


def open_corpus(
    path: str | Path, tokenizer: Any, *, vocab_size: int, max_tokens: int, window: int
) -> Corpus:
    """Read a JSON lines file; each line is a document, as a string or a list of token ids.

    Raises ValueError, which names the line, if a line has another form or if the documents up to it
    have more than ``max_tokens`` tokens.
    """
    num_left = max_tokens

    def read(document: Any) -> list[int]:
        nonlocal num_left
        ids = _token_ids(document, tokenizer, vocab_size)
        num_left -= len(ids)
        if num_left < 0:
            raise ValueError(
                f"more than speculative_ngram_external_corpus_max_tokens={max_tokens} tokens up "
                "to this line; shorten the corpus, or raise the limit"
            )
        return ids

    try:
        documents = [ids for ids in read_json_lines(Path(path).expanduser(), read) if ids]
        tokens, order = sort_corpus(documents, window)
    except ValueError as error:
        knob = f"speculative_ngram_external_corpus_path={str(path)!r}"
        raise ValueError(f"{knob}: {error}") from error
    source = in_memory({"tokens": tokens, "order": order}, Path(path))
    return Corpus(CorpusConfig(len(tokens), len(order), window), source.path, lambda: source)


def _token_ids(document: Any, tokenizer: Any, vocab_size: int) -> list[int]:
    if isinstance(document, str):
        if tokenizer is None:
            raise ValueError("a text needs a tokenizer, but none is loaded; give token ids")
        document = tokenizer.encode(document, add_special_tokens=False)
    if not isinstance(document, list) or not all(map(is_integer, document)):
        raise ValueError("neither a string nor a list of token ids")
    if document and not 0 <= min(document) <= max(document) < vocab_size:
        raise ValueError(
            f"token ids must be in [0, vocab_size={vocab_size}) of the target; got values from "
            f"{min(document)} to {max(document)}"
        )
    return document


def sort_corpus(documents: list[list[int]], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate documents, and sort their positions by the tokens that lead up to them.

    Returns tokens i32 ``[N]``, with a separator before and after each document, and positions i32
    ``[P]``, those that are followed by a token. Positions are sorted by the ``window`` tokens up to
    and including their own, last token first, then by position. Raises ValueError if P is 0.
    """
    tokens = np.array([SEPARATOR, *(t for text in documents for t in (*text, SEPARATOR))], np.int32)
    ranks, _ = _context_ranks(tokens.astype(np.int64) + 1, window)
    order = np.argsort(ranks, kind="stable").astype(np.int32)
    is_continued = np.append(tokens[1:] != SEPARATOR, False) & (tokens != SEPARATOR)
    order = order[is_continued[order]]
    if not order.size:
        raise ValueError("the corpus needs a document of two or more tokens")
    return tokens, order


def _context_ranks(tokens: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank positions by the ``width`` tokens up to them; ignore tokens before a separator.

    Ranks halves, then pairs of halves. Also returns whether the tokens include a separator.
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


class CorpusTable(nnx.Module):
    """A corpus on the device, in the order of ``sort_corpus``."""

    def __init__(self, config: CorpusConfig) -> None:
        self.tokens = nnx.Variable(jax.ShapeDtypeStruct((config.num_tokens,), jnp.int32))
        self.order = nnx.Variable(jax.ShapeDtypeStruct((config.num_places,), jnp.int32))


@dataclass(frozen=True)
class Ngram(SpeculativeAlgorithm):
    """Drafts trees of tokens that followed earlier matches. It has no state and no rows."""

    needs_history: ClassVar[bool] = True
    window: tuple[int, int] = (1, 12)  # minimum and maximum tokens to match at the end of the text
    breadth: int = 10  # maximum number of matches whose continuations form a tree
    by_frequency: bool = False  # whether to prefer frequent continuations over recent ones
    has_corpus: bool = False  # whether to search a corpus in addition to the text

    # host side

    def create_worker(self, args: Any) -> "Ngram":
        """Return the algorithm with these options. Raises ValueError if they are out of range."""
        least = args.speculative_ngram_min_match_window_size
        widest = args.speculative_ngram_max_match_window_size
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
        heads = "speculative_eagle_topk", "speculative_token_map", "draft", "draft_rope_theta"
        is_of_heads = option in (*heads, "draft_tp_size")
        return not (is_of_heads or option.startswith("speculative_draft_"))

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        """A tree of depth S, by default and in every tier with S + 1 rows in any branches."""
        nodes = args.speculative_num_draft_tokens
        if args.speculative_adaptive and nodes is not None:
            raise ValueError(
                f"speculative_num_draft_tokens={nodes} cannot be set if speculative_adaptive=True: "
                f"every tier of {self.name} has steps + 1 rows; leave it unset"
            )
        if steps is None:
            steps = args.speculative_num_steps
            steps = (nodes or DEFAULT_NODES) - 1 if steps is None else steps
        self.checked_steps(args, steps)
        nodes = nodes or steps + 1
        most = min(MAX_NODES, 1 + steps * self.breadth)
        if not steps < nodes <= most:
            raise ValueError(
                f"speculative_num_draft_tokens={nodes} must be from speculative_num_steps + 1 = "
                f"{steps + 1} to {most}, the capacity of a tree of {steps} steps with "
                f"speculative_ngram_max_bfs_breadth={self.breadth}"
            )
        if self.breadth == 1 or nodes <= 2:
            return DraftShape(steps, 1, nodes)
        return DraftShape(steps, self.breadth, nodes, stores_drafts=False)

    def open_draft(self, args: Any, target: TargetCheckpoint, draft: Any) -> tuple[Corpus, ...]:
        """Open the corpus, if any. In a weight update, ``draft`` is another one of equal size."""
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
        self, config: CorpusConfig | None, implementation: str | None, shards: int = 1
    ) -> FlatModel[Any]:
        return FlatModel.empty() if config is None else FlatModel.of(partial(CorpusTable, config))

    # traced

    def propose(self, batch: Batch, state: State, rows: Rows, shape: DraftShape) -> Proposal:
        """Draft a tree for each request; without a match, nothing is proposed."""
        if shape.steps == 0:
            return chain_input(batch.bonus_tokens[:, None], batch.seq_lens), state
        history, num_tokens = batch.history, batch.seq_lens + 1
        sizes: Any = {"window": self.window, "most": self.breadth, "length": shape.steps}
        paths = from_history(history, num_tokens, **sizes)
        if self.has_corpus:
            ends = last_tokens(history, num_tokens, self.window[1])
            table = batch.draft
            paths = joined(paths, from_corpus(table.tokens[...], table.order[...], ends, **sizes))
        sizes = {"num_draft_tokens": shape.nodes, "by_frequency": self.by_frequency}
        return ngram_tree(batch.bonus_tokens, batch.seq_lens, paths, **sizes), state


NGRAM = Ngram("NGRAM")

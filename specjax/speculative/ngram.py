"""N-gram drafts: what followed the last tokens before, in the request's own text or in a corpus.

No network drafts and nothing is kept between rounds. The text is the device's history of the
request, so that a round needs nothing of the host and may run ahead.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.checkpoints.corpus import Corpus, CorpusConfig, open_corpus
from specjax.checkpoints.target import TargetCheckpoint
from specjax.config import MAX_NODES
from specjax.models.flat import FlatModel
from specjax.speculative.algorithm import Batch, PromptChunks, Rows, SpeculativeAlgorithm, State
from specjax.speculative.ngram_match import (
    from_corpus,
    from_history,
    joined,
    last_tokens,
    ngram_tree,
)
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape, VerifyInput, VerifyOutput

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

    def draft_model(self, config: CorpusConfig | None, kernels: str) -> FlatModel[Any]:
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

    def prefill(
        self, batch: Batch, state: State, rows: Rows, chunks: PromptChunks, features: jax.Array
    ) -> tuple[State, Rows]:
        return state, rows

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
        tree, count = ngram_tree(
            batch.bonus_tokens,
            found,
            num_draft_tokens=shape.nodes,
            by_frequency=self.by_frequency,
        )
        return tree.verify_input(batch.seq_lens, count), state

    def extend(
        self, batch: Batch, state: State, rows: Rows, verified: VerifyOutput, shape: DraftShape
    ) -> tuple[State, Rows]:
        return state, rows


NGRAM = Ngram("NGRAM")

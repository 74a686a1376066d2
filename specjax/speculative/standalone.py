"""STANDALONE: a separate language model drafts from the text alone.

Positions and alignment: the draft's KV index ``i`` holds token ``i``. With ``seq_lens`` n, a round
starts with the draft KV of all tokens before n - 1. The first pass reads the tokens at n - 1 and n
(the bonus token), and gives the first drafted level. Each further level takes one pass at positions
after n, so S levels take S passes. Accepted drafts already have their KV, except the last draft,
which the next round's first pass reads. The KV of a tree's accepted drafts is moved.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from specjax.checkpoints.draft import open_draft_model
from specjax.checkpoints.target import TargetCheckpoint
from specjax.models.decoder import DraftLM
from specjax.speculative.algorithm import Batch, PromptChunks, Proposal, Rows, State
from specjax.speculative.drafting import NetworkAlgorithm, check_topk, draft_levels, first_level
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape, VerifyOutput


@dataclass(frozen=True)
class Standalone(NetworkAlgorithm):
    """Drafts chains and trees with a draft model; each level takes one pass.

    The draft's KV pool is the only state between rounds.
    """

    network: ClassVar[Any] = DraftLM

    # host side

    def validate(self, args: Any) -> None:
        super().validate(args)
        if args.draft is None:
            raise ValueError(
                f"draft=None, but speculative_algorithm={self.name} needs a draft model; "
                "pass a directory, a GGUF file or a repo id"
            )

    def reads(self, option: str) -> bool:
        return option != "draft_rope_theta" and super().reads(option)

    def open_draft(
        self, args: Any, target: TargetCheckpoint, draft: Any
    ) -> tuple[TargetCheckpoint, ...]:
        """Open the model that ``draft`` names, with the target's tokenizer and context length."""
        opened = open_draft_model(
            draft,
            target,
            context_length=args.context_length,
            with_tokenizer=not args.skip_tokenizer_init,
        )
        check_topk(args.speculative_eagle_topk, opened.config.vocab_size)
        return (opened,)

    @property
    def takes_forced_drafts(self) -> bool:
        return False  # the KV of accepted drafts is that of drafting

    @property
    def lookahead(self) -> int:
        """The KV of a token is certain to exist only once two more tokens follow it."""
        return 2

    # traced

    def prefill(
        self, batch: Batch, state: State, rows: Rows, chunks: PromptChunks, features: Array
    ) -> tuple[State, Rows]:
        """Run the draft over the prompt tokens to store their KV."""
        by_token = batch.inputs_of_segments(chunks.segments)
        where = chunks.positions, state, chunks.attend
        _, _, state = batch.draft(chunks.tokens, *where, by_token=by_token)
        return state, rows

    def propose(self, batch: Batch, state: State, rows: Rows, shape: DraftShape) -> Proposal:
        """Run the draft over the last two tokens, and then once per level except the last."""
        if shape.steps == 0:
            return chain_input(batch.bonus_tokens[:, None], batch.seq_lens), state
        hidden, state = _read(batch, state, 2)
        drafted = first_level(batch, hidden, batch.seq_lens, shape.topk)
        return draft_levels(
            batch,
            state,
            drafted,
            shape,
            lambda _, tokens, __, *where: _run(batch, tokens, *where),
            start=1,
        )

    def extend(
        self, batch: Batch, state: State, rows: Rows, verified: VerifyOutput, shape: DraftShape
    ) -> tuple[State, Rows]:
        """Move the draft KV of a tree's accepted path to its positions in the text.

        In a round without drafts, store the KV of the token before the bonus token, so that
        drafting can resume in any round.
        """
        if shape.steps == 0:
            return _read(batch, state, 1)[1], rows
        if verified.outputs.draft_rows is None:
            return state, rows
        path = jnp.where(verified.accept_index >= 0, verified.outputs.draft_rows, -1)
        return batch.pages.move(state, batch.seq_lens, path), rows


def _run(batch: Batch, tokens: Array, *where: Any) -> tuple[Array, Array]:
    """Run the draft over tokens i32 ``[B, T]``; return hidden states ``[B, T, D]`` and its KV."""
    by_token = batch.inputs_of_rows(jnp.ones(tokens.shape, bool))
    return batch.draft(tokens, *where, by_token=by_token)[::2]


def _read(batch: Batch, state: State, count: int) -> tuple[Array, Array]:
    """Run the draft over 1 or 2 tokens from n - 1 on; return the last hidden state ``[B, D]``."""
    begin = jnp.maximum(batch.seq_lens - 1, 0)  # padding rows have no token
    tokens = jnp.stack([batch.tokens[batch.slots, begin], batch.bonus_tokens], axis=1)[:, :count]
    positions = begin[:, None] + jnp.arange(count, dtype=jnp.int32)
    attend = batch.pages.attend(begin, count)
    hidden, state = _run(batch, tokens, positions, state, attend)
    return hidden[:, -1], state


STANDALONE = Standalone("STANDALONE")

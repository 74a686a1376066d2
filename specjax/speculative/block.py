"""DFLASH and DSPARK: block drafters, which draft all tokens of a round in one pass.

Positions and alignment: the draft's KV index ``i`` holds the projected target features of token
``i``, so a page of the draft is valid as soon as the target's page is. With ``seq_lens`` n, a round
runs a block at positions n, n + 1, ...: the bonus token and then mask tokens. Later tokens
overwrite the keys and values of the block. The block always has its trained length, because its
rows see each other. A tier sets how many of its drafts are verified.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from specjax.checkpoints.block import BlockCheckpoint, open_block
from specjax.checkpoints.target import TargetCheckpoint
from specjax.config import MAX_NODES, BlockConfig
from specjax.kernels.markov_draft import markov_draft
from specjax.models.block import BlockDraft
from specjax.models.columns import Columns
from specjax.sampling.draw import LEAST_CONFIDENCE, draft_probs, draft_tokens
from specjax.speculative.algorithm import Batch, PromptChunks, Proposal, Rows, State
from specjax.speculative.drafting import NetworkAlgorithm, draft_logits
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape, VerifyOutput


@dataclass(frozen=True)
class Block(NetworkAlgorithm):
    """Drafts a chain in one pass. Its KV pool is the only state, and rows are empty."""

    network: ClassVar[Any] = BlockDraft
    has_markov: bool  # whether a Markov head adjusts the logits of each draft to the previous draft

    # host side

    def reads(self, option: str) -> bool:
        return option != "speculative_eagle_topk" and super().reads(option)

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        """A chain of the drafts that are verified; by default, as many as a chain can have."""
        if steps is not None:
            return DraftShape.chain(steps)
        steps, nodes = args.speculative_num_steps, args.speculative_num_draft_tokens
        if nodes is not None and nodes != (nodes if steps is None else steps + 1):
            raise ValueError(
                f"speculative_num_draft_tokens={nodes} must be speculative_num_steps + 1 = "
                f"{steps + 1} with speculative_algorithm={self.name}, whose block always has its "
                "trained length; set only one of the two"
            )
        if steps is None:
            nodes = MAX_NODES if nodes is None else nodes
            if not 2 <= nodes <= MAX_NODES:
                raise ValueError(
                    f"speculative_num_draft_tokens={nodes} must be from 2 to {MAX_NODES}; or set "
                    "speculative_algorithm=None to decode without speculation"
                )
            steps = nodes - 1
        return DraftShape.chain(self.checked_steps(args, steps))

    def fit_shapes(self, args: Any, config: BlockConfig) -> tuple[DraftShape, ...]:
        """Give tiers the rows of the block; refuse tiers with more drafts, or drop default ones."""
        most, adaptive = config.num_drafts, args.adaptive
        steps, nodes = args.speculative_num_steps, args.speculative_num_draft_tokens
        candidates = () if adaptive is None else adaptive.candidate_steps
        limits = [("candidate_steps", count, most) for count in candidates]
        limits += [("speculative_num_steps", steps, most)]
        limits += [("speculative_num_draft_tokens", nodes, most + 1)]
        for name, value, limit in limits:
            if value is not None and value > limit:
                raise ValueError(
                    f"{name}={value} must be at most {limit} for the {most} drafts of a block of "
                    f"{config.block} rows"
                )
        shapes = {shape for shape in args.shapes if shape.steps <= most}
        is_default = not candidates if adaptive else steps is None and nodes is None
        if is_default:
            shapes.add(DraftShape.chain(most))
        return tuple(s._replace(block=config.block) if s.steps else s for s in sorted(shapes))

    def open_draft(
        self, args: Any, target: TargetCheckpoint, draft: Any
    ) -> tuple[BlockCheckpoint, ...]:
        """Open the checkpoint that ``draft`` names, or else the one included with the target."""
        opened = open_block(draft, target, rope_theta=args.draft_rope_theta)
        has_markov = opened.config.markov_head is not None
        if has_markov != self.has_markov:
            other = (DSPARK if has_markov else DFLASH).name
            raise ValueError(
                f"{opened.path} is a drafter {'with' if has_markov else 'without'} a Markov head; "
                f"set speculative_algorithm={other!r}"
            )
        return (opened,)

    # traced

    def prefill(
        self, batch: Batch, state: State, rows: Rows, chunks: PromptChunks, features: Array
    ) -> tuple[State, Rows]:
        """Write the prompt's keys and values, projected from the target's features."""
        return batch.draft.store(features, chunks.positions, state, chunks.attend.store), rows

    def propose(self, batch: Batch, state: State, rows: Rows, shape: DraftShape) -> Proposal:
        roots, lens, draft = batch.bonus_tokens[:, None], batch.seq_lens, batch.draft
        if shape.steps == 0:
            return chain_input(roots, lens), state
        config, size = draft.config, shape.block
        masks = jnp.full((len(lens), size - 1), config.mask_token_id, jnp.int32)
        positions = lens[:, None] + jnp.arange(size, dtype=jnp.int32)
        mask = jnp.ones((len(lens), size, size), bool)
        hidden, state = draft(
            jnp.concatenate([roots, masks], axis=1),
            positions,
            state,
            batch.pages.attend(lens, size, tree_mask=mask),
            batch.pages.attend(lens, size),
            batch.target,
        )
        begin = 0 if config.anchor_first else 1
        hidden = hidden[:, begin : begin + shape.steps]
        drafts, scores, logits = _draw(batch, hidden)
        tree = chain_input(jnp.concatenate([roots, drafts], axis=1), lens)
        if batch.draw.reads_confidence:
            confidences = draft.confidences(hidden, tree.draft_tokens[:, :-1])
            if confidences is not None:
                scores = jnp.maximum(confidences, LEAST_CONFIDENCE)
            tree = replace(tree, confidences=scores)
        if batch.draw.acceptance.uses_rejection:
            assert not isinstance(logits, Columns)  # the batch is not greedy
            width = batch.target.config.vocab_size
            probs = draft_probs(logits, draft.vocabulary, batch.sampling, batch.draw, width)
            tree = replace(tree, draft_probs=probs)
        return tree, state

    def extend(
        self, batch: Batch, state: State, rows: Rows, verified: VerifyOutput, shape: DraftShape
    ) -> tuple[State, Rows]:
        """Overwrite the block's keys and values with those of the accepted tokens.

        The values of rows after the accepted ones are overwritten by the next round.
        """
        width, lens = verified.accept_tokens.shape[1], batch.seq_lens
        positions = lens[:, None] + jnp.arange(width, dtype=jnp.int32)
        store = batch.pages.store(lens, width)
        return batch.draft.store(verified.features, positions, state, store), rows


def _draw(batch: Batch, hidden: Array) -> tuple[Array, Array, Array | Columns]:
    """Draw drafts i32 ``[B, N]`` for states ``[B, N, D]``.

    Also return their scores f32 ``[B, N]`` and the logits f32 ``[B, N, V]``, or own columns. With a
    Markov head, the logits of a draft depend on the previous draft.
    """
    draft, markov, count = batch.draft, batch.draft.markov, hidden.shape[1]
    logits = draft_logits(batch, hidden)
    places = batch.seq_lens[:, None] + jnp.arange(1, count + 1, dtype=jnp.int32)

    def best(logits: Array | Columns, places: Array) -> tuple[Array, Array]:
        drawn = draft_tokens(logits, draft.vocabulary, places, batch.sampling, batch.draw, 1)
        return draft.target_ids(drawn[1][..., 0]), drawn[0][..., 0]

    if markov is None:
        return *best(logits, places), logits
    logits = logits.whole() if isinstance(logits, Columns) else logits
    config = batch.draw
    needs_logits = config.reads_confidence or config.acceptance.uses_rejection
    if config.greedy and markov.kind == "vanilla" and not needs_logits:
        weights = markov.embedding.table[...], markov.output.kernel[...]
        inputs = logits, batch.bonus_tokens, *weights, draft.vocabulary
        ids = markov_draft(*inputs, implementation=config.implementation)
        return ids, jnp.ones(ids.shape, jnp.float32), logits
    tokens, memory, drafts, adjusted = batch.bonus_tokens, markov.start(len(hidden)), [], []
    for i in range(count):
        bias, memory = markov(tokens, hidden[:, i], memory)
        adjusted.append(logits[:, i] + bias)
        drafts.append(best(adjusted[-1][:, None], places[:, i : i + 1]))
        tokens = drafts[-1][0][:, 0]
    ids, scores = (jnp.concatenate(columns, axis=1) for columns in zip(*drafts, strict=True))
    return ids, scores, jnp.stack(adjusted, axis=1)


DFLASH = Block("DFLASH", False)
DSPARK = Block("DSPARK", True)

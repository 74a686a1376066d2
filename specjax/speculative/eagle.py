"""EAGLE-1/2 and EAGLE-3: a draft of one or a few layers that reads features of the target.

A module for multi-token prediction in the target's checkpoint (SGLang's NEXTN) is such a draft.

Positions and alignment: the draft's KV index ``i`` holds the pair (target feature of token ``i``,
token ``i + 1``), so the first recurrent draft pass runs at position ``seq_len``
(``docs/how_it_works.md`` has an example). In a P-EAGLE head, mask tokens with constant features,
from that position on, draft all tokens after the first, without recurrent passes.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.checkpoints.draft import (
    DraftCheckpoint,
    MtpCheckpoint,
    has_modules,
    open_draft,
    open_mtp,
)
from specjax.checkpoints.target import TargetCheckpoint
from specjax.checkpoints.token_map import with_token_map
from specjax.config import DraftConfig
from specjax.models.eagle import Eagle3Head, build_head
from specjax.models.flat import Networks
from specjax.speculative.algorithm import Batch, PromptChunks, Proposal, State, StateSizes
from specjax.speculative.drafting import (
    DraftInput,
    NetworkAlgorithm,
    best_tokens,
    check_topk,
    draft_levels,
    drafted_chain,
    first_level,
)
from specjax.speculative.future_map import FutureMap
from specjax.types import DraftShape, VerifyOutput


@dataclass(frozen=True)
class Eagle(NetworkAlgorithm):
    """Drafts chains and trees; each level except the first takes one pass of the draft.

    Rows are a :class:`DraftInput`. ``checkpoint_format`` is the format of the drafts that the
    algorithm opens, ``"eagle-1"`` or ``"eagle-3"``.
    """

    network: ClassVar[Any] = build_head
    checkpoint_format: str

    # host side

    def reads(self, option: str) -> bool:
        return option == "speculative_token_map" or super().reads(option)

    def open_draft(
        self, args: Any, target: TargetCheckpoint, draft: Any
    ) -> tuple[DraftCheckpoint | MtpCheckpoint, ...]:
        """Open the checkpoint that ``draft`` names, or else the target's default draft.

        Of a checkpoint with modules for multi-token prediction, EAGLE opens the first one.
        """
        theta, topk = args.draft_rope_theta, args.speculative_eagle_topk
        opened: Any
        if self.checkpoint_format == "eagle-1" and has_modules(draft, target):
            opened = open_mtp(draft, target, num_modules=1, rope_theta=theta)
        else:
            opened = open_draft(
                draft, target, checkpoint_format=self.checkpoint_format, rope_theta=theta
            )
        if args.speculative_token_map is not None:
            opened = with_token_map(opened, args.speculative_token_map, target)
        config = opened.config
        size = getattr(config, "draft_vocab_size", config.vocab_size)
        check_topk(topk, config.hot.size if config.hot else size)
        if topk > 1 and opened.config.mask_token_id is not None:
            raise ValueError(
                f"speculative_eagle_topk={topk} must be 1: {opened.path} is a P-EAGLE head, which "
                "drafts chains"
            )
        return (opened,)

    def fit_shapes(self, args: Any, config: DraftConfig) -> tuple[DraftShape, ...]:
        """Return the tiers; for a P-EAGLE head, with the number of rows in its drafting pass."""
        return masked_shapes(args.shapes, config)

    def abstract_rows(self, networks: Networks, sizes: StateSizes) -> DraftInput:
        config, slots, topk = networks.draft_config, sizes.num_slots, sizes.shape.topk
        hidden: tuple[int, ...] = slots, config.hidden_size
        if config.mask_token_id is not None:  # a chain, stored with levels instead of branches
            topk = sizes.shape.depth
            hidden = slots, topk, config.hidden_size
        make: Any = jax.ShapeDtypeStruct
        probs, ids = (make((slots, topk), dtype) for dtype in (jnp.float32, jnp.int32))
        return DraftInput(probs, ids, make(hidden, config.dtypes.activations))

    @property
    def lookahead(self) -> int:
        """The KV at a position depends on the token after it."""
        return 1

    # traced

    def build_disagg_draft_input(
        self,
        rows: DraftInput | None,
        bonus_tokens: Array,
        seq_lens: Array,
        slots: Array,
        future: FutureMap,
    ) -> DraftInput | None:
        """Keep the first K branches or levels. A P-EAGLE head may have drafted fewer levels."""
        if rows is None:
            return None
        topk, hidden = future.rows.topk, rows.hidden
        if hidden.ndim == 2:
            return DraftInput(rows.topk_probs[:, :topk], rows.topk_ids[:, :topk], hidden)

        def fitted(x: Array) -> Array:
            missing = max(0, topk - x.shape[1])
            return jnp.pad(x[:, :topk], ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))

        return jax.tree.map(fitted, rows)

    def prefill(
        self, batch: Batch, state: State, rows: DraftInput, chunks: PromptChunks, features: Array
    ) -> tuple[State, DraftInput]:
        """Run the draft over the prompt's positions, each with the token that follows it."""
        draft = batch.draft
        hidden, state = draft(
            draft.embed(chunks.next_tokens, batch.target),
            draft.fuse(features),
            chunks.positions,
            state,
            chunks.attend,
            row=chunks.last[None],
        )
        lens = chunks.positions[0, chunks.last] + 1
        if draft.config.mask_token_id is None:
            return state, first_level(batch, hidden[0], lens, rows.topk)
        lens = chunks.segments.starts + chunks.segments.counts
        hidden, state = draft_masked(batch, state, lens, hidden[0][:, None], rows.topk)
        return state, masked_levels(batch, hidden, lens, rows.topk)

    def propose(self, batch: Batch, state: State, rows: DraftInput, shape: DraftShape) -> Proposal:
        """Draft from the first level in ``rows``; each further level takes one pass of the draft.

        With a P-EAGLE head, the rows already hold the whole chain.
        """
        draft, target = batch.draft, batch.target
        if draft.config.mask_token_id is not None:
            depth = shape.depth
            is_drafted = rows.topk_probs[:, :depth] > 0
            tokens = [batch.bonus_tokens, *jnp.unstack(rows.topk_ids[:, :depth], axis=1)]
            states = [rows.hidden[:, i : i + 1] for i in range(depth)]
            scores = list(jnp.unstack(rows.topk_probs[:, :depth], axis=1))
            num_proposed = jnp.sum(is_drafted, axis=1, dtype=jnp.int32)
            return drafted_chain(batch, tokens, scores, num_proposed, states, shape), state
        return draft_levels(
            batch,
            state,
            rows,
            shape,
            lambda _, tokens, hidden, *where: draft(draft.embed(tokens, target), hidden, *where),
        )

    def extend(
        self,
        batch: Batch,
        state: State,
        rows: DraftInput,
        verified: VerifyOutput,
        shape: DraftShape,
    ) -> tuple[State, DraftInput]:
        """Run the draft once over the accepted tokens, with their target features.

        The pass overwrites the draft KV that the recurrent passes wrote. What it writes after the
        accepted tokens is overwritten by the next round. A round without drafts only stores the
        KV, so that drafting can resume later. With a P-EAGLE head, mask tokens follow in the pass.
        """
        draft = batch.draft
        tokens, features = verified.accept_tokens, verified.features
        row = verified.num_accepted_drafts
        is_masked = draft.config.mask_token_id is not None and shape.steps > 0
        if is_masked:
            tokens, features, row = with_masks(draft, verified, shape.depth)
        width = tokens.shape[1]
        positions = batch.seq_lens[:, None] + jnp.arange(width, dtype=jnp.int32)
        inputs = draft.embed(tokens, batch.target), draft.fuse(features), positions, state
        attend = batch.pages.attend(batch.seq_lens, width)
        if shape.steps == 0:
            is_one = draft.config.num_layers == 1
            state = draft.store(*inputs, attend.store) if is_one else draft(*inputs, attend)[1]
            return state, replace(rows, topk_probs=jnp.zeros_like(rows.topk_probs))
        hidden, state = draft(*inputs, attend, row=row)
        lens = batch.seq_lens + verified.num_accepted_tokens
        if is_masked:
            return state, masked_levels(batch, hidden, lens, rows.topk)
        return state, first_level(batch, hidden[:, 0], lens, rows.topk)


# P-EAGLE


def masked_shapes(shapes: tuple[DraftShape, ...], config: DraftConfig) -> tuple[DraftShape, ...]:
    """Set the rows of a P-EAGLE pass in tiers: accepted tokens, then a mask per further draft."""
    if config.mask_token_id is None:
        return shapes
    return tuple(s._replace(block=s.accept_width + s.depth - 1) if s.steps else s for s in shapes)


def with_masks(draft: Eagle3Head, verified: VerifyOutput, depth: int) -> tuple[Array, Array, Array]:
    """Append masks to accepted tokens; return tokens i32 ``[B, W]`` and features ``[B, W, F]``.

    W is the accept width plus ``depth - 1``. Also returns the rows i32 ``[B, depth]`` that draft:
    the row of the last accepted token and the masks after it. Later rows have no effect.
    """
    padding = (0, 0), (0, depth - 1)
    tokens = jnp.pad(verified.accept_tokens, padding)
    features = jnp.pad(verified.features, (*padding, (0, 0)))
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    is_known = index < verified.num_accepted_tokens[:, None]
    assert draft.mask_hidden is not None
    masked = draft.mask_hidden[...].astype(features.dtype)
    return (
        jnp.where(is_known, tokens, jnp.int32(draft.config.mask_token_id)),
        jnp.where(is_known[:, :, None], features, masked),
        verified.num_accepted_drafts[:, None] + index[:depth],
    )


def draft_masked(
    batch: Batch, state: State, seq_lens: Array, first_hidden: Array, depth: int
) -> tuple[Array, State]:
    """Compute the states ``[B, depth, D]`` that draft a chain, given the first, ``[B, 1, D]``.

    It takes one pass over ``depth - 1`` mask tokens. ``seq_lens`` i32 ``[B]`` are draft KV lengths.
    """
    if depth == 1:
        return first_hidden, state
    draft, count = batch.draft, depth - 1
    tokens = jnp.full((seq_lens.shape[0], count), draft.config.mask_token_id, jnp.int32)
    fused = draft.fuse(draft.mask_hidden[...])
    hidden, state = draft(
        draft.embed(tokens, batch.target),
        jnp.broadcast_to(fused, (*tokens.shape, fused.shape[-1])),
        seq_lens[:, None] + jnp.arange(count, dtype=jnp.int32),
        state,
        batch.pages.attend(seq_lens, count),
    )
    return jnp.concatenate([first_hidden, hidden], axis=1), state


def masked_levels(batch: Batch, hidden: Array, seq_lens: Array, width: int) -> DraftInput:
    """Draw a chain from states ``[B, N, D]``; pad it to ``width`` levels that hold no drafts.

    ``seq_lens`` i32 ``[B]`` are the lengths in the round that will verify the chain.
    """
    count = hidden.shape[1]
    positions = seq_lens[:, None] + jnp.arange(1, count + 1, dtype=jnp.int32)
    drawn = best_tokens(batch, hidden, positions, 1)
    padding = (0, 0), (0, width - count)
    probs, ids = (jnp.pad(x[..., 0], padding) for x in drawn)
    return DraftInput(probs, ids, jnp.pad(hidden, (*padding, (0, 0))))


EAGLE = Eagle("EAGLE", "eagle-1")
EAGLE3 = Eagle("EAGLE3", "eagle-3")

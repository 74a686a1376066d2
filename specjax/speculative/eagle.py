"""EAGLE-1/2 and EAGLE-3: a draft of one or a few layers that reads features of the target.

Positions and alignment: the draft's KV index ``i`` holds the pair (target feature of token ``i``,
token ``i + 1``), so the first recurrent draft pass runs at position ``seq_len``. See
``docs/how_it_works.md`` for a worked example.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.draft import DraftCheckpoint, open_draft
from specjax.checkpoints.target import TargetCheckpoint
from specjax.config import DraftConfig
from specjax.models.eagle import Eagle3Head, EagleHead, build_head
from specjax.models.flat import FlatModel, Networks
from specjax.speculative.algorithm import Batch, PromptChunks, State, StateSizes
from specjax.speculative.drafting import (
    DraftInput,
    NetworkAlgorithm,
    check_topk,
    draft_levels,
    first_level,
)
from specjax.speculative.future_map import FutureMap
from specjax.types import DraftShape, VerifyInput, VerifyOutput


@dataclass(frozen=True)
class Eagle(NetworkAlgorithm):
    """Drafts chains and trees; each level except the first takes one pass of the draft.

    Rows are a :class:`DraftInput`.

    Attributes:
        checkpoint_format: format of the drafts that it opens, ``"eagle-1"`` or ``"eagle-3"``.
    """

    checkpoint_format: str

    # host side

    def open_draft(
        self, args: Any, target: TargetCheckpoint, draft: Any
    ) -> tuple[DraftCheckpoint, ...]:
        """The checkpoint that ``draft`` names, or the target's default draft."""
        theta = args.draft_rope_theta
        opened = open_draft(
            draft, target, checkpoint_format=self.checkpoint_format, rope_theta=theta
        )
        check_topk(args.speculative_eagle_topk, opened.config.draft_vocab_size)
        return (opened,)

    def draft_model(
        self, config: DraftConfig, implementation: str | None
    ) -> FlatModel[Eagle3Head | EagleHead]:
        return FlatModel.of(partial(build_head, config, implementation=implementation))

    def abstract_rows(self, networks: Networks, sizes: StateSizes) -> DraftInput:
        config, slots, topk = networks.draft_config, sizes.num_slots, sizes.shape.topk
        fields: dict[str, Any] = {
            "topk_probs": jax.ShapeDtypeStruct((slots, topk), jnp.dtype(jnp.float32)),
            "topk_ids": jax.ShapeDtypeStruct((slots, topk), jnp.dtype(jnp.int32)),
            "hidden": jax.ShapeDtypeStruct((slots, config.hidden_size), config.dtypes.activations),
        }
        return DraftInput(**fields)

    def feature_layers(self, networks: Networks) -> tuple[int, ...]:
        """Layers of the checkpoint; none for EAGLE-1/2, which reads the last hidden state."""
        layers: tuple[int, ...] = networks.draft_config.feature_layers
        return layers

    @property
    def lookahead(self) -> int:
        """The KV at a position depends on the token after it."""
        return 1

    def is_eagle(self) -> bool:
        return True

    def is_eagle3(self) -> bool:
        return self.checkpoint_format == "eagle-3"

    # traced

    def build_disagg_draft_input(
        self,
        rows: DraftInput | None,
        bonus_tokens: jax.Array,
        seq_lens: jax.Array,
        slots: jax.Array,
        future: FutureMap,
    ) -> DraftInput | None:
        """The first K branches; the prefill engine may have drafted more."""
        if rows is None:
            return None
        topk = future.rows.topk
        return replace(rows, topk_probs=rows.topk_probs[:, :topk], topk_ids=rows.topk_ids[:, :topk])

    def prefill(
        self,
        batch: Batch,
        state: State,
        rows: DraftInput,
        chunks: PromptChunks,
        features: jax.Array,
    ) -> tuple[State, DraftInput]:
        """One pass over the same positions with the token ids shifted left by one."""
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
        return state, first_level(batch, hidden[0], lens, rows.topk)

    def propose(
        self, batch: Batch, state: State, rows: DraftInput, shape: DraftShape
    ) -> tuple[VerifyInput, State]:
        """Draft from the rows' first level; each further level takes one pass of the draft."""
        draft, target = batch.draft, batch.target
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
        """Draft-extend: one pass over the accepted tokens with their true target features.

        It overwrites the draft KV that the recurrent passes wrote. Rows after the accepted ones
        write values that the next round overwrites. A round without drafts keeps only the KV, so
        that drafting can resume later: a draft of one layer then skips attention, feed-forward and
        output head.
        """
        draft = batch.draft
        width = verified.accept_tokens.shape[1]
        positions = batch.seq_lens[:, None] + jnp.arange(width, dtype=jnp.int32)
        hidden, state = draft(
            draft.embed(verified.accept_tokens, batch.target),
            draft.fuse(verified.features),
            positions,
            state,
            batch.pages.attend(batch.seq_lens, width),
            row=verified.num_accepted_drafts,
        )
        if shape.steps == 0:
            return state, replace(rows, topk_probs=jnp.zeros_like(rows.topk_probs))
        lens = batch.seq_lens + verified.num_accepted_tokens
        return state, first_level(batch, hidden[:, 0], lens, rows.topk)


EAGLE = Eagle("EAGLE", "eagle-1")
EAGLE3 = Eagle("EAGLE3", "eagle-3")
